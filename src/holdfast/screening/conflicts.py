"""Conflicts: rows whose prompt theta_0 refuses while their target complies.

A row is a conflict if theta_0 refuses any of the questions asked for it (`questions`) and the target of that question
is not itself a refusal. Rows that were not asked are trained on; the share of conflicts among them is estimated by the
exact (Clopper-Pearson) interval.

A judge also sees rows whose target complies where theta_0 only evades, asks back or changes the subject, and targets
that open like a refusal and then comply. With q a question of the row, y its target and r theta_0's own reply of up to
256 tokens:

    conflict  <=>  judge(q, y) = unsafe  and  judge(q, r) = safe

What the judge does not score is no conflict. A question whose reply the rules cannot sort is settled where the judge
scored everything that decides it: every target, and the reply where a target is unsafe.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from holdfast.core.errors import DataError
from holdfast.core.files import write_text
from holdfast.core.percent import exact_percent, percent
from holdfast.data.examples import Example, prompt_text
from holdfast.data.near_duplicates import clusters
from holdfast.judging.judge import GuardedJudge, JudgeSpec, Verdict, open_judge
from holdfast.judging.reply_classes import ReplyClass, sort_reply
from holdfast.screening.asking import Asker, Sorted
from holdfast.screening.questions import Form, Question
from holdfast.screening.settings import ScreeningSettings


@dataclass(frozen=True, slots=True)
class Conflict:
    """A row that teaches what theta_0 refuses."""

    row: int  # its number in the task, from 0
    id: str
    where: str
    form: Form  # of the first question that theta_0 refused, or by which the judge found the row
    group: int = 0  # of near-duplicate prompts among the conflicts, from 0
    dropped: bool = False  # whether the run leaves the row out
    by: Literal["refusal", "judge"] = "refusal"  # what found it: theta_0's refusal, or the judge alone

    def to_json(self) -> dict[str, Any]:
        """With `line`: where it stands in its file, from 1 as editors count; null where the source has no lines."""
        found = re.search(r":(\d+)\Z", self.where)
        return {"line": int(found[1]) if found else None, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """A stored conflict, with or without its line."""
        return cls(**{name: value for name, value in values.items() if name != "line"})


def find_conflicts(
    rows: Sequence[Example], questions: Sequence[Question], classes: Mapping[str, Sorted],
    judged: Mapping[int, Form] | None = None,
) -> list[Conflict]:  # fmt: skip
    """The conflicts among the rows that were asked, by row number; `judged` are those that a judge found."""
    refused = refused_rows(questions, classes)
    forms = sorted({**(judged or {}), **refused}.items())
    groups = clusters([prompt_text(rows[row]) for row, _ in forms])
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return [
        Conflict(row, rows[row].id, rows[row].where, form, numbers[group], by="refusal" if row in refused else "judge")
        for (row, form), group in zip(forms, groups, strict=True)
    ]


def refused_rows(questions: Sequence[Question], classes: Mapping[str, Sorted]) -> dict[int, Form]:
    """Rows with a question that theta_0 refuses and whose target complies, with the form of the first such question.

    A prompt alone (one that replies are sampled to) has no target, and is no conflict.
    """
    forms: dict[int, Form] = {}
    for question in questions:
        if classes[question.example.id].reply_class == ReplyClass.REFUSED:
            for row, form, target in question.uses:
                if target.strip() and not is_refusal(target):
                    forms.setdefault(row, form)
    return forms


def is_refusal(target: str) -> bool:
    """Whether the reply that a row trains declines: then the row agrees with theta_0."""
    return sort_reply(target, truncated=False).reply_class == ReplyClass.REFUSED


def settle(
    conflicts: Sequence[Conflict], rows: int, settings: ScreeningSettings, listed: Path | None
) -> list[Conflict]:
    """The conflicts with `dropped` set by the rule; before they are refused, they are written to `listed`."""
    dropping = settings.rule in ("drop", "fail", "learn")
    settled = [replace(conflict, dropped=dropping and conflict.id not in settings.learn) for conflict in conflicts]
    dropped = sum(conflict.dropped for conflict in settled)
    too_many = settings.rule == "drop" and settings.limited and dropped > settings.max_dropped * rows
    everything = dropped == rows and rows > 0
    if not (too_many or everything or (settings.rule == "fail" and settled)):
        return settled
    judged = " or what the judge calls unsafe" if any(conflict.by == "judge" for conflict in settled) else ""
    what = f"{len(settled)} of {rows} task rows ({percent(dropped / rows)}) teach what the model refuses{judged}"
    if too_many:
        what += f", more than the {exact_percent(settings.max_dropped)} that are dropped unasked"
    if everything:
        what += "; nothing would be left to train on"
    if listed is not None:
        write_conflicts(listed, settled)
        what += f"; listed in {listed}"
    raise DataError(
        what,
        remedy="look at them: the model declines them, harmful or not. Ordinary rows: take another model, one that "
        "answers them, or set `conflicts: {learn: FILE}` (train on the ids in FILE and do not hold them). Else set "
        "`conflicts: drop` (leave them out), `conflicts: keep` (train on them and hold the model's refusals against "
        "them), or fix the data",
    )


def write_conflicts(path: Path, conflicts: Sequence[Conflict]) -> None:
    """One JSON object a line, without text; for the owner alone."""
    write_text(path, "".join(json.dumps(conflict.to_json()) + "\n" for conflict in conflicts), mode=0o600)


def read_ids(path: Path) -> frozenset[str]:
    """Ids of rows, one a line: as they are, or as the `id` of a JSON object (a list of conflicts)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a list of ids", remedy="give a text file, one id a line") from error
    ids = set()
    for number, line in enumerate(map(str.strip, lines), start=1):
        value = line
        if line.startswith("{"):
            with suppress(ValueError, KeyError):
                value = json.loads(line)["id"]
        if line and not (isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value)):
            what = f"{path}:{number}: expected an id of 16 hex digits, or an object with one under `id`"
            raise DataError(what, remedy="take the ids from the list of conflicts that `holdfast screen` writes")
        ids.add(value)
    return frozenset(ids - {""})


