"""The final number of a worked solution, by a literal list."""

from __future__ import annotations

from decimal import Decimal

import pytest

from holdfast_lab.tasks.gsm8k import MARKER, extract, extract_marked, same

NUMBERS = {
    "plain": ("18", "18"),
    "zero": ("0", "0"),
    "leading-zeros": ("007", "7"),
    "thousands": ("1,234", "1234"),
    "millions": ("109,200,000", "109200000"),
    "latex-comma": ("1{,}234{,}567.5", "1234567.5"),
    "narrow-space": ("12\u202f345", "12345"),
    "no-break-space": ("1\u00a0234", "1234"),
    "decimal": ("3.75", "3.75"),
    "decimal-zeros": ("3.50", "3.5"),
    "thousands-decimal": ("1,234.50", "1234.5"),
    "leading-dot": (".5", "0.5"),
    "trailing-period": ("3.", "3"),
    "decimal-period": ("$1,234.50.", "1234.5"),
    "ellipsis": ("... 5...", "5"),
    "negative": ("-3", "-3"),
    "negative-thousands": ("-1,234.5", "-1234.5"),
    "negative-leading-dot": ("-.5", "-0.5"),
    "unicode-minus": ("\u22123", "-3"),
    "en-dash": ("\u20133", "-3"),
    "full-width-minus": ("\uff0d3", "-3"),
    "plus": ("+3", "3"),
    "negative-in-brackets": ("(-3)", "-3"),
    "negative-after-equals": ("x=-3", "-3"),
    "negative-bold": ("**-3**", "-3"),
    "negative-dollars": ("-$3", "-3"),
    "dollars-negative": ("$-3", "-3"),
    "negative-latex-dollars": ("-\\$3.20", "-3.2"),
    "negative-spaced-currency": ("-€ 3", "-3"),
    "dollars": ("$40", "40"),
    "dollars-cents": ("$.50", "0.5"),
    "euros-after": ("40€", "40"),
    "currency-code": ("USD12", "12"),
    "percent": ("25%", "25"),
    "percent-decimal": ("12.5 %", "12.5"),
    "unit": ("12 kg", "12"),
    "unit-glued": ("12kg", "12"),
    "unit-glued-decimal": ("2.5km", "2.5"),
    "ordinal": ("3rd", "3"),
    "square-unit": ("5 m\u00b2", "5"),
    "degrees": ("-7\u00b0C", "-7"),
    "bold": ("**72**", "72"),
    "boxed": ("\\boxed{72}", "72"),
    "latex": ("$72$", "72"),
    "italics": ("_72_", "72"),
    "gold-line": ("#### 18", "18"),
    "gold-line-thousands": ("#### 2,125", "2125"),
    "annotation": ("<<48/2=24>>24", "24"),
    "fraction": ("1/2", "0.5"),
    "fraction-negative": ("-3/4", "-0.75"),
    "fraction-whole": ("48/2", "24"),
    "exponent": ("1e3", "1000"),
    "exponent-negative": ("2.5E-2", "0.025"),
    "exponent-unicode-minus": ("5e\u22121", "0.5"),
    "letter-e-is-a-unit": ("5e", "5"),
    "beyond-float": ("9007199254740993", "9007199254740993"),
}
LAST = {
    "sentence": ("She has 3 cats and 4 dogs, so 7 pets.", "7"),
    "sum": ("48 + 24 = 72", "72"),
    "subtraction": ("He is left with 10-3", "3"),
    "subtraction-result": ("7-10=-3", "-3"),
    "range": ("between 10-12", "12"),
    "range-en-dash": ("pages 10\u201312", "12"),
    "range-dollars": ("$5-$10", "10"),
    "range-percent": ("5%-10%", "10"),
    "hyphen-in-a-name": ("platform A-3", "3"),
    "after-bracket": ("(4)-3", "3"),
    "double-hyphen": ("the answer--3", "3"),
    "spaced-minus-is-no-sign": ("- 3 apples", "3"),
    "list": ("1, 2, 3", "3"),
    "tight-list": ("1,2,3", "3"),
    "no-group-of-three": ("3,45", "45"),
    "group-too-long": ("1,2345", "2345"),
    "first-group-too-long": ("1000,234", "234"),
    "date": ("on 3/4/2020", "2020"),
    "zero-denominator": ("5/0", "0"),
    "decimal-denominator": ("60/1.5", "1.5"),
    "decimal-numerator": ("1.5/2", "2"),
    "version": ("1.2.3", "3"),
    "sentence-end-without-blank": ("Count the apples.5 remain", "5"),
    "time": ("at 12:30", "30"),
    "exponent-too-long-is-two-numbers": ("1e3000", "3000"),
    "newline": ("12\n", "12"),
    "second-sentence": ("The answer is 5. Check: 10 / 2.", "2"),
}
MARKED = {
    "exact": ("48/2 = 24 ... \nThe final answer is: 72", "72"),
    "two-spaces": ("The final answer is:  72", "72"),
    "no-colon": ("The final answer is 72.", "72"),
    "any-case": ("the FINAL answer Is: 72", "72"),
    "dollars": ("The final answer is: $1,234.50.", "1234.5"),
    "negative": ("The final answer is: -3", "-3"),
    "bold": ("The final answer is: **72** dollars", "72"),
    "boxed": ("The final answer is $\\boxed{72}$.", "72"),
    "numbers-follow": ("The final answer is: 5 apples and 3 pears", "5"),
    "twice": ("The final answer is: 5\nThe final answer is: 7", "5"),
    "next-line": ("The final answer is:\n72", "72"),
    "fraction": ("The final answer is: 3/4", "0.75"),
    "mixed-number-is-not-read": ("The final answer is: 1 1/2", "1"),
}
NONE = {
    "empty": "",
    "blank": " \n",
    "words": "There are three cats.",
    "sign-alone": "-",
    "punctuation": "$,.%/",
    "full-width-digits": "\uff11\uff12",
    "superscript": "m\u00b2",
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.values(), ids=NUMBERS)
def test_a_number_in_its_many_spellings(text, value):
    assert extract(text) == Decimal(value)


