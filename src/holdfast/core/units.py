"""The units in which a degradation is counted, all in nats; `scoring.degradation` has their formulas."""

from typing import Literal, get_args

Unit = Literal["nll_token", "nll_sum", "nll_first", "kl_token", "kl_first"]
UNITS: tuple[str, ...] = get_args(Unit)
KL_UNITS = ("kl_token", "kl_first")  # divergences from the model before: never below 0
FIRST_UNITS = ("nll_first", "kl_first")  # of a completion's first k tokens
