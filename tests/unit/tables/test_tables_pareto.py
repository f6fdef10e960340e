"""Dominance in harm and utility: which interval a difference has, who dominates whom, which utility is looked at."""

from __future__ import annotations

import math

import pytest
from tests.unit.tables.making import result_json, results
from tools.study_page.pareto import compare, difference, dominators, of_ends
from tools.study_page.stored import outcomes
from tools.study_page.verdicts import headline, pairs

from holdfast.certification.comparison import compare_prompts, compare_seeds
from holdfast.core.errors import DataError
from holdfast_lab.tables.lines import utility_of
from holdfast_lab.tables.results import Measured


def row(defense, hs, fa, *, width=0.02, **more):
    """A row of one seed whose figures reach `width` to each side."""
    figures = {"HS": (hs, hs - width, hs + width), "FA": (fa, fa - width, fa + width)}
    return results([result_json(defense, **figures, **more)])


def with_outcomes(defense, hs, fa):
    value = result_json(defense, HS=hs.count("1") / len(hs), FA=fa.count("1") / len(fa))
    return results([value | {"outcomes": {"HS": hs, "FA": fa}}])


def test_the_interval_of_a_difference_adds_the_distances_in_squares():
    found = of_ends(Measured(0.5, 0.47, 0.56), Measured(0.2, 0.12, 0.24))
    assert found.value == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3 - math.hypot(0.03, 0.04))
    assert found.high == pytest.approx(0.3 + math.hypot(0.06, 0.08))
    assert of_ends(Measured(0.5), Measured(0.2, 0.1, 0.3)) is None


def of_seeds(defense, values, **more):
    return results([result_json(defense, seed=seed, HS=value, **more) for seed, value in values])


def test_three_common_seeds_give_the_interval_over_seeds_and_other_seeds_do_not_count():
    a = of_seeds("sft", ((1, (0.8, 0.7, 0.9)), (2, 0.7), (3, 0.1), (5, 0.6)))
    b = of_seeds("lisa", ((1, (0.5, 0.4, 0.6)), (2, 0.3), (4, 0.9), (5, 0.4)))
    found, expected = difference(a, b, "HS"), compare_seeds([0.3, 0.4, 0.2])
    assert (found.seeds, found.evidence) == (3, "seeds")
    assert (found.value, found.low, found.high) == pytest.approx((0.3, expected.lower, expected.upper))
    assert difference(a[2:3], b, "HS") is None


def test_two_seeds_without_intervals_have_the_one_over_seeds():
    found = difference(of_seeds("sft", ((1, 0.8), (2, 0.7))), of_seeds("lisa", ((1, 0.5), (2, 0.3))), "HS")
    expected = compare_seeds([0.3, 0.4])
    assert (found.evidence, found.low) == ("seeds", pytest.approx(expected.lower))


def told(defense, by_seed):
    """A row of several seeds with outcomes of HS per prompt."""
    made = [result_json(defense, seed=s, HS=o.count("1") / len(o)) | {"outcomes": {"HS": o}} for s, o in by_seed]
    return results(made)


def test_two_seeds_have_the_mean_of_their_paired_intervals():
    a = told("sft", ((1, "1111111100"), (2, "1111110000")))
    b = told("lisa", ((1, "1000000000"), (2, "1100000000")))
    found = difference(a, b, "HS")
    each = [difference(x, y, "HS") for x, y in ((a[:1], b[:1]), (a[1:], b[1:]))]
    assert [one.evidence for one in each] == ["prompts", "prompts"]
    assert (found.evidence, found.each, found.p_value) == ("given", pytest.approx((0.7, 0.4)), None)
    assert found.low == pytest.approx((each[0].low + each[1].low) / 2)
    assert found.high == pytest.approx((each[0].high + each[1].high) / 2)
    assert found.is_higher


def test_a_second_seed_that_repeats_the_first_adds_nothing():
    a, b = told("sft", ((1, "1111100000"),)), told("lisa", ((1, "1000000000"),))
    twice = difference(
        told("sft", ((1, "1111100000"), (2, "1111100000"))), told("lisa", ((1, "1000000000"), (2, "1000000000"))), "HS"
    )
    once = difference(a, b, "HS")
    assert (twice.low, twice.high) == pytest.approx((once.low, once.high))


def test_seeds_that_disagree_tell_nothing():
    a = told("sft", ((1, "1" * 60 + "0" * 40), (2, "0" * 99 + "1")))
    b = told("lisa", ((1, "0" * 100), (2, "0" * 98 + "11")))
    found = difference(a, b, "HS")
    assert found.low > 0
    assert not found.is_higher
    assert not difference(b, a, "HS").is_lower


def test_other_prompts_of_two_seeds_are_compared_by_their_intervals():
    a = of_seeds("sft", ((1, (0.5, 0.47, 0.56)), (2, (0.6, 0.5, 0.7))))
    b = of_seeds("lisa", ((1, (0.2, 0.12, 0.24)), (2, (0.2, 0.1, 0.3))))
    found = difference(a, b, "HS")
    assert (found.evidence, found.each) == ("ends", pytest.approx((0.3, 0.4)))
    assert found.low == pytest.approx((0.3 - math.hypot(0.03, 0.04) + 0.4 - math.hypot(0.1, 0.1)) / 2)


