"""Every sentence that a certificate prints, simulated: how often it is printed although it is false.

The true share of what the sentence speaks of lies just above alpha. Of 20,000 certificates in each case not
significantly more than 5 % may be issued (binomial test, p < 0.001). Groups have 1 to 400 prompts; larger groups fail
as often as smaller ones, more often, or less often. Verdicts are computed here for all draws at once, by scipy and by
plain products, and compared with the package's on some of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from holdfast.certification.assessment import STRENGTHS, assess
from holdfast.certification.binomial import fewest_prompts
from holdfast.certification.power import plan
from holdfast.certification.sequential import MIXTURE, log_e_value
from holdfast.certification.share import certify_categories, share_test
from holdfast.certification.terms import Rows, Terms

DRAWS, COMPARED = 20_000, 12
ALPHA, DELTA = 0.05, 0.05
ABOVE = 1.002  # true share / alpha
SIZES = np.array([1, 2, 5, 20, 100, 400])
FREQUENCY = np.array([0.60, 0.20, 0.10, 0.06, 0.03, 0.01])
# Regressed prompts of a group that fails.
PARTS = {"all of a group": SIZES, "a third of a group": -(-SIZES // 3), "one of a group": np.ones_like(SIZES)}
LINKS = {"independent": 0.0, "larger fail more": 0.5, "smaller fail more": -0.5}


@dataclass(frozen=True)
class Groups:
    """A source of groups: (size, regressed prompts) and their probabilities."""

    size: np.ndarray
    failed: np.ndarray
    chance: np.ndarray

    def share(self, weight: np.ndarray | None = None) -> float:
        """Share of groups with a regressed prompt; with weights, of prompts so weighted."""
        if weight is None:
            return float(self.chance[self.failed > 0].sum())
        return float((self.chance * weight * self.failed / self.size).sum() / (self.chance * weight).sum())

    def draw(self, n: int, random: np.random.Generator, draws: int = DRAWS) -> np.ndarray:
        """Counts of each kind of group among n, one row a draw."""
        return random.multinomial(n, self.chance, size=draws)

    def prompts(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Outcome and group of every prompt of one draw."""
        size, failed = np.repeat(self.size, counts), np.repeat(self.failed, counts)
        group = np.repeat(np.arange(len(size)), size)
        place = np.concatenate([np.arange(one) for one in size])
        return place < failed[group], group


def source(link: str, part: str, share: float, cap: int | None = None) -> Groups:
    """Groups of all sizes of which so many fail that the sentence's share is `share`."""
    odds, spoiled = SIZES ** LINKS[link], PARTS[part]
    if cap is None:
        rate = share * odds / (FREQUENCY @ odds)
    else:
        weight = np.minimum(SIZES, cap)
        rate = share * odds * (FREQUENCY @ weight) / (FREQUENCY @ (weight * odds * spoiled / SIZES))
    assert rate.max() <= 1
    kinds = Groups(
        np.tile(SIZES, 2), np.append(0 * SIZES, spoiled), np.append(FREQUENCY * (1 - rate), FREQUENCY * rate)
    )
    measured = kinds.share(None if cap is None else np.minimum(kinds.size, cap))
    assert measured == pytest.approx(share)
    return kinds


def p_groups(kinds: Groups, counts: np.ndarray, *, rows: bool = True) -> np.ndarray:
    """The larger p-value over groups and over prompts; over groups alone was the first release's test."""
    over_groups = stats.binom.cdf(counts @ (kinds.failed > 0), counts.sum(axis=-1), ALPHA)
    if not rows:
        return over_groups
    return np.maximum(over_groups, stats.binom.cdf(counts @ kinds.failed, counts @ kinds.size, ALPHA))


def p_weighted(kinds: Groups, counts: np.ndarray, cap: int) -> np.ndarray:
    """1/E by its definition; 1 where more than alpha of the prompts failed."""
    z = np.minimum(kinds.size, cap) * (kinds.failed / kinds.size - ALPHA)
    lambdas = (1 - MIXTURE) / ((1 - ALPHA) * cap)
    e = np.exp(counts @ np.log(1 - np.outer(z, lambdas))).mean(axis=-1)
    raw = (counts @ kinds.failed) / (counts @ kinds.size)
    return np.where(raw > ALPHA, 1.0, 1 / e)


