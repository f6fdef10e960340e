"""Conflicts: rows whose prompt theta_0 refuses while their target complies.

A row is a conflict if theta_0 refuses any of the questions asked for it (`questions`) and the target of that question
is not itself a refusal. A judge finds further ones (`judged`). Rows that were not asked are trained on; the share of
conflicts among them is estimated from those that were, by the exact (Clopper-Pearson) interval.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from holdfast.core.errors import DataError
from holdfast.core.files import write_text
from holdfast.core.percent import exact_percent, percent
from holdfast.data.examples import Example, prompt_text
from holdfast.data.near_duplicates import clusters
from holdfast.evaluation.reply_classes import ReplyClass, sort_reply
from holdfast.screening.asking import Sorted
from holdfast.screening.questions import Form, Question
from holdfast.screening.settings import ScreeningSettings

By: TypeAlias = Literal["refusal", "judge"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """A row that teaches what theta_0 refuses.

    Attributes:
        row: its number in the task, from 0.
        id, where: of the row.
        form: of the first question that theta_0 refused, or by which the judge found the row.
        group: of near-duplicate prompts among the conflicts, from 0.
        dropped: whether the run leaves the row out.
        by: what found it: theta_0's refusal, or the judge alone.
    """

    row: int
    id: str
    where: str
    form: Form
    group: int = 0
    dropped: bool = False
    by: By = "refusal"

    def to_json(self) -> dict[str, int | str | bool]:
        """Without any text."""
        return {
            "row": self.row, "id": self.id, "where": self.where, "form": self.form, "group": self.group,
            "dropped": self.dropped, "by": self.by,
        }  # fmt: skip


def find_conflicts(
    rows: Sequence[Example],
    questions: Sequence[Question],
    classes: Mapping[str, Sorted],
    judged: Mapping[int, Form] | None = None,
) -> list[Conflict]:
    """The conflicts among the rows that were asked, by row number.

    Args:
        rows: of the task.
        questions: what was asked.
        classes: of the replies, by question.
        judged: rows that a judge calls conflicts, with the form of the question.
    """
    refused = refused_rows(questions, classes)
    found = {**(judged or {}), **refused}
    ordered = sorted(found)
    groups = clusters([prompt_text(rows[row]) for row in ordered])
    numbers: dict[int, int] = {}
    return [
        Conflict(
            row, rows[row].id, rows[row].where, found[row], numbers.setdefault(group, len(numbers)),
            by="refusal" if row in refused else "judge",
        )
        for row, group in zip(ordered, groups, strict=True)
    ]  # fmt: skip


def refused_rows(questions: Sequence[Question], classes: Mapping[str, Sorted]) -> dict[int, Form]:
    """Rows with a question that theta_0 refuses and whose target complies, with the form of the first such question."""
    found: dict[int, Form] = {}
    for question in questions:
        if classes[question.example.id].reply_class != ReplyClass.REFUSED:
            continue
        for row, form, target in question.uses:
            if not is_refusal(target):
                found.setdefault(row, form)
    return found


def is_refusal(target: str) -> bool:
    """Whether the reply that a row trains declines: then the row agrees with theta_0."""
    return sort_reply(target, truncated=False).reply_class == ReplyClass.REFUSED


def settle(
    conflicts: Sequence[Conflict], rows: int, settings: ScreeningSettings, listed: Path | None
) -> list[Conflict]:
    """The conflicts with `dropped` set by the rule.

    Args:
        rows: of the task.
        listed: where the conflicts are listed before they are refused.

    Raises:
        DataError: the rule is `fail` and there are conflicts; more than `max_dropped` of the rows would be dropped
            without being asked for; or every row is a conflict.
    """
    dropping = settings.rule in ("drop", "fail", "learn")
    found = [replace(one, dropped=dropping and one.id not in settings.learn) for one in conflicts]
    dropped = sum(one.dropped for one in found)
    too_many = settings.rule == "drop" and settings.limited and dropped > settings.max_dropped * rows
    everything = dropped == rows and rows > 0
    if not (too_many or everything or (settings.rule == "fail" and found)):
        return found
    place = "" if listed is None else f"; listed in {listed}"
    if listed is not None:
        write_conflicts(listed, found)
    share = percent(dropped / rows)
    limit = f", more than the {exact_percent(settings.max_dropped)} that are dropped unasked" if too_many else ""
    limit += "; nothing would be left to train on" if everything else ""
    judged = " or what the judge calls unsafe" if any(one.by == "judge" for one in found) else ""
    raise DataError(
        f"{len(found)} of {rows} task rows ({share}) teach what the model refuses{judged}{limit}{place}",
        remedy="look at them, then set `conflicts: drop` (leave them out), `conflicts: keep` (train on them and hold "
        "the model's refusals against them), `conflicts: {learn: FILE}` (train on the ids in FILE and do not hold "
        "them), or mend the data",
    )


def write_conflicts(path: Path, conflicts: Sequence[Conflict]) -> None:
    """One JSON object a line, without text; for the owner alone."""
    write_text(path, "".join(json.dumps(one.to_json()) + "\n" for one in conflicts), mode=0o600)


def read_ids(path: Path) -> frozenset[str]:
    """Ids of rows, one a line: as they are, or as the `id` of a JSON object (a list of conflicts).

    Raises:
        DataError: the file cannot be read, or a line holds no id.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a list of ids", remedy="give a text file, one id a line") from error
    found = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)["id"] if line.lstrip().startswith("{") else line.strip()
        except (ValueError, KeyError, TypeError):
            value = None
        if not isinstance(value, str) or len(value) != 16 or any(c not in "0123456789abcdef" for c in value):
            raise DataError(
                f"{path}:{number}: expected an id of 16 hex digits, or an object with one under `id`",
                remedy="take the ids from the list of conflicts that `holdfast screen` writes",
            )
        found.add(value)
    return frozenset(found)
