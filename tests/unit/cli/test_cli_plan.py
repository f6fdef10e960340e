"""`holdfast plan`: sample sizes in words and in JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest


def test_with_no_arguments_it_prints_a_table(holdfast):
    code, out, err = holdfast("plan")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [
        "To certify: at most 5 % of groups of near-duplicate prompts regress, confidence 95 %",
        "  groups needed: 59 if 0, 93 if 1, 124 if 2, 153 if 3 of them regress",
    ]
    assert [line.split() for line in out.splitlines()[-3:-1]] == [
        ["3", "%", "601", "(21)", "832", "(31)", "1036", "(40)"],
        ["4", "%", "2698", "(116)", "3701", "(163)", "4654", "(208)"],
    ]


def test_true_rate_and_power(holdfast):
    code, out, _ = holdfast("plan", "--true-rate", 0.02, "--power", 0.9)
    assert code == 0
    assert "if 2 % really regress: 311 groups, of which at most 9 may regress" in out
    assert holdfast("plan", "--true-rate", 0.02)[1] == out  # 0.9 unless given


def test_what_n_prompts_can_and_cannot(holdfast):
    _, out, _ = holdfast("plan", "--n", 200)
    assert "200 groups can certify 5 % if at most 4 of them regress; 5 or more cannot" in out
    assert "no result of theirs certifies less than 1.49 %" in out
    assert "they certify in 4 of 5 cases only if at most 1.54 % regress" in out


def test_too_few_prompts_are_told_so(holdfast):
    code, out, _ = holdfast("plan", "--n", 58)
    assert code == 0
    assert "58 groups cannot certify 5 %, whatever they show: 59 are needed" in out
    assert "with no regression: 5.04 %" in out


def test_json_says_the_same(holdfast):
    code, out, _ = holdfast("plan", "--n", 200, "--true-rate", 0.02, "--openings", 2, "--categories", 7, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["level"] == pytest.approx(0.05 / 14)
    assert found["fewest"][0] == {"regressions": 0, "groups": 110}
    assert found["for_power"]["reached"] >= 0.9
    assert found["with_n"]["most_regressions"] == 2
    likely = found["with_n"]["at_power"]
    assert (list(likely), likely["power"]) == (["power", "largest_true_rate"], 0.8)
    assert 0 < likely["largest_true_rate"] < 0.05
    assert found["table"] is None


def test_the_whole_table_in_json(holdfast):
    found = json.loads(holdfast("plan", "--json")[1])
    row = next(row for row in found["table"] if row["true_rate"] == 0.02)
    assert [(e["power"], e["groups"], e["regressions"]) for e in row["needed"]] == [
        (0.8, 234, 6), (0.9, 311, 9), (0.95, 386, 12),
    ]  # fmt: skip
    assert (found["for_power"], found["with_n"]) == (None, None)


def test_a_table_beyond_a_million_prompts_says_so(holdfast):
    code, out, _ = holdfast("plan", "--alpha", 0.00005)
    assert code == 0
    assert "too many" in out.splitlines()[-2]


def test_the_unit_is_said(holdfast):
    _, out, _ = holdfast("plan")
    assert out.splitlines()[-1].strip() == (
        "a group regresses when one of its prompts does; where sizes differ, the test over prompts must pass too"
    )


def test_a_largest_weight_is_planned_for_groups_of_one_size(holdfast):
    _, out, _ = holdfast("plan", "--max-weight", 5, "--group-size", 3, "--true-rate", 0.01)
    assert out.splitlines() == [
        "To certify: at most 5 % of prompts regress, where a group of near-duplicates weighs at most 5, "
        "confidence 95 %",
        "  groups needed: 145 if 0, 173 if 1, 201 if 2, 228 if 3 of them regress",
        "  if 1 % really regress: 283 groups, of which at most 5 may regress, certify with probability 93.3 %",
        "  for groups of 3 prompts that regress together",
    ]
    assert holdfast("plan", "--max-weight", 5, "--n", 100)[1].splitlines()[-1] == "  for groups of one prompt"
    found = json.loads(holdfast("plan", "--max-weight", 5, "--n", 430, "--json")[1])
    assert (found["max_weight"], found["group_size"], found["with_n"]["most_regressions"]) == (5, 1, None)
    assert found["with_n"]["smallest_alpha"] > 0.05


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--true-rate", 0.05], 4, "true rate 0.05 is not below alpha = 0.05"),
        (["--power", 0.9], 2, "--power without --true-rate"),
        (["--true-rate", 0.02, "--power", 0], 2, "power = 0.0, expected a share"),
        (["--alpha", 5], 2, "alpha = 5.0, expected a share"),
        (["--alpha", "nan"], 2, "alpha = nan"),
        (["--confidence", 0.05], 2, "1 - 0.05 may be meant"),
        (["--n", 0], 3, "n = 0: no prompts"),
        (["--n", -1], 2, "n = -1, expected a whole number"),
        (["--openings", 0], 2, "openings = 0"),
        (["--categories", 0], 2, "categories = 0"),
        (["--max-weight", 0], 2, "max_weight = 0, expected a whole number >= 1"),
        (["--group-size", 3], 2, "--group-size without --max-weight"),
        (["--max-weight", 3, "--group-size", 0], 2, "group_size = 0"),
        (["--max-weight", 100000], 4, "takes more than 1,000,000 groups"),
    ],
)
def test_refusals(holdfast, arguments, code, message):
    found, out, err = holdfast("plan", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) == 2