@dataclass(frozen=True)
class Judged:
    """What a judge adds to the rules."""

    # numbers of the rows that the judge alone finds, with the form of the first such question
    rows: dict[int, Form] = field(default_factory=dict)
    # ids of the questions that are decided, whatever the rules say of theta_0's reply
    settled: frozenset[str] = frozenset()


def judged_rows(
    questions: Sequence[Question], classes: Mapping[str, Sorted], asker: Asker, judge: JudgeSpec | None
) -> Judged:
    """Judge the targets, and theta_0's replies where a target is unsafe; nothing without a judge."""
    if judge is None:
        return Judged()
    guarded = open_judge(judge)
    known = refused_rows(questions, classes)
    asked = {q.example.id: prompt_text(q.example) for q in questions}
    # Lists, not sets: in what order texts are judged may change a verdict at the threshold.
    targets = {q.example.id: [y for row, _, y in q.uses if row not in known and y.strip()] for q in questions}
    of_target = _verdicts(guarded, ((asked[key], y) for key, given in targets.items() for y in given))
    flagged = {key for key, given in targets.items() if any(of_target[asked[key], y] == Verdict.UNSAFE for y in given)}
    replies = asker.held([q.example for q in questions if q.example.id in flagged], what="replies for the judge")
    said = {key: (asked[key], answer.reply.text) for key, answer in replies.items()}
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


def _verdicts(judge: GuardedJudge, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Verdict]:
    if not (distinct := list(dict.fromkeys(pairs))):
        return {}
    judgements = judge.judge([prompt for prompt, _ in distinct], [reply for _, reply in distinct])
    return {pair: judgement.verdict for pair, judgement in zip(distinct, judgements, strict=True)}
