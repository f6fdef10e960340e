"""`holdfast certify-counts`: the verdict of bare counts in words, in JSON and as the exit code."""

from __future__ import annotations

import json

import pytest


def test_the_verdict_is_the_exit_code(holdfast):
    code, out, err = holdfast("certify-counts", 3, 200)
    assert (code, err) == (0, "")
    assert out == (
        "With 95 % confidence, at most 5 % of prompts from this source, drawn one by one as its user asserts, regress "
        "(3 of 200 did; upper bound 3.84 %).\n"
    )
    code, out, _ = holdfast("certify-counts", 5, 200)
    assert code == 4
    assert out.startswith("Not certified: ")


def test_json_and_options(holdfast):
    options = ("--alpha", 0.1, "--confidence", 0.9, "--openings", 2, "--pool", 300, "--json")
    code, out, _ = holdfast("certify-counts", 2, 100, *options)
    found = json.loads(out)
    assert code == 0
    assert (found["alpha"], found["level"], found["pool"], found["test"]) == (0.1, 0.05, 300, "hypergeometric")
    assert "of the 300 listed prompts regress (2 of 100 drawn from the list at random did" in found["statement"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([0, 58], 4, "58 prompts cannot certify alpha = 0.05 at confidence 0.95, even with no regression: 59"),
        ([3, 2], 3, "regressions = 3 of n = 2"),
        ([0, 0], 3, "n = 0: no prompts"),
        ([1, 100, "--alpha", 2], 2, "alpha = 2.0"),
        ([1, 100, "--confidence", 0.05], 2, "1 - 0.05 may be meant"),
        ([1, 100, "--openings", 0], 2, "openings = 0"),
        ([1, 100, "--pool", 50], 3, "n = 100 prompts from a list of 50"),
    ],
)
def test_refusals(holdfast, arguments, code, message):
    found, out, err = holdfast("certify-counts", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) == 2
