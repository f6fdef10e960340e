"""How often a few lost rows put the running estimate of g above 0, by majorizer: a simulation of the estimate alone.

    python -m benchmarks.lost_rows

373 fixed degradations: three are 0.3, 0.1 and 0.03, the others exponential with mean 0.00025. Four rows a step in the
order of a run's stream, an exponential average with decay 0.9, 1,000 steps of which the first 100 do not count.
"""

from __future__ import annotations

import torch

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.estimators import make_estimator
from holdfast.data.streams import StepStream

ROWS, LOST, MEAN, BATCH, DECAY, STEPS, SKIPPED = 373, (0.3, 0.1, 0.03), 0.00025, 4, 0.9, 1000, 100


def share_above(degradations: torch.Tensor, majorizer: str, tau: float) -> tuple[float, float]:
    """g of all rows, and the share of steps whose estimate of it is above 0."""
    c = ChanceConstraint(tau=tau, alpha=0.05, majorizer=majorizer, beta=1 / tau, unit="kl_first")
    estimator = make_estimator("ema", size=ROWS, start_phi=0.0, decay=DECAY)
    stream, above = StepStream(ROWS, BATCH, 0, "refusals"), 0
    for step in range(STEPS):
        index = torch.tensor(stream.indices(step))
        g = estimator.update(index, c.phi(degradations[index]), None) - c.alpha
        above += step >= SKIPPED and g > 0
    return float(c.value(degradations)), above / (STEPS - SKIPPED)


def main() -> None:
    torch.manual_seed(0)
    degradations = torch.distributions.Exponential(1 / MEAN).sample((ROWS,)).double()
    degradations[: len(LOST)] = torch.tensor(LOST, dtype=torch.float64)
    print("| majorizer | tau | g of all rows | steps with an estimate above 0 |")
    print("|---|---|---|---|")
    for majorizer in ("ramp", "log_ramp", "capped_ramp"):
        for tau in (0.01, 0.02):
            g, share = share_above(degradations, majorizer, tau)
            print(f"| {majorizer} | {tau} | {g:+.3f} | {share:.2f} |")


if __name__ == "__main__":
    main()
