"""The tests of a share against scipy, plain products in rational arithmetic, and enumeration of every sample."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from holdfast.certification import capped_weight
from holdfast.certification.power import Design, plan, power
from holdfast.certification.sequential import MIXTURE, EProcess
from holdfast.certification.share import share_test


def prompts(groups: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes and labels of groups (size, regressed)."""
    outcomes = [i < failed for size, failed in groups for i in range(size)]
    return np.array(outcomes), np.repeat(np.arange(len(groups)), [size for size, _ in groups])


def random_groups(random: np.random.Generator, n: int, largest: int) -> list[tuple[int, int]]:
    sizes = random.integers(1, largest + 1, n)
    failed = np.where(random.random(n) < 0.1, random.integers(0, sizes + 1), 0)
    return list(zip(sizes.tolist(), failed.tolist(), strict=True))


def exact_e(groups: list[tuple[int, int]], cap: int, alpha: Fraction) -> Fraction:
    """The mean over lambda of prod (1 - lambda Z), nothing rounded."""
    total = Fraction(0)
    for p1 in MIXTURE:
        step = Fraction(1 - float(p1)) / ((1 - alpha) * cap)
        product = Fraction(1)
        for size, failed in groups:
            product *= 1 - step * min(size, cap) * (Fraction(failed, size) - alpha)
        total += product
    return total / len(MIXTURE)


@pytest.mark.parametrize("cap", [1, 3, 50])
def test_the_e_value_is_the_plain_product(cap):
    random = np.random.default_rng(cap)
    for _ in range(6):
        groups = random_groups(random, 25, 8)
        found = share_test(*prompts(groups), alpha=0.2, max_weight=cap)
        expected = exact_e(groups, cap, Fraction(1, 5))
        assert found.e_value == pytest.approx(float(expected), rel=1e-12)
        over = Fraction(sum(f for _, f in groups), sum(n for n, _ in groups)) > Fraction(1, 5)
        assert found.p_value == pytest.approx(1.0 if over else min(1.0, float(1 / expected)), rel=1e-11)
        assert found.certified == (expected >= 20 and not over)


def test_the_bound_is_where_the_e_value_reaches_its_level():
    random = np.random.default_rng(1)
    for cap in (1, 4):
        groups = random_groups(random, 60, 6)
        bound = share_test(*prompts(groups), alpha=0.6, max_weight=cap).upper_bound
        step = Fraction(1, 10**9)
        assert (
            exact_e(groups, cap, Fraction(str(bound)) + step) >= 20 > exact_e(groups, cap, Fraction(str(bound)) - step)
        )


def test_with_groups_of_one_prompt_and_weight_one_it_is_the_e_process():
    for k, n in ((0, 88), (0, 87), (3, 200), (40, 60)):
        process = EProcess(0.05)
        process.update_many(np.arange(n) < k)
        found = share_test(np.arange(n) < k, np.arange(n), alpha=0.05, max_weight=1)
        assert found.e_value == pytest.approx(process.e_value, rel=1e-12)
    assert share_test([False] * 88, range(88), alpha=0.05, max_weight=1).certified
    assert not share_test([False] * 87, range(87), alpha=0.05, max_weight=1).certified


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_both_binomial_tests_equal_scipys(alpha):
    random = np.random.default_rng(2)
    for _ in range(40):
        groups = random_groups(random, int(random.integers(20, 150)), 9)
        found = share_test(*prompts(groups), alpha=alpha)
        tests = {
            "groups": stats.binomtest(sum(f > 0 for _, f in groups), len(groups), alpha, alternative="less"),
            "rows": stats.binomtest(sum(f for _, f in groups), sum(n for n, _ in groups), alpha, alternative="less"),
        }
        for name, test in tests.items():
            counted = getattr(found, name)
            assert (counted.regressions, counted.n) == (test.k, test.n)
            assert counted.p_value == pytest.approx(test.pvalue, rel=1e-10)
            assert counted.upper_bound == pytest.approx(test.proportion_ci(0.95, "exact").high, rel=1e-9, abs=1e-11)
        assert found.p_value == max(float(one.p_value) for one in (found.groups, found.rows))
        assert found.upper_bound == max(float(one.upper_bound) for one in (found.groups, found.rows))
        assert found.certified == all(test.pvalue <= 0.05 for test in tests.values())


# (size, regressed, probability) of a source of groups
SOURCES = {
    "large ones fail": [(1, 0, Fraction(5, 8)), (6, 0, Fraction(1, 8)), (6, 6, Fraction(1, 4))],
    "small ones fail": [(1, 1, Fraction(1, 4)), (1, 0, Fraction(3, 8)), (6, 0, Fraction(3, 8))],
    "parts fail": [(2, 1, Fraction(1, 4)), (3, 1, Fraction(1, 8)), (3, 0, Fraction(5, 8))],
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("cap", [None, 1, 2, 3])
def test_false_certificates_by_enumeration(name, cap):
    """Every sample of 24 groups, with its exact probability: certified falsely at most with 1/4.

    alpha is the decimal just below the true share, so that the sentence is false by a hair.
    """
    kinds, groups, confidence = SOURCES[name], 24, 0.75
    if cap is None:
        share = sum(p for _, failed, p in kinds if failed)
    else:
        weight = sum(min(size, cap) * p for size, _, p in kinds)
        share = sum(min(size, cap) * p * Fraction(failed, size) for size, failed, p in kinds) / weight
    alpha = math.floor(share * 10**8 - Fraction(1, 2)) / 10**8
    wrong = Fraction(0)
    for counts in itertools.product(range(groups + 1), repeat=3):
        if sum(counts) != groups:
            continue
        sample = [(size, failed) for (size, failed, _), n in zip(kinds, counts, strict=True) for _ in range(n)]
        if share_test(*prompts(sample), alpha=alpha, confidence=confidence, max_weight=cap).certified:
            ways = math.factorial(groups) // math.prod(map(math.factorial, counts))
            wrong += ways * math.prod((p**n for (_, _, p), n in zip(kinds, counts, strict=True)), start=Fraction(1))
    assert 0 < wrong <= Fraction(1, 4)


@pytest.mark.parametrize(("cap", "size"), [(1, 1), (5, 1), (5, 3), (4, 9)])
def test_a_planned_count_is_the_last_that_certifies(cap, size):
    design = Design(0.1, max_weight=cap, group_size=size)
    for n in (60, 200, 431):
        most = design.most(n)
        for k in {0, most or 0, (most if most is not None else -1) + 1}:
            groups = prompts([(size, size)] * k + [(size, 0)] * (n - k))
            assert share_test(*groups, alpha=0.1, max_weight=cap).certified == (most is not None and k <= most)
        sizes = np.full(n, size)
        assert design.smallest_alpha(n) == capped_weight.upper_bound(sizes, 0 * sizes, cap)
    fewest = plan(0.1, max_weight=cap, group_size=size)["fewest"][0]["groups"]
    assert (design.most(fewest), design.most(fewest - 1)) == (0, None)
    assert power(fewest, design, 0.01) == pytest.approx(0.99**fewest)