def test_outcomes_per_prompt_are_compared_in_pairs():
    a, b = with_outcomes("sft", "1111100000", "11"), with_outcomes("lisa", "1000000000", "11")
    found = difference(a, b, "HS")
    expected = compare_prompts([bit == "1" for bit in "1111100000"], [bit == "1" for bit in "1000000000"])
    assert found.evidence == "prompts"
    assert (found.low, found.high, found.p_value) == (expected.lower, expected.upper, expected.p_value)


def test_outcomes_that_are_no_bits_are_refused():
    for told in ({"HS": "01x"}, {"HS": [0, 1]}, ["01"]):
        with pytest.raises(DataError, match="strings of 0 and 1"):
            outcomes(results([result_json("sft") | {"outcomes": told}])[0], "HS")


@pytest.mark.parametrize(
    ("hs", "fa", "dominated", "by_value"),
    [
        (0.3, 0.9, True, True),  # the other is better in both, beyond the intervals
        (0.21, 0.9, False, True),  # harm within the interval
        (0.3, 0.79, False, False),  # the other is less useful
        (0.3, 0.81, False, True),  # utility within the interval
        (0.1, 0.9, False, False),
        (0.2, 0.8, False, False),  # equal rows dominate nobody
    ],
)
def test_dominance_needs_both_differences_beyond_their_intervals(hs, fa, dominated, by_value):
    """The row in question has HS = hs and FA = 1.6 - fa; the other HS = 0.2 and FA = 0.8."""
    mine, other = row("sft", hs, 1.6 - fa), row("lisa", 0.2, 0.8)
    found = compare(mine, other, "FA")
    assert (found.is_dominated, found.is_dominated_by_value) == (dominated, by_value)
    assert compare(other, mine, "FA").dominates == dominated


def test_a_lower_loss_is_more_utility():
    a = results([result_json("sft", HS=(0.1, 0.09, 0.11), task_loss=(0.5, 0.49, 0.51))])
    b = results([result_json("lisa", HS=(0.3, 0.29, 0.31), task_loss=(0.9, 0.89, 0.91))])
    found = compare(a, b, "task_loss")
    assert (found.dominates, found.is_dominated, found.is_dominated_by_value) == (True, False, False)
    assert compare(b, a, "task_loss").is_dominated_by_value


def test_dominators_are_named_and_nobody_dominates_itself():
    rows = {"ours": row("holdfast", 0.2, 0.7), "best": row("lisa", 0.1, 0.9), "near": row("mix", 0.19, 0.71)}
    assert dominators(rows, "ours", "FA") == (["best"], ["best", "near"])
    assert dominators(rows, "best", "FA") == ([], [])


@pytest.mark.parametrize(
    ("before", "tuned", "expected"), [(0.05, 0.12, "task_loss"), (0.05, 0.2, "FA"), (0.9, 0.9, "FA")]
)
def test_utility_is_the_loss_where_no_accuracy_rises_above_low_references(before, tuned, expected):
    values = [
        result_json("base", FA=(0.02, 0.01, 0.03)),
        result_json("aligned", FA=(before, before - 0.05, before + 0.05)),
        result_json("sft", FA=(tuned, tuned - 0.05, tuned + 0.05), task_loss=0.4),
    ]
    assert utility_of(results(values)) == expected
    assert utility_of(results(values[2:])) == "FA", "without references nothing is known of a floor"
    without_loss = [result_json("aligned", FA=(0.1, 0.0, 0.2)), result_json("sft", FA=(0.1, 0.0, 0.2))]
    assert utility_of(results(without_loss)) == "FA"


def test_holdfast_is_also_compared_with_the_aligned_model_it_started_from():
    aligned = result_json("aligned", HS=0.2, FA=0.2) | {"outcomes": {"HS": "1100000000", "FA": "1000000000"}}
    elsewhere = aligned | {"cell": "another", "align": "booster"}
    ours = with_outcomes("holdfast", "1110000000", "1111111111")
    found = compare_prompts([bit == "1" for bit in "1110000000"], [bit == "1" for bit in "1100000000"])
    (line,) = [x for x in pairs([*results([aligned, elsewhere]), *ours]).splitlines() if x.startswith("| Aligned")]
    cells = [cell.strip().replace("\\", "") for cell in line.split("|")[1:-1]]
    assert cells[:2] == ["Aligned (SFT)", f"+0.100 [{found.lower:+.3f}, {found.upper:+.3f}]"]
    assert cells[-1] == "harm not significant, more utility"
    seeds = results([result_json("holdfast", seed=s, HS=v, FA=0.9) for s, v in ((1, 0.3), (2, 0.4))])
    (line,) = [x for x in pairs([*results([aligned]), *seeds]).splitlines() if x.startswith("| Aligned")]
    assert "+0.150" in line
    assert "+0.100, +0.200" in line
    assert "t interval over seeds (2)" in line


def test_the_short_table_shows_the_loss_where_accuracy_is_at_floor():
    aligned = result_json("aligned", HS=0.2, FA=(0.02, 0.01, 0.05), task_loss=1.5)
    tuned = result_json("sft", HS=0.6, FA=(0.03, 0.01, 0.06), task_loss=0.9)
    head, _, _, last = headline(results([aligned, tuned])).splitlines()
    assert "task loss ↓" in head
    assert last.startswith("| SFT | 0.600 | 0.900 |")
    assert "FA ↑" in headline(results([aligned | {"task": "ag_news"}, result_json("sft", task="ag_news", FA=0.9)]))