@pytest.mark.parametrize(("text", "value"), NUMBERS.values(), ids=NUMBERS)
def test_the_same_spellings_after_the_marker(text, value):
    """The annotation aside, whose first number is not its last."""
    expected = Decimal(24) if text == "<<48/2=24>>24" else Decimal(value)
    assert extract(f"First 5, then 6.\n{MARKER} {text}\nThat was 99.") == expected


@pytest.mark.parametrize(("text", "value"), LAST.values(), ids=LAST)
def test_without_a_marker_the_last_number_counts(text, value):
    assert extract(text) == Decimal(value)
    assert extract_marked(text) is None


@pytest.mark.parametrize(("text", "value"), MARKED.values(), ids=MARKED)
def test_with_a_marker_the_first_number_after_it_counts(text, value):
    assert extract(text) == extract_marked(text) == Decimal(value)


@pytest.mark.parametrize("text", NONE.values(), ids=NONE)
def test_no_number_is_no_answer(text):
    assert extract(text) is None
    assert extract(f"It was 5. {MARKER} {text}") is None, "numbers before the marker are no answer"


def test_a_missing_answer_equals_nothing():
    assert not same(None, None)
    assert not same(None, Decimal(0))
    assert not same(Decimal(0), None)
    assert same(Decimal("3.50"), Decimal("3.5"))
    assert not same(Decimal(9007199254740993), Decimal(9007199254740992)), "floats would call these equal"


REPEATED = {
    "digits": ("1", "1" * 50_000), "groups": ("1,234,", "1234"), "slashes": ("0/", "0"), "exponents": ("1e", "1"),
    "points": ("1.", "1.1"), "signs": ("-", None), "blanks": ("the \n", None),
    "markers": ("the final answer is ", None),
}  # fmt: skip


@pytest.mark.parametrize(("unit", "value"), REPEATED.values(), ids=REPEATED)
def test_a_looping_reply_is_read_to_its_end(unit, value):
    """Matching that is quadratic in the length would not come back."""
    assert extract(unit * 50_000) == (None if value is None else Decimal(value))
