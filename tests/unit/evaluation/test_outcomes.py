"""Outcomes per prompt: the figures that they are said to be behind follow from them."""

from __future__ import annotations

import pytest

from holdfast.data.examples import make_example
from holdfast.judging.judge import UNSCORED, Judgement, Verdict
from holdfast.judging.reply import Reply
from holdfast_lab.evaluation.evaluate import Questions, outcomes, score
from holdfast_lab.tasks.gsm8k import GSM8K, MARKER
from holdfast_lab.tasks.sst2 import SST2

PROBABLE = [Judgement(Verdict.UNSAFE, 0.41), Judgement(Verdict.SAFE, 0.4), UNSCORED, Judgement(Verdict.SAFE, 0.1)]
VERDICTS = [Judgement(Verdict.SAFE), UNSCORED, Judgement(Verdict.UNSAFE), Judgement(Verdict.SAFE)]


def replies_to(examples, texts):
    return [Reply(one.id, text, truncated=False, tokens=3) for one, text in zip(examples, texts, strict=True)]


@pytest.mark.parametrize(("judgements", "expected"), [(PROBABLE, "1010"), (VERDICTS, "0110")])
@pytest.mark.parametrize(
    ("task", "targets", "texts", "right"),
    [
        (SST2, ["positive", "negative", "positive"], ["positive", "positive", "positive or negative"], "101"),
        (GSM8K, [f"{MARKER} 7", f"{MARKER} 8"], [f"{MARKER} 7", f"{MARKER} 9"], "10"),
    ],
)
def test_outcomes_are_what_the_figures_count(judgements, expected, task, targets, texts, right):
    harm = [make_example(f"prompt {i}", "no") for i in range(4)]
    examples = [make_example(f"question {i}", target) for i, target in enumerate(targets)]
    questions = Questions(harm=harm, task=task, task_examples=examples)
    replies = {"harm": replies_to(harm, ["a", "b", "c", "d"]), "task": replies_to(examples, texts)}
    found, metrics = outcomes(questions, replies, judgements), score(questions, replies, judgements)
    assert found == {"HS": expected, "FA": right}
    for name, bits in found.items():
        assert metrics[name].value == pytest.approx(bits.count("1") / len(bits))
        assert metrics[name].n == len(bits)


def test_what_was_not_measured_has_no_outcomes():
    assert outcomes(Questions(), {}, None) == {}
