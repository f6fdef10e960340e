"""The units in which a degradation is counted, all in nats; `scoring.degradation` has their formulas."""

from typing import Literal, get_args

Unit = Literal["nll_token", "nll_sum", "nll_first", "kl_token", "kl_first"]
UNITS: tuple[str, ...] = get_args(Unit)
MEANINGS: dict[Unit, str] = {
    "nll_token": "mean NLL per completion token minus the reference's",
    "nll_sum": "summed NLL minus the reference's (the paper's definition)",
    "nll_first": "mean NLL of the first k completion tokens minus the reference's",
    "kl_token": "mean token KL from the reference to the model; the reference's is zero",
    "kl_first": "mean token KL over the first k completion tokens",
}
KL_UNITS = ("kl_token", "kl_first")  # divergences from the model before: never below 0
FIRST_UNITS = ("nll_first", "kl_first")  # of a completion's first k tokens
