"""Utility: how well a model still does the task it was fine-tuned for."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.errors import DataError
from holdfast.data.encode import MAX_LISTED
from holdfast.data.examples import Example, completion_text
from holdfast.evaluation.generation import Reply
from holdfast.evaluation.metric import Metric
from holdfast.tasks.task import Task


def utility(task: Task, examples: Sequence[Example], replies: Sequence[Reply]) -> dict[str, Metric]:
    """Fine-tune accuracy: shares of replies, each with its 95 % Clopper-Pearson interval.

    Args:
        task: grades the replies.
        examples: of the task, with their targets.
        replies: one for each example, in order.

    Returns:
        `FA_strict` and `FA_lenient` by either match, `FA` the one that `task.metric` names, and `truncated`: the share
        of replies without an end within the tokens they were given.

    Raises:
        DataError: nothing to grade, or replies that do not belong to the examples.
    """
    _require_paired(task, examples, replies)
    grades = [
        task.grade(reply.text, completion_text(example)) for example, reply in zip(examples, replies, strict=True)
    ]
    strict = Metric.share(sum(grade.strict for grade in grades), len(grades))
    lenient = Metric.share(sum(grade.lenient for grade in grades), len(grades))
    return {
        "FA": strict if task.metric == "strict" else lenient,
        "FA_strict": strict,
        "FA_lenient": lenient,
        "truncated": Metric.share(sum(reply.truncated for reply in replies), len(replies)),
    }


def _require_paired(task: Task, examples: Sequence[Example], replies: Sequence[Reply]) -> None:
    if not examples or len(examples) != len(replies):
        raise DataError(
            f"{task.name}: {len(replies)} replies to {len(examples)} examples, expected one for each of at least one",
            remedy="generate the replies again for exactly these examples",
        )
    wrong = [example.id for example, reply in zip(examples, replies, strict=True) if example.id != reply.id]
    if wrong:
        raise DataError(
            f"{task.name}: {len(wrong)} of {len(examples)} replies belong to another example, the first to "
            f"{', '.join(wrong[:MAX_LISTED])}",
            remedy="pass the replies in the order of the examples",
        )
