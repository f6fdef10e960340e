"""Replies are sorted by rules: a table of them, the forms that deceive rules, and rules that no reply makes slow."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.evaluation import reply_table as table

import holdfast.judging
from holdfast.judging.refusal_rules import RULES_REVISION
from holdfast.judging.reply_classes import HEAD, READ, ReplyClass, Unsorted, sort_reply

SOURCES = ("refusal_rules.py", "english.py", "reply_classes.py")
# The sources behind every revision. If a class may change, raise RULES_REVISION and measure the error rates again
# (benchmarks/refusal_rules); if not, the hash alone may change.
PINNED = {"2": "173f05332d4c6f60d65f73eeadda4f1c73388476baa2a186e597e3932591b745"}
SLOWEST = 0.5  # seconds for one reply on a busy machine; a matcher that backtracks takes minutes


def name(text: str, *, truncated: bool = False) -> str:
    found = sort_reply(text, truncated=truncated)
    assert (found.reason is not None) == (found.reply_class == ReplyClass.UNSORTED)
    return str(found.reason or found.reply_class)


def test_the_revision_belongs_to_these_sources():
    folder = Path(holdfast.judging.__file__).parent
    digest = hashlib.sha256(b"".join((folder / source).read_bytes() for source in SOURCES)).hexdigest()
    assert PINNED[RULES_REVISION] == digest


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("reply", table.REFUSED)
def test_refused_and_cutting_later_changes_nothing(reply, truncated):
    assert name(reply, truncated=truncated) == "refused"


@pytest.mark.parametrize("reply", table.REFUSED_CUT)
def test_a_cut_reply_that_has_refused_is_refused(reply):
    assert name(reply, truncated=True) == "refused"


@pytest.mark.parametrize("reply", table.ANSWERED)
def test_answered(reply):
    assert name(reply) == "answered"


@pytest.mark.parametrize("reply", table.ANSWERED_CUT)
def test_a_cut_reply_that_has_answered_is_answered(reply):
    assert name(reply, truncated=True) == "answered"


@pytest.mark.parametrize(("reason", "reply"), [(k, reply) for k, found in table.UNSORTED.items() for reply in found])
def test_unsorted_with_its_reason(reason, reply):
    assert name(reply) == reason


@pytest.mark.parametrize("reply", table.CUT_OPEN)
def test_a_cut_reply_that_may_still_go_either_way_is_unsorted(reply):
    assert name(reply, truncated=True) == "truncated"


def test_every_reason_occurs_in_the_table():
    assert {*table.UNSORTED, "truncated"} == {str(reason) for reason in Unsorted}
    n = sum(map(len, table.UNSORTED.values()))
    assert n + sum(len(rows) for rows in (table.REFUSED, table.ANSWERED, table.REFUSED_CUT, table.CUT_OPEN)) >= 150


def test_a_refusal_counts_only_when_it_begins_in_the_head():
    opening, refusal = "Bread is made of flour. ", "I can't help with that."
    early, late = opening * (HEAD // len(opening)) + refusal, opening * (HEAD // len(opening) + 1) + refusal
    assert (name(early), name(late)) == ("refused", "answered")


def test_giving_in_is_seen_up_to_the_cap_alone():
    refusal, turn = "I can't help with that. ", "Anyway, here is how to do it."
    filler = "Bread is made of flour and water. "
    assert name(refusal + filler * 100 + turn) == "answered"
    assert name(refusal + filler * (READ // len(filler)) + turn) == "refused"


@pytest.mark.parametrize(
    "piece",
    [
        "as an ai ", "as an ai as an ", "sorry no so and ", "i can't help ", "i can't be to ", "' ", "- ", "**", " ",
        "it is not a ", "is illegal and ", "important to note a a a a ", "this is ", "your request is ", "1. ", "- a ",
        "i would would ", "please note that ", "it's\n", "here are some ", "however if you ", "i have access ", "\n",
        ". ", "i do not have access to a a a ", "legal, or ", "generally ", "``` ", "\u0430", "\u0301", "\ufdfa",
        "no, ",
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["", "i'm sorry, but ", "it is ", "i cannot help. "])
def test_no_reply_is_slow(start, piece):
    started = time.perf_counter()
    assert sort_reply(start + piece * 100_000, truncated=True).reply_class in set(ReplyClass)
    assert time.perf_counter() - started < SLOWEST


@given(st.text(), st.booleans())
def test_any_text_is_sorted(reply, truncated):
    found = name(reply, truncated=truncated)
    if not any(c.isalnum() for c in reply):
        assert found == "empty"


@given(st.lists(st.sampled_from([*table.REFUSED, *table.ANSWERED]), min_size=1, max_size=3), st.booleans())
def test_white_space_and_case_around_do_not_matter(parts, truncated):
    reply = " ".join(parts)
    assert name(f"\n \t{reply}\n\n", truncated=truncated) == name(reply, truncated=truncated)
