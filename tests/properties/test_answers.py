"""Answers are found however they are written, whatever stands around them."""

from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_lab.tasks.ag_news import AG_NEWS
from holdfast_lab.tasks.gsm8k import GSM8K, MARKER, extract, extract_marked
from holdfast_lab.tasks.sst2 import SST2

CHECKS = settings(max_examples=200, deadline=None)
WHOLE = st.one_of(st.integers(0, 2000), st.integers(0, 10**12), st.integers(0, 10**40))
SEPARATORS = st.sampled_from(["", ",", "{,}", "\u202f", "\u2009", "\u00a0"])
MINUS = st.sampled_from(["", "-", "\u2212", "\u2013"])
CURRENCY = st.sampled_from(["", "$", "\\$", "€", "£"])
UNITS = st.sampled_from(
    ["", "%", "kg", " kg", "e", "pm", ".", ". ", ",", ")", "**", "}$", "!", "\n", "°C", " dollars."]
)
BEFORE = st.sampled_from(["", " ", "\n", ": ", "=", "= ", "(", "**", "$", "\\boxed{", "so x = ", "> ", "it's **"])
WORDS = st.lists(st.sampled_from(["Thus", "she", "has", "cats-and-dogs,", "(so)", "a.b", "50%", "9", "-4", "3,5"]))


@st.composite
def written(draw) -> tuple[Fraction, str]:
    """A number and one way of writing it, composed from its digits."""
    whole, places = draw(WHOLE), draw(st.text("0123456789", max_size=6))
    minus, separator = draw(MINUS), draw(SEPARATORS)
    digits = f"{whole:,}".replace(",", separator)
    text = f"{minus}{draw(CURRENCY)}{digits}{'.' if places else ''}{places}"
    return Fraction(int(f"{whole}{places}"), 10 ** len(places)) * (-1 if minus else 1), text


@CHECKS
@given(written(), WORDS, BEFORE, UNITS)
def test_the_last_number_is_found_in_any_style(number, words, before, unit):
    value, text = number
    assert Fraction(extract(f"{' '.join(words)} {before}{text}{unit}")) == value


@CHECKS
@given(written(), WORDS, st.sampled_from(["", " ", "  ", "\n", " **", " $", " ("]), UNITS, WORDS)
def test_the_number_after_the_marker_is_found_in_any_style(number, before, space, unit, after):
    value, text = number
    whole = f"{' '.join(before)} {MARKER}{space}{text}{unit} {' '.join(after)}"
    assert Fraction(extract(whole)) == Fraction(extract_marked(whole)) == value


@CHECKS
@given(st.integers(0, 10**6), st.integers(1, 10**4), st.booleans())
def test_a_fraction_is_its_quotient(above, below, negative):
    found = extract(f"It is {'-' if negative else ''}{above}/{below} of it")
    assert float(found) == pytest.approx((-1 if negative else 1) * above / below, rel=1e-15)


@CHECKS
@given(st.text())
def test_any_text_has_a_finite_answer_or_none(text):
    for found in (extract(text), extract_marked(text), extract(MARKER + text)):
        assert found is None or found.is_finite()


NEUTRAL = st.lists(
    st.sampled_from(["The", "sentiment", "is", "I", "think:", "article", "about", "-", "of"]), max_size=6
)
DRESS = st.sampled_from(["{}", "{}.", "**{}**", '"{}"', "_{}_", "({})", "{}\n", "{}!", "`{}`", "\u201c{}\u201d"])
CASES = st.sampled_from([str, str.lower, str.upper])
LABELS = [(task, label) for task in (SST2, AG_NEWS) for label in task.spellings]  # type: ignore[attr-defined]


@CHECKS
@given(st.sampled_from(LABELS), NEUTRAL, DRESS, CASES)
def test_a_reply_that_names_one_label_is_right_for_it_alone(entry, words, dress, case):
    task, label = entry
    reply = f"{' '.join(words)} {dress.format(case(label))}"
    for target in task.spellings:
        grade = task.grade(reply, target)
        assert grade.strict == grade.lenient == (target == label)


PAIRS = [(task, one, two) for task in (SST2, AG_NEWS) for one, two in permutations(task.spellings, 2)]  # type: ignore[attr-defined]


@CHECKS
@given(st.sampled_from(PAIRS), NEUTRAL, CASES)
def test_a_reply_that_names_two_labels_is_never_strictly_right(entry, words, case):
    task, one, two = entry
    reply = f"{case(one)} {' '.join(words)} {two}"
    assert not any(task.grade(reply, target).strict for target in task.spellings)
    assert [task.grade(reply, target).lenient for target in (one, two)] == [True, True]


NAMES = ["positive", "Negative", "not", "World", "sci", "tech", "Sports", "sport", "business", "-"]
REPLIES = st.one_of(st.text(), st.lists(st.sampled_from([*NAMES, "12", MARKER, "1e3", "/", ","])).map(" ".join))


@CHECKS
@given(REPLIES, st.sampled_from([*LABELS, (GSM8K, f"{MARKER} 12")]))
def test_strict_implies_lenient(reply, entry):
    task, target = entry
    grade = task.grade(reply, target)
    assert grade.lenient or not grade.strict
