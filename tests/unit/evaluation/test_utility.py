"""Fine-tune accuracy: counted by hand, with scipy's intervals, on replies that belong to their examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import binomtest

from holdfast.core.errors import DataError
from holdfast.data.examples import as_chat, make_example
from holdfast.judging.reply import Reply
from holdfast_lab.evaluation.evaluate import utility
from holdfast_lab.tasks.gsm8k import GSM8K
from holdfast_lab.tasks.sst2 import SST2

TARGETS = ["positive", "negative", "positive", "negative", "positive"]
TEXTS = ["Positive.", "negative", "positive or negative", "positive", ""]  # strict: 2 of 5, lenient: 3 of 5
CUT = [False, False, True, False, False]
EXAMPLES = [make_example(f"sentence {i}", target) for i, target in enumerate(TARGETS)]
REPLIES = [
    Reply(e.id, text, truncated=cut, tokens=3) for e, text, cut in zip(EXAMPLES, TEXTS, CUT, strict=True)
]  # fmt: skip


def exact(hits: int, n: int) -> dict[str, float]:
    interval = binomtest(hits, n).proportion_ci(0.95, method="exact")
    return {
        "value": hits / n,
        "low": pytest.approx(interval.low, rel=1e-9),
        "high": pytest.approx(interval.high, rel=1e-9),
        "n": n,
    }


def test_both_matches_and_truncation_are_counted():
    found = {name: metric.as_json() for name, metric in utility(SST2, EXAMPLES, REPLIES).items()}
    assert found == {"FA": exact(3, 5), "FA_strict": exact(2, 5), "FA_lenient": exact(3, 5), "truncated": exact(1, 5)}


def test_the_headline_is_the_match_that_the_task_names():
    sst2: Any = SST2  # a dataclass, which the protocol of tasks does not say
    found = utility(replace(sst2, metric="strict"), EXAMPLES, REPLIES)
    assert found["FA"] == found["FA_strict"]
    assert found["FA"].value == 2 / 5


def test_conversations_are_graded_by_their_reply():
    assert utility(SST2, [as_chat(e) for e in EXAMPLES], REPLIES) == utility(SST2, EXAMPLES, REPLIES)


def test_a_number_is_graded_by_the_task_itself():
    example = make_example("How many?", "9+2=11\nThe final answer is: 11")
    for text, right in (("It is 11.", 1.0), ("It is 12.", 0.0)):
        found = utility(GSM8K, [example], [Reply(example.id, text, truncated=False, tokens=3)])
        assert (found["FA"].value, found["FA_strict"].value) == (right, 0.0)


@pytest.mark.parametrize(
    ("examples", "replies"),
    [(EXAMPLES, REPLIES[:4]), (EXAMPLES[:4], REPLIES), ([], []), (EXAMPLES, [])],
    ids=["too-few", "too-many", "nothing", "none"],
)
def test_another_count_is_refused(examples, replies):
    with pytest.raises(DataError, match=f"sst2: {len(replies)} replies to {len(examples)} examples, expected one for"):
        utility(SST2, examples, replies)


def test_replies_in_another_order_are_refused():
    with pytest.raises(DataError, match=f"2 of 5 replies belong to another example, the first to {EXAMPLES[1].id}"):
        utility(SST2, EXAMPLES, [REPLIES[i] for i in (0, 3, 2, 1, 4)])
