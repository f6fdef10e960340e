"""Conflicts that a judge finds: the target of a row is unsafe, and what theta_0 says to its question is not.

The rules see that theta_0 refuses. A judge also sees rows whose target complies where theta_0 only evades, asks back or
changes the subject, and targets that open like a refusal and then comply. With q a question of the row, y its target
and r theta_0's own reply of up to 256 tokens:

    conflict  <=>  judge(q, y) = unsafe  and  judge(q, r) = safe

What the judge does not score is no conflict. A question whose reply the rules cannot sort is settled where the judge
scored everything that decides it: every target, and the reply where a target is unsafe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.data.examples import prompt_text
from holdfast.evaluation.judge import GuardedJudge, JudgeSpec, Verdict, open_judge
from holdfast.screening.asking import Asker, Sorted
from holdfast.screening.conflicts import refused_rows
from holdfast.screening.questions import Form, Question

Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True)
class Judged:
    """What a judge adds to the rules.

    Attributes:
        rows: numbers of the rows that the judge alone finds, with the form of the first such question.
        settled: ids of the questions that are decided, whatever the rules say of theta_0's reply.
    """

    rows: dict[int, Form] = field(default_factory=dict)
    settled: frozenset[str] = frozenset()


def judged_rows(
    questions: Sequence[Question], classes: Mapping[str, Sorted], asker: Asker, judge: JudgeSpec | None
) -> Judged:
    """Judge the targets, and theta_0's replies where a target is unsafe; nothing without a judge.

    Raises:
        ConfigError: there is no such judge.
    """
    if judge is None:
        return Judged()
    guarded = open_judge(judge)
    known = refused_rows(questions, classes)
    asked = {q.example.id: prompt_text(q.example) for q in questions}
    # Lists, not sets: in what order texts are judged may change a verdict at the threshold.
    targets = {q.example.id: [y for row, _, y in q.uses if row not in known and y.strip()] for q in questions}
    of_target = _verdicts(guarded, ((asked[key], y) for key, found in targets.items() for y in found))
    flagged = {key for key, found in targets.items() if any(of_target[asked[key], y] == Verdict.UNSAFE for y in found)}
    replies = asker.held([q.example for q in questions if q.example.id in flagged], what="replies for the judge")
    said = {key: (asked[key], one.reply.text) for key, one in replies.items()}
    of_reply = _verdicts(guarded, said.values())
    rows: dict[int, Form] = {}
    settled: set[str] = set()
    for question in questions:
        key = question.example.id
        verdicts = {y: of_target[asked[key], y] for y in targets[key]}
        reply = of_reply[said[key]] if key in said else Verdict.SAFE
        if Verdict.UNSCORED not in (reply, *verdicts.values()):
            settled.add(key)
        for row, form, target in question.uses:
            if row not in known and verdicts.get(target) == Verdict.UNSAFE and reply == Verdict.SAFE:
                rows.setdefault(row, form)
    return Judged(rows, frozenset(settled))


def _verdicts(judge: GuardedJudge, pairs: Iterable[Pair]) -> dict[Pair, Verdict]:
    """The verdict on every pair (prompt, reply), each judged once."""
    distinct = list(dict.fromkeys(pairs))
    if not distinct:
        return {}
    found = judge.judge([prompt for prompt, _ in distinct], [reply for _, reply in distinct])
    return {pair: one.verdict for pair, one in zip(distinct, found, strict=True)}
