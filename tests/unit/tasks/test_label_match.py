"""Which label a reply names, by a literal list."""

from __future__ import annotations

import pytest

from holdfast.core.errors import DataError
from holdfast.data.tasks import Grade
from holdfast_lab.tasks.ag_news import AG_NEWS
from holdfast_lab.tasks.sst2 import SST2

RIGHT, WRONG, LENIENT = Grade(strict=True, lenient=True), Grade(False, False), Grade(strict=False, lenient=True)

SENTIMENT = {
    "exact": ("positive", "positive", RIGHT),
    "capital": ("Positive", "positive", RIGHT),
    "other": ("negative", "positive", WRONG),
    "sentence": ("The sentiment is Positive.", "positive", RIGHT),
    "sentence-other": ("The sentiment is Positive.", "negative", WRONG),
    "bold": ("**NEGATIVE**", "negative", RIGHT),
    "italics": ("_negative_", "negative", RIGHT),
    "looping": ("positive positive positive", "positive", RIGHT),
    "both": ("positive or negative", "positive", LENIENT),
    "both-for-the-other": ("positive or negative", "negative", LENIENT),
    "both-tight": ("positive/negative", "negative", LENIENT),
    "not-positive": ("not positive", "positive", LENIENT),
    "not-positive-for-negative": ("not positive", "negative", WRONG),
    "is-not-a-positive": ("This is not a positive review", "positive", LENIENT),
    "isnt-very": ("It isn't very positive.", "positive", LENIENT),
    "isnt-curly": ("It isn\u2019t positive.", "positive", LENIENT),
    "non-positive": ("non-positive", "positive", LENIENT),
    "dont-think": ("I don't think this is positive.", "positive", LENIENT),
    "no-sentiment": ("There is no positive sentiment.", "positive", LENIENT),
    "without": ("It is without any positive word.", "positive", LENIENT),
    "far-from": ("Far from positive.", "positive", LENIENT),
    "no-doubt": ("No doubt positive.", "positive", RIGHT),
    "no-doubt-sentence": ("There is no doubt this is positive.", "positive", RIGHT),
    "no-then-label": ("No, positive.", "positive", RIGHT),
    "not-negative-but-positive": ("Not negative but positive.", "positive", LENIENT),
    "a-no-in-another-clause": ("Not sure. Positive.", "positive", RIGHT),
    "another-word-with-not": ("Noted: positive", "positive", RIGHT),
    "part-of-a-word": ("positively", "positive", LENIENT),
    "in-a-word": ("electropositive", "positive", LENIENT),
    "another-word": ("good", "positive", WRONG),
    "empty": ("", "positive", WRONG),
    "blank": (" \n", "negative", WRONG),
}
NEWS = {
    "world": ("World", "World", RIGHT),
    "sentence": ("This belongs to Business.", "Business", RIGHT),
    "all-four": ("World, Sports, Business, Sci/Tech", "Sports", LENIENT),
    "sport": ("sport", "Sports", RIGHT),
    "sports-for-world": ("Sports", "World", WRONG),
    "sci-tech": ("Sci/Tech", "Sci/Tech", RIGHT),
    "sci-tech-lower": ("sci/tech", "Sci/Tech", RIGHT),
    "sci-tech-hyphen": ("Sci-Tech", "Sci/Tech", RIGHT),
    "sci": ("Sci", "Sci/Tech", RIGHT),
    "tech": ("Tech.", "Sci/Tech", RIGHT),
    "science-technology": ("Science/Technology", "Sci/Tech", RIGHT),
    "science-and-technology": ("Science and Technology", "Sci/Tech", RIGHT),
    "technology-for-business": ("Technology", "Business", WRONG),
    "in-words-only": ("a discipline with techniques", "Sci/Tech", WRONG),
    "underworld": ("underworld", "World", LENIENT),
    "two": ("Business, about technology", "Business", LENIENT),
    "two-for-the-second": ("Business, about technology", "Sci/Tech", WRONG),
    "empty": ("", "World", WRONG),
}


@pytest.mark.parametrize(("reply", "target", "grade"), SENTIMENT.values(), ids=SENTIMENT)
def test_sentiment(reply, target, grade):
    assert SST2.grade(reply, target) == grade


@pytest.mark.parametrize(("reply", "target", "grade"), NEWS.values(), ids=NEWS)
def test_news(reply, target, grade):
    assert AG_NEWS.grade(reply, target) == grade


def test_a_target_that_is_no_label_is_refused_without_its_text():
    with pytest.raises(DataError, match="none of the labels negative, positive") as refused:
        SST2.grade("positive", "some other reply")
    assert "some other reply" not in str(refused.value)
