"""Words and numbers as shown."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from holdfast.reporting.facts import conflict_lines, task_loss
from holdfast.reporting.wording import counted, degraded_means, markdown, number, one_line, scale_words, visible


@given(st.text(alphabet=st.characters(codec=None)))
def test_visible_text_has_no_hidden_character(text):
    shown = visible(text)
    assert all(c in "\n\t" or unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} for c in shown)
    shown.encode("utf-8")


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_plain_text_stays_as_it_is(text):
    assert visible(text) == text


def test_a_long_text_is_cut_at_the_limit():
    assert visible("abcdef", limit=4) == "abcd … (2 more characters)"
    assert "\n" not in one_line("a\nb\tc")


@given(st.text(alphabet="<>&\"'`*_[]()#|~!:@$^\\{}+-.=wW htps/ab\n"))
def test_markdown_shows_the_text_and_nothing_else(text):
    """Rendered with raw HTML, tables, strike-through and bare links allowed, the paragraph holds no element."""
    words = f"a {text} b"
    tokens = (
        MarkdownIt("commonmark", {"html": True})
        .enable(["table", "strikethrough"])
        .parse(f"| x |\n|---|\n| {markdown(words)} |")
    )
    inline = [token for token in tokens if token.type == "inline"]
    assert len(inline) == 2
    kinds = {child.type for child in inline[1].children}
    assert kinds <= {"text", "text_special"}
    assert "".join(child.content for child in inline[1].children) == one_line(words)


@pytest.mark.parametrize(
    "url", ["https://example.org", "www.example.org", "WWW.example.org", "a@example.org", "mailto:a@b.c"]
)
def test_markdown_makes_no_bare_link(url):
    escaped = markdown(url)
    assert "https:" not in escaped
    assert "www." not in escaped.lower()
    assert not any(c in escaped.replace("\\@", "").replace("\\:", "") for c in "@:")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0684, "0.068"),
        (-0.5, "−0.500"),
        (-1e-7, "0.000"),
        (1234.5, "1,234.5"),
        (2e7, "2.0e+07"),
        (float("inf"), "not a number"),
    ],
)
def test_number(value, shown):
    assert number(value) == shown


def test_counted_and_plain_words():
    assert counted(1, "step") == "1 step"
    assert counted(2000, "step") == "2,000 steps"
    assert "9.5 % less probable" in degraded_means(0.1, "nll_token", 8)


def test_a_divergence_is_neither_less_likely_nor_better_below_zero():
    assert degraded_means(0.1, "kl_token", 8) == (
        "the predictions along the safe reply moved by more than 0.1 nats of KL per token"
    )
    assert "likely" not in degraded_means(0.1, "kl_token", 8)
    assert "better" not in scale_words("kl_token")
    assert degraded_means(0.1, "kl_first", 8) == (
        "the predictions at the start of the safe reply moved by more than 0.1 nats of KL per token over the first 8 "
        "tokens"
    )
    assert "better" not in scale_words("kl_first")
    assert "below 0 is better" in scale_words("nll_token")


def test_the_task_loss_is_that_of_the_first_and_last_tenth_of_the_steps():
    events = [{"loss": float(20 - i)} for i in range(20)]
    odd: list[dict[str, Any]] = [{"loss": float("nan")}, {"loss": "2"}, {"loss": 10**400}, {"behaviour": {}}]
    (words,) = task_loss([*events, *odd])
    assert words.startswith("19.5 at the start, 1.5 at the end (means of 2 steps; a target token's probability")
    assert "is then 22.3 %)" in words, "exp(-1.5)"
    assert task_loss(odd) == []


@pytest.mark.parametrize(("last", "far"), [(2.1, True), (1.9, False)])
def test_a_task_that_may_not_be_learned_is_named(last, far):
    (words,) = task_loss([{"loss": 7.0}, {"loss": last}])
    assert ("often not learned yet" in words) is far


def listing(*lines: object, where: str = "task.jsonl:1") -> str:
    return "".join(json.dumps({"line": line, "dropped": line != 3, "where": where}) + "\n" for line in lines)


def test_the_lines_of_conflicts_are_listed_up_to_ten(tmp_path):
    listed = tmp_path / "screening" / "conflicts.jsonl"
    assert conflict_lines(tmp_path) == ""
    listed.parent.mkdir()
    listed.write_text(listing(17, 3))
    assert conflict_lines(tmp_path) == "lines 3, 17 of the task file"
    assert conflict_lines(tmp_path, dropped=True) == "line 17 of the task file"
    for strange in (listing(None), listing(float("inf")), "[1]\n", "{\n", '{"line": 3}\n'):
        listed.write_text(strange)
        assert conflict_lines(tmp_path) == ""
    listed.write_text(listing(3) + listing(4, where="other.jsonl:4"))
    assert conflict_lines(tmp_path) == "", "lines of two files"
    listed.write_text(listing(*range(1, 13)))
    assert conflict_lines(tmp_path) == "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more of the task file"
