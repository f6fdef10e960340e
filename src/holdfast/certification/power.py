"""How many groups of near-duplicate prompts a certificate needs when the model is as good as one believes.

Power is the probability of certifying at a true rate p < alpha: P(Bin(n, p) <= k(n)), k(n) the most regressions that
certify. It is saw-toothed in n: it jumps where k(n) grows and falls in between, so the first n that reaches a wanted
power is always one of the jumps.

Planned are groups of one size that regress as a whole. Over their prompts the same share is tested on at least as many
of them, so that the test over groups decides, and its power is exact. With a max_weight c, groups of N prompts weigh
min(N, c), and E depends on k and n alone: exact as well. Where sizes differ, the test over prompts can fail alone.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainccinv, btdtrib

from holdfast.certification import binomial, capped_weight
from holdfast.certification.arguments import confidence_level, count, grid_alpha, rate, tally
from holdfast.certification.share import require_unit
from holdfast.core.errors import ConfigError, InfeasibleError

LARGEST = 1_000_000  # groups; nobody labels more, and the search stays within seconds
DEFAULT_POWER = 0.9
LIKELY = 0.8
POWERS = (0.8, 0.9, 0.95)
SHARES_OF_ALPHA = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)  # true rates worth showing: from a perfect model to a doubtful one
_FIRST_CHUNK = 64


class Fewest(TypedDict):
    """The smallest number of groups of which `regressions` may regress."""

    regressions: int
    groups: int


class Needed(TypedDict):
    """The groups that reach `power`, and how many may regress; both None where that is beyond what is searched."""

    power: float
    groups: int | None
    regressions: int | None


class ForPower(TypedDict):
    """The first number of groups that reaches the wanted `power` at `true_rate`, and the power it `reached`."""

    true_rate: float
    power: float
    groups: int
    regressions: int
    reached: float


class NeededAt(TypedDict):
    """A row of the table: what each power in `POWERS` needs at `true_rate`."""

    true_rate: float
    needed: list[Needed]


class LargestRate(TypedDict):
    """The highest true rate at which the groups at hand certify with probability `power`; None if they never do."""

    power: float
    largest_true_rate: float | None


class PowerAt(TypedDict):
    """The probability that the groups at hand certify at `true_rate`."""

    true_rate: float
    power: float


class WithN(TypedDict):
    """What `n` groups can certify; `most_regressions` is None where even 0 is too many."""

    n: int
    most_regressions: int | None
    smallest_alpha: float
    at_power: LargestRate
    power: list[PowerAt]


class Plan(TypedDict):
    """What `holdfast plan --json` prints; `table` is there when neither a true rate nor n was given."""

    alpha: float
    confidence: float
    openings: int
    categories: int
    max_weight: int | None
    group_size: int | None
    level: float
    fewest: list[Fewest]
    for_power: ForPower | None
    with_n: WithN | None
    table: list[NeededAt] | None


@dataclass(frozen=True)
class Design:
    """The test that is planned for: over groups, or with a max_weight over groups of `group_size` prompts each."""

    alpha: float = 0.05
    confidence: float = 0.95
    parts: int = 1
    max_weight: int | None = None
    group_size: int = 1

    def __post_init__(self) -> None:
        grid_alpha(self.alpha), confidence_level(self.confidence, self.parts)
        require_unit("groups", self.max_weight)
        count("group_size", self.group_size, least=1)

    @property
    def level(self) -> float:
        return confidence_level(self.confidence, self.parts)

    def p_value(self, k: ArrayLike, n: ArrayLike) -> NDArray[np.float64]:
        if self.max_weight is None:
            return binomial.tail(k, n, grid_alpha(self.alpha))
        weight = min(self.group_size, self.max_weight) / self.max_weight
        return capped_weight.equal_groups(k, n, weight, grid_alpha(self.alpha))

    def fewest(self, k: int) -> int:
        """Returns the smallest number of groups of which k may regress."""
        if self.max_weight is None:
            return binomial.fewest_prompts(self.alpha, self.confidence, k, parts=self.parts)
        n = int(self.first(np.array([k]))[0])
        if n > LARGEST:
            raise InfeasibleError(
                f"alpha = {self.alpha:g} with a max_weight of {self.max_weight} takes more than {LARGEST:,} groups of "
                f"{self.group_size}",
                remedy="declare a smaller --max-weight, or choose a larger alpha",
            )
        return n

    def most(self, n: int) -> int | None:
        """Returns the largest number of regressions among n groups that certifies; None when even 0 does not."""
        _, n = tally(0, n)
        too_many = bisect_left(range(n), True, key=lambda k: bool(self.p_value(k, n) > self.level))
        return too_many - 1 if too_many else None

    def smallest_alpha(self, n: int) -> float:
        """Returns the smallest share that n groups can certify, when none regresses."""
        if self.max_weight is None:
            return binomial.upper_bound(0, n, self.confidence, parts=self.parts)
        sizes = np.full(tally(0, n)[1], self.group_size)
        return capped_weight.upper_bound(sizes, 0 * sizes, self.max_weight, self.confidence, parts=self.parts)

    def first(self, k: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns for each k the smallest n that certifies with k regressions; `LARGEST` + 1 where it lies beyond.

        Halving takes twenty evaluations. Without a max_weight P(Bin(n, alpha) <= k) = 1 - I_alpha(k + 1, n - k), and
        the first two are at what the inverse of I gives: they settle it, unless rounding decides.
        """
        below, above = k, np.full_like(k, LARGEST + 1)
        guesses = [] if self.max_weight is not None else self._guesses(k)
        while guesses or (above - below > 1).any():
            middle = guesses.pop() if guesses else (below + above) // 2
            certifies = self.p_value(k, middle) <= self.level
            below = np.where(certifies, below, np.maximum(below, middle))
            above = np.where(certifies, np.minimum(above, middle), above)
        return above

    def _guesses(self, k: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        more = np.ceil(btdtrib(k + 1.0, 1 - self.level, grid_alpha(self.alpha)))
        n = np.minimum(k + np.nan_to_num(more, nan=1.0), LARGEST + 1).astype(np.int64)
        return [np.maximum(n - 1, k), n]


def power(n: int, design: Design, true_rate: float) -> float:
    """Returns the exact probability that n groups certify at `true_rate`; 0 when n is too small.

    At a true rate above alpha it is the probability of a false certificate.
    """
    true_rate, allowed = rate("true_rate", true_rate, zero=True), design.most(n)
    return 0.0 if allowed is None else float(binomial.tail(allowed, n, true_rate))


def largest_true_rate(n: int, design: Design, power: float) -> float | None:
    """Returns the highest true rate at which n groups certify with probability `power`; None when n is too small."""
    wanted, allowed = rate("power", power), design.most(n)
    return None if allowed is None else float(betainccinv(allowed + 1, n - allowed, wanted))


def groups_for_power(design: Design, true_rate: float, power: float) -> tuple[int, int]:
    """Returns (n, k): the first n whose exact power reaches `power`, and the most regressions it allows."""
    wanted, true_rate = rate("power", power), rate("true_rate", true_rate, zero=True)
    limit = grid_alpha(design.alpha)
    if true_rate >= limit:
        what = f"true rate {true_rate:g} is not below alpha = {limit:g}: no number of groups certifies it with power"
        raise InfeasibleError(what, remedy="choose a larger alpha, or plan for a lower true rate")
    start, chunk = 0, _FIRST_CHUNK
    while True:
        k = np.arange(start, start + chunk)
        n = design.first(k)
        reached = (binomial.tail(k, n, true_rate) >= wanted) & (n <= LARGEST)
        if reached.any():
            place = int(reached.argmax())
            return int(n[place]), int(k[place])
        if n[-1] > LARGEST:
            raise InfeasibleError(
                f"true rate {true_rate:g} is so close to alpha = {limit:g} that power {wanted:g} takes more than "
                f"{LARGEST:,} groups",
                remedy="choose a larger alpha, a lower power, or plan for a lower true rate",
            )
        start, chunk = start + chunk, chunk * 2


def plan(
    alpha: float = 0.05, confidence: float = 0.95, *, true_rate: float | None = None, power: float | None = None,
    n: int | None = None, openings: int = 1, categories: int = 1, max_weight: int | None = None,
    group_size: int | None = None,
) -> Plan:  # fmt: skip
    """Returns what `holdfast plan` prints: the groups that a certificate needs, and what n groups can certify.

    Args:
        true_rate: the share believed to regress really.
        power: the wanted probability of a certificate at `true_rate`; 0.9 unless given.
        n: the groups there are, in each category.
        openings, categories: tests that share 1 - confidence.
        max_weight: the most that a group weighs, for a share of prompts; None: a share of groups.
        group_size: prompts in each group, with a max_weight; 1 unless given.
    """
    if power is not None and true_rate is None:
        raise ConfigError("--power without --true-rate: power is the chance at a true rate", remedy="add --true-rate")
    if group_size is not None and max_weight is None:
        what = "--group-size without --max-weight: a group counts as one, whatever its size"
        raise ConfigError(what, remedy="leave it out, or add --max-weight")
    parts = count("openings", openings, least=1) * count("categories", categories, least=1)
    design = Design(alpha, confidence, parts, max_weight, 1 if group_size is None else group_size)
    wanted = DEFAULT_POWER if power is None else power
    rates = [float(f"{share * design.alpha:.3g}") for share in SHARES_OF_ALPHA]
    return {
        "alpha": alpha, "confidence": confidence, "openings": openings, "categories": categories,
        "max_weight": max_weight, "group_size": None if max_weight is None else design.group_size,
        "level": design.level, "fewest": [{"regressions": k, "groups": design.fewest(k)} for k in range(4)],
        "for_power": None if true_rate is None else _for_power(design, true_rate, wanted),
        "with_n": None if n is None else _with_n(design, n, rates),
        "table": [{"true_rate": one, "needed": [_needed(design, one, wanted) for wanted in POWERS]} for one in rates]
        if true_rate is None and n is None else None,
    }  # fmt: skip


def _for_power(design: Design, true_rate: float, wanted: float) -> ForPower:
    groups, allowed = groups_for_power(design, true_rate, wanted)
    reached = power(groups, design, true_rate)
    return {"true_rate": true_rate, "power": wanted, "groups": groups, "regressions": allowed, "reached": reached}


def _with_n(design: Design, n: int, rates: list[float]) -> WithN:
    return {
        "n": n, "most_regressions": design.most(n), "smallest_alpha": design.smallest_alpha(n),
        "at_power": {"power": LIKELY, "largest_true_rate": largest_true_rate(n, design, LIKELY)},
        "power": [{"true_rate": one, "power": power(n, design, one)} for one in rates],
    }  # fmt: skip


def _needed(design: Design, true_rate: float, wanted: float) -> Needed:
    try:
        groups, allowed = groups_for_power(design, true_rate, wanted)
    except InfeasibleError:  # beyond the largest number that is searched
        return {"power": wanted, "groups": None, "regressions": None}
    return {"power": wanted, "groups": groups, "regressions": allowed}
