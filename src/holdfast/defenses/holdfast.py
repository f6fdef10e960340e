"""The chance constraint, enforced at every optimizer step by a safety filter.

Reference: *Beyond Average Safety: Chance-Constrained LLM Fine-tuning*, equations (6)-(12) and Algorithm 1.
Stage: fine-tuning. Passes per step: task forward and backward, safety forward and backward. Side data: safety pairs.

Differs from the paper's text, each by a setting that restores it (`preset: paper`):
* `space="update"` corrects the step the optimizer takes, since AdamW does not keep the inequality that the filtered
  gradient satisfies; `space="gradient"` is Algorithm 1.
* `estimator="ema"` averages value and gradient over steps, since ten examples cannot express a rate of 5 %; `"batch"`
  does not.
* `rate=0.3`, the share of the slack one step may use; the paper's kappa = 1 / learning rate is `rate=1`.
* A run file that names no unit steers by `kl_token` where an adapter is trained; the paper's is `nll_sum`.
docs/log.md has the experiment behind these.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from holdfast.constraint.estimators import make_estimator
from holdfast.constraint.filter import Space
from holdfast.constraint.filter_settings import check_settings
from holdfast.trainers.hooks import DEFENSES
from holdfast.trainers.steering import FilteredDefense


@DEFENSES.register("holdfast")
@final
class Holdfast(FilteredDefense):
    """Chance-constrained fine-tuning."""

    name = "holdfast"
    stages = ("finetune",)
    summary = "chance constraint enforced at every step by a closed-form filter (ours)"
    passes = "2 forward + backward"
    needs = frozenset({"safety"})
    reference = "Beyond Average Safety: Chance-Constrained LLM Fine-tuning"
    fsdp = True
    constrains = True
    paper = MappingProxyType({"space": "gradient", "rate": 1.0, "estimator": "batch"})

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the filter and of the estimator.

        Attributes:
            space: what is corrected, `update` (the applied step) or `gradient` (Algorithm 1).
            rate: gamma, the share of the slack one step may use.
            metric: `auto`, `identity` or `adam`; update space only.
            trust_region: largest correction in multiples of the nominal step; update space only.
            estimator: `batch`, `ema` or `table`.
            decay: weight of the past in the averages of value and gradient.
        """

        space: Space = "update"
        rate: float = 0.3
        metric: str = "auto"
        trust_region: float = 3.0
        estimator: str = "ema"
        decay: float = 0.9

        def __post_init__(self) -> None:
            """Refuse values out of range where they are written, not when training begins."""
            check_settings(self.rate, self.space, self.metric, self.trust_region, self.decay)
            make_estimator(self.estimator, size=1, start_phi=0.0, decay=self.decay)

    config: Config
