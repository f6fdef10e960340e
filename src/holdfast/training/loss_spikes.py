"""Loss spikes: a step whose task loss is far above everything recent is discarded; ten in 100 steps end the run.

From the 50th step on a loss L is a spike where

    L > median + max(10 MAD, 3)    and    L > largest + 1        (nats per token; MAD: median absolute deviation),

median and MAD over the last 200 steps, the largest over these and over the outliers (the first inequality) of the last
1,000. Three nats divide the probability of every token of the step by twenty, so a batch must be of another kind
altogether, or the weights must have left the region in which the model speaks. What follows tells the two apart:

* An ordinary step follows: it was the batch. Its loss joins the others, so that rows of a rare kind are skipped once
  and then trained on like any other, however small the batches and however easy the rest. Not so above 30 nats: no
  row of a language model's data has tokens of probability 1e-13 on average.
* Spikes follow, and come to ten within 100 steps: it is the weights, which no discarded step can repair. The run ends
  with the last checkpoint from before the first of them.

A discarded step leaves weights, moments and the defense's memory as they were. Without a spike nothing is changed: the
rule only reads the loss. A loss that is not finite is not its business (`nonfinite`).
"""

import math
from statistics import median
from typing import Any

from holdfast.core.errors import NumericalError

WINDOW, OUTLIERS, WARM_UP = 200, 1000, 50
MADS, NATS, ABOVE_LARGEST = 10.0, 3.0, 1.0
BELIEVABLE = 30.0
LIMIT, WITHIN = 10, 100
EVENT = "spike"
NAMED = 20


class SpikeWatch:
    """The losses of recent steps, and the spikes among them."""

    def __init__(self) -> None:
        self.steps: list[int] = []  # the last 20 that were discarded, counted from 1 as in events.jsonl
        self.total = 0  # how many there were
        self._losses: list[float] = []
        self._outliers: list[tuple[int, float]] = []
        self._row: list[float] = []

    def _ordinary(self) -> float:
        """Above this a loss is an outlier: the first inequality; infinite while too few steps were seen."""
        if len(self._losses) < WARM_UP:
            return math.inf
        middle = median(self._losses)
        return middle + max(MADS * median([abs(loss - middle) for loss in self._losses]), NATS)

    def limit(self) -> float:
        """The largest loss that is no spike."""
        largest = max([*self._losses, *(loss for _, loss in self._outliers)], default=math.inf)
        return max(self._ordinary(), largest + ABOVE_LARGEST)

    def is_spike(self, step: int, loss: float) -> bool:
        """Take in the mean loss over a step's tokens, of all processes; whether the step is to be discarded."""
        if not math.isfinite(loss):
            return False
        ordinary = self._ordinary()
        if loss > self.limit():
            self._row.append(loss)
            self.steps = [*self.steps, step][-NAMED:]
            self.total += 1
            return True
        passed, self._row = [*(one for one in self._row if one <= BELIEVABLE), loss], []
        new = [(step, one) for one in passed if one > ordinary]
        self._outliers = [(at, one) for at, one in (*self._outliers, *new) if at > step - OUTLIERS]
        self._losses = [*self._losses, *passed][-WINDOW:]
        return False

    @property
    def in_a_row(self) -> int:
        """Spikes up to now without an ordinary step between them."""
        return len(self._row)

    @property
    def recent(self) -> list[int]:
        """The steps of the last spike and of those within 100 steps before it."""
        return [step for step in self.steps if step > self.steps[-1] - WITHIN]

    def require_passing(self, last_good: str | None) -> None:
        """Refuse to go on where spikes do not pass; `last_good`: the newest checkpoint from before `recent`'s first."""
        if len(self.recent) < LIMIT:
            return
        kept = f"the last good checkpoint is {last_good}" if last_good else "no checkpoint is older than they are"
        raise NumericalError(
            f"the task loss was far above all before in {len(self.recent)} of the last {WITHIN} steps (the last: "
            f"{self._row[-1]:.3g} nats per token in step {self.steps[-1]}, at most {self.limit():.3g} is ordinary); "
            f"none of them was applied; {kept}",
            remedy="lower learning_rate or look at the rows of these steps, then train in a new output_dir; "
            "spikes='off' goes on regardless (both under `train:` in a run file)",
        )

    def state_dict(self) -> dict[str, object]:
        return {
            "losses": list(self._losses), "outliers": [list(pair) for pair in self._outliers],
            "row": list(self._row), "steps": list(self.steps), "total": self.total,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses, self._row = list(state["losses"]), list(state["row"])
        self._outliers = [(int(step), float(loss)) for step, loss in state["outliers"]]
        self.steps, self.total = list(state["steps"]), int(state["total"])