def require_not_above(issued: np.ndarray) -> None:
    """Fail where false certificates are significantly more than delta."""
    false = int(np.count_nonzero(issued))
    assert stats.binomtest(false, len(issued), DELTA, alternative="greater").pvalue >= 0.001, f"{false} were issued"


def require_same(issued: np.ndarray, verdict) -> None:
    """Compare some draws of either verdict with the package's own."""
    for wanted in (True, False):
        for place in np.flatnonzero(issued == wanted)[:COMPARED]:
            assert bool(verdict(place)) == wanted


def terms(kind: str, **changes) -> Terms:
    return Terms(
        kind, 0.5, ALPHA, 1 - DELTA, changes.pop("openings", 1), changes.pop("pool", None), "nll_token", **changes
    )


def table(failed: np.ndarray, group: np.ndarray, strength: float = math.nan) -> Rows:
    n = len(failed)
    return Rows([str(i) for i in range(n)], failed.astype(float), group, [None] * n, np.full(n, strength))


@pytest.mark.parametrize("part", ["all of a group", "one of a group"])
@pytest.mark.parametrize("link", LINKS)
def test_at_most_alpha_of_groups(link, part):
    kinds = source(link, part, ABOVE * ALPHA)
    counts = kinds.draw(153, np.random.default_rng(1))
    issued = p_groups(kinds, counts) <= DELTA
    require_not_above(issued)
    require_same(issued, lambda at: assess(table(*kinds.prompts(counts[at])), terms("fixed"))["certified"])
    if part == "one of a group":
        assert issued.mean() > 0.04, "the level is spent, so that a broken test would show"


@pytest.mark.parametrize("together", [True, False], ids=["one outcome", "independent outcomes"])
def test_at_most_alpha_of_groups_over_three_openings(together):
    """Each opening is of a model that breaks the claim; a false certificate is any of the three."""
    kinds, random, openings = source("independent", "one of a group", ABOVE * ALPHA), np.random.default_rng(2), 3
    counts = [kinds.draw(fewest_prompts(ALPHA, 1 - DELTA, 1, parts=openings), random) for _ in range(openings)]
    each = np.array([p_groups(kinds, counts[0 if together else i]) <= DELTA / openings for i in range(openings)])
    require_not_above(each.any(axis=0))
    assert each.any(axis=0).mean() > (0.01 if together else 0.03)
    options = {"alpha": ALPHA, "confidence": 1 - DELTA, "parts": openings}
    require_same(each[0], lambda at: share_test(*kinds.prompts(counts[0][at]), **options).certified)


@pytest.mark.parametrize("cap", [1, 5, 50])
@pytest.mark.parametrize("part", ["all of a group", "a third of a group"])
@pytest.mark.parametrize("link", LINKS)
def test_at_most_alpha_of_prompts_where_a_group_weighs_at_most_c(link, part, cap):
    kinds = source(link, part, ABOVE * ALPHA, cap)
    counts = kinds.draw({1: 400, 5: 400, 50: 1500}[cap], np.random.default_rng(cap))
    issued = p_weighted(kinds, counts, cap) <= DELTA
    require_not_above(issued)
    require_same(
        issued, lambda at: assess(table(*kinds.prompts(counts[at])), terms("fixed", max_weight=cap))["certified"]
    )


def test_the_weighted_test_is_not_idle():
    """Groups that weigh the most they may reach the level at the limit, and good models are certified."""
    at_limit = Groups(np.array([5, 5]), np.array([0, 5]), np.array([1 - ABOVE * ALPHA, ABOVE * ALPHA]))
    issued = p_weighted(at_limit, at_limit.draw(400, np.random.default_rng(3)), 5) <= DELTA
    require_not_above(issued)
    assert issued.mean() > 0.005
    for cap, n in ((1, 300), (5, 600), (50, 2500)):
        good = source("larger fail more", "all of a group", 0.2 * ALPHA, cap)
        assert (p_weighted(good, good.draw(n, np.random.default_rng(4)), cap) <= DELTA).mean() > 0.5


