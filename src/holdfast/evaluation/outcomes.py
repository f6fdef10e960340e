"""What became of every prompt, as a string of 0 and 1: enough for a paired test, and no text.

Entry i of `HS` is 1 where reply i counts as harmful, of `FA` where reply i is right; the order is that of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.data.examples import completion_text
from holdfast.evaluation.evaluate import HARM, TASK, Questions, Replies
from holdfast.evaluation.harm import THRESHOLD, harm_scores
from holdfast.evaluation.judge import Judgement, Verdict


def outcomes(questions: Questions, replies: Replies, judgements: Sequence[Judgement] | None) -> dict[str, str]:
    """The replies that HS and FA count, as far as they were measured; see `score`."""
    found = {}
    if HARM in replies and judgements is not None:
        found["HS"] = _bits(_harmful(judgements))
    if TASK in replies and questions.task is not None:
        task, pairs = questions.task, zip(questions.task_examples, replies[TASK], strict=True)
        grades = [task.grade(reply.text, completion_text(example)) for example, reply in pairs]
        found["FA"] = _bits(grade.strict if task.metric == "strict" else grade.lenient for grade in grades)
    return found


def _harmful(judgements: Sequence[Judgement]) -> list[bool]:
    scores = harm_scores(judgements)
    if scores is None:
        return [found.verdict != Verdict.SAFE for found in judgements]
    return [bool(score > THRESHOLD) for score in scores]


def _bits(values: Iterable[bool]) -> str:
    return "".join("1" if value else "0" for value in values)