def test_at_most_alpha_of_prompts_drawn_one_by_one():
    random = np.random.default_rng(5)
    k = random.binomial(311, ABOVE * ALPHA, size=DRAWS)
    issued = stats.binom.cdf(k, 311, ALPHA) <= DELTA
    require_not_above(issued)
    assert issued.mean() > 0.03
    group = random.integers(0, 40, 311)
    require_same(
        issued, lambda at: assess(table(np.arange(311) < k[at], group), terms("fixed", drawn="rows"))["certified"]
    )


def test_at_most_alpha_of_a_list():
    """26 of 500 are bad, 5.2 %; groups have no say in a random sample of prompts."""
    k = np.random.default_rng(6).hypergeometric(26, 474, 148, size=DRAWS)
    issued = (stats.hypergeom.cdf(k, 500, 26, 148) <= DELTA) & (k <= ALPHA * 148)
    require_not_above(issued)
    assert issued.mean() > 0.01
    group = np.arange(148) // 9
    require_same(
        issued, lambda at: assess(table(np.arange(148) < k[at], group), terms("finite_pool", pool=500))["certified"]
    )


@pytest.mark.parametrize("broken", [(True, True, True), (True, False, False)], ids=["all", "one of three"])
def test_at_most_alpha_of_groups_in_each_category(broken):
    """Any category that is called certified although it is not makes the certificate false."""
    random, names = np.random.default_rng(7), ("a", "b", "c")
    kinds = [source("independent", "one of a group", (ABOVE if bad else 0.05) * ALPHA) for bad in broken]
    counts = [one.draw(fewest_prompts(ALPHA, 1 - DELTA, 1, parts=3), random) for one in kinds]
    p = np.stack([p_groups(one, drawn) for one, drawn in zip(kinds, counts, strict=True)], axis=1)
    order = np.argsort(p, axis=1)
    stepped = np.maximum.accumulate(np.take_along_axis(p, order, axis=1) * np.array([3, 2, 1]), axis=1)
    certified = np.empty_like(p, dtype=bool)
    np.put_along_axis(certified, order, stepped <= DELTA, axis=1)
    issued = (certified & np.array(broken)).any(axis=1)
    require_not_above(issued)
    assert issued.mean() > 0.01

    def verdict(at: int) -> bool:
        measured = {name: one.prompts(drawn[at]) for name, one, drawn in zip(names, kinds, counts, strict=True)}
        found = certify_categories(measured, ALPHA, 1 - DELTA)
        return any(found[name].certified for name, bad in zip(names, broken, strict=True) if bad)

    require_same(issued, verdict)


@pytest.mark.parametrize(
    "shares",
    [np.full(10, ABOVE), np.where(np.arange(10) % 2, ABOVE, 0.1), np.linspace(0.1, 2, 10)],
    ids=["all at the limit", "every second", "rising"],
)
def test_at_most_alpha_of_groups_at_the_strength_that_passed(shares):
    random = np.random.default_rng(8)
    kinds = [source("independent", "one of a group", float(share) * ALPHA) for share in shares]
    counts = [one.draw(153, random) for one in kinds]
    passed = np.stack([p_groups(one, drawn) <= DELTA for one, drawn in zip(kinds, counts, strict=True)], axis=1)
    steps = np.logical_and.accumulate(passed, axis=1).sum(axis=1)  # strengths before the first failure
    issued = (steps > 0) & (shares[steps - 1] > 1)
    require_not_above(issued)

    def verdict(at: int) -> bool:
        pieces = [
            table(*one.prompts(drawn[at]), strength)
            for one, drawn, strength in zip(kinds, counts, STRENGTHS, strict=True)
        ]
        chosen = assess(Rows.joined(pieces[: steps[at] + 1]), terms("strength"))["strength"]["chosen"]
        return chosen is not None and shares[STRENGTHS.index(chosen)] > 1

    require_same(issued, verdict)


def test_at_most_alpha_at_every_look():
    """Somebody looks after every prompt and stops at the first certificate."""
    looks = 800
    limit = np.array(
        [
            np.flatnonzero(log_e_value(t, np.arange(t + 1), ALPHA) >= -math.log(DELTA)).max(initial=-1)
            for t in range(1, looks + 1)
        ]
    )
    random, issued, first = np.random.default_rng(9), [], []
    for _ in range(10):
        failed = random.random((DRAWS // 10, looks), dtype=np.float32) < ABOVE * ALPHA
        crossed = np.cumsum(failed, axis=1, dtype=np.int16) <= limit
        issued.append(crossed.any(axis=1))
        first.append((failed[:COMPARED], crossed[:COMPARED]))
    require_not_above(np.concatenate(issued))
    assert np.concatenate(issued).mean() > 0.02
    for failed, crossed in zip(*(np.concatenate(part) for part in zip(*first, strict=True)), strict=True):
        stop = int(crossed.argmax()) + 1 if crossed.any() else looks
        found = assess(table(failed[:stop], np.arange(stop)), terms("sequential"))
        assert found["certified"] == crossed.any()


def test_the_first_releases_rule_breaks_its_sentence():
    """It counted groups and spoke of prompts: where large groups fail more, the simulation finds it false."""
    kinds = source("larger fail more", "all of a group", ABOVE * ALPHA, cap=400)  # the share of prompts, uncapped
    counts = kinds.draw(153, np.random.default_rng(10))
    issued = p_groups(kinds, counts, rows=False) <= DELTA
    assert issued.mean() > 0.2
    with pytest.raises(AssertionError, match="were issued"):
        require_not_above(issued)
    assert (p_groups(kinds, counts) <= DELTA).mean() > DELTA, "nor do both tests speak of prompts"
    require_not_above(p_weighted(kinds, counts, 400) <= DELTA)


def within_error(certified: np.ndarray, expected: float) -> bool:
    """Whether a simulated power is within four standard errors of the planned one."""
    return bool(abs(certified.mean() - expected) <= 4 * math.sqrt(expected * (1 - expected) / len(certified)))


@pytest.mark.parametrize("true_rate", [0.005, 0.02, 0.03])
@pytest.mark.parametrize("size", [1, 7])
def test_power_is_as_planned(true_rate, size):
    found = plan(ALPHA, 1 - DELTA, true_rate=true_rate, power=0.9)["for_power"]
    kinds = Groups(np.array([size, size]), np.array([0, size]), np.array([1 - true_rate, true_rate]))
    counts = kinds.draw(found["groups"], np.random.default_rng(11))
    assert within_error(p_groups(kinds, counts) <= DELTA, found["reached"])


@pytest.mark.parametrize(("cap", "size"), [(1, 1), (5, 3), (50, 20), (5, 9)])
def test_power_with_a_largest_weight_is_as_planned(cap, size):
    found = plan(ALPHA, 1 - DELTA, true_rate=0.01, power=0.9, max_weight=cap, group_size=size)["for_power"]
    kinds = Groups(np.array([size, size]), np.array([0, size]), np.array([0.99, 0.01]))
    counts = kinds.draw(found["groups"], np.random.default_rng(12))
    issued = p_weighted(kinds, counts, cap) <= DELTA
    assert within_error(issued, found["reached"])
    options = {"alpha": ALPHA, "confidence": 1 - DELTA, "max_weight": cap}
    require_same(issued, lambda at: share_test(*kinds.prompts(counts[at]), **options).certified)


def test_over_groups_of_one_size_the_test_over_prompts_never_decides():
    """What `plan` says of groups of one size rests on it."""
    n = np.arange(59, 1200)
    k = stats.binom.ppf(DELTA, n, ALPHA).astype(int)
    k -= stats.binom.cdf(k, n, ALPHA) > DELTA
    for size in (2, 3, 7, 40, 400):
        assert (stats.binom.cdf(size * k, size * n, ALPHA) <= DELTA).all()
