"""Screening: ask theta_0 the task and the prompts to hold, set conflicts aside, and fix what is held and watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.certification.binomial import interval
from holdfast.core.errors import DataError, InfeasibleError
from holdfast.core.percent import exact_percent, percent
from holdfast.data.bundled import KINDS, bundled
from holdfast.data.examples import Example
from holdfast.data.sources import read_prompts
from holdfast.data.splits import Split
from holdfast.judging.judge import JudgeSpec
from holdfast.judging.reply_classes import ReplyClass
from holdfast.screening.asking import Asker, Sorted
from holdfast.screening.conflicts import Conflict, find_conflicts, judged_rows, settle
from holdfast.screening.questions import Question, as_question, asked_rows, distinct
from holdfast.screening.sets import Candidate, HeldSet, Role, keep_apart, replied, share_out, splits_apart
from holdfast.screening.settings import TASK, ScreeningSettings
from holdfast.screening.watch import MonitorPrompts, monitor_prompts

MOST_UNSORTED = 0.05
FEWEST_REFUSALS = 100
FEWEST_ANSWERS = 20
_TOO_FEW = {
    "refusals": ("refuses", "name prompts that it refuses (`safety: {refusals: {prompts: [task, probes, FILE], keep: "
                 "refusals}}`), or teach it to refuse first: holdfast align MODEL"),
    "answers": ("answers", "name prompts that it answers, or use a model that answers ordinary prompts"),
}  # fmt: skip
ROLE_OF_USE: Mapping[str, Role | None] = {"steer": None, "monitor": "unseen", "certify": "certify"}


@dataclass(frozen=True)
class Screening:
    """What a model says to a task, and what follows for a run."""

    rows: int  # of the task
    asked_rows: int  # rows that were asked for; the others are trained on
    unaskable: int  # rows that were chosen and ask nothing: plain text, or longer than the model's positions
    classes: dict[str, int]  # distinct questions of the task by the class of theta_0's reply
    conflicts: tuple[Conflict, ...]  # by row number
    rule: str  # what became of them
    sets: dict[str, Split]  # what is held, by name
    monitor: MonitorPrompts  # what is watched
    # per set and source, how many prompts were asked and kept; groups; replies that changed class
    counts: dict[str, Any] = field(default_factory=dict)

    @property
    def dropped(self) -> frozenset[int]:
        """Numbers of the rows that are left out of training."""
        return frozenset(one.row for one in self.conflicts if one.dropped)

    def kept(self, rows: Sequence[Example]) -> list[Example]:
        """The rows to train on."""
        dropped = self.dropped
        return [row for number, row in enumerate(rows) if number not in dropped]

    def figures(self) -> dict[str, Any]:
        """Counts for result, card and certificate; no text."""
        figures = {
            "rows": self.rows, "asked_rows": self.asked_rows, "unaskable": self.unaskable, "replies": self.classes,
            "conflicts": len(self.conflicts), "groups": len({one.group for one in self.conflicts}),
            "dropped": len(self.dropped), "rule": self.rule, "sets": self.counts,
            "monitor": {name: len(getattr(self.monitor, name)) for name in ("refusals", "unseen", "answers")},
        }  # fmt: skip
        if 0 < self.asked_rows < self.rows - self.unaskable:
            share = dict(zip(("low", "high"), interval(len(self.conflicts), self.asked_rows), strict=True))
            left = self.rows - self.unaskable - self.asked_rows
            figures["not_asked"] = {"rows": left, "conflict_share": share}
        return figures


def screen_examples(
    task: Sequence[Example],
    asker: Asker,
    settings: ScreeningSettings,
    *,
    pairs: Sequence[Split] = (),
    plain: bool = False,
    listed: Path | None = None,
    judge: JudgeSpec | None = None,
) -> Screening:
    """Screen a task, build the sets to hold, and choose what is watched."""
    numbers = asked_rows(task, max_prompts=settings.max_prompts, seed=settings.seed) if settings.asks_task else []
    questions = distinct(task, numbers, plain=plain)
    fits = {example.id for example in asker.fitting([question.example for question in questions])}
    questions = [question for question in questions if question.example.id in fits]
    asked_of = {row for question in questions for row, _, _ in question.uses}
    classes = asker.sort([question.example for question in questions], what="task prompts")
    judged = judged_rows(questions, classes, asker, settings.judge if judge is None else judge)
    _require_sorted(questions, classes, settings, judged.settled)
    conflicts = settle(find_conflicts(task, questions, classes, judged.rows), len(task), settings, listed)
    held = _held(task, questions, classes, conflicts, asker, settings, plain=plain)
    sets = splits_apart({name: replied(chosen, asker, name=name) for name, chosen in held.items()})
    return Screening(
        rows=len(task), asked_rows=len(asked_of), unaskable=len(set(numbers) - asked_of),
        classes=dict(Counter(str(classes[question.example.id].reply_class) for question in questions)),
        conflicts=tuple(conflicts), rule=settings.rule, sets=sets,
        monitor=monitor_prompts(held, pairs, asker, settings, plain=plain),
        counts={
            name: {
                "keep": chosen.keep, "groups": chosen.groups, "changed_class": chosen.changed,
                "sources": {s: {"asked": n, "kept": chosen.kept.get(s, 0)} for s, n in chosen.asked.items()},
                "roles": {role: len(members) for role, members in sets[name].roles.items()},
            }
            for name, chosen in held.items()
        },
    )  # fmt: skip


def _held(
    task: Sequence[Example],
    questions: Sequence[Question],
    classes: Mapping[str, Sorted],
    conflicts: Sequence[Conflict],
    asker: Asker,
    settings: ScreeningSettings,
    *,
    plain: bool,
) -> dict[str, HeldSet]:
    """Every set with its prompts by role."""
    dropped = {one.row for one in conflicts if one.dropped}
    learned = {one.row for one in conflicts if one.id in settings.learn}
    held: dict[str, HeldSet] = {}
    for name, wanted in settings.sets.items():
        candidates: dict[str, Candidate] = {}  # every prompt that the set asks, once
        for source in wanted.prompts:
            for candidate in _candidates(source, questions, dropped, learned, plain=plain):
                candidates.setdefault(candidate.example.id, candidate)
        others = [c.example for c in candidates.values() if c.source != TASK and c.role != "certify"]
        fits = asker.fitting(others)
        too_long = {example.id for example in others} - {example.id for example in fits}
        sorted_now = {**classes, **asker.sort(fits, what=f"prompts for {name}")}
        known = [candidate for key, candidate in candidates.items() if key not in too_long]
        held[name] = share_out(wanted.keep, known, sorted_now, seed=settings.seed)
    keep_apart(held, [row for number, row in enumerate(task) if number not in dropped])
    for name, chosen in held.items():
        _require_enough(name, chosen)
    return held


def _candidates(
    source: str, questions: Sequence[Question], dropped: set[int], learned: set[int], *, plain: bool
) -> list[Candidate]:
    if source == TASK:
        rows = [(frozenset(row for row, _, _ in question.uses), question.example) for question in questions]
        return [Candidate(e, TASK, dropped=used <= dropped, rows=used) for used, e in rows if not used & learned]
    if source in KINDS:
        return [
            Candidate(as_question(example.prompt, example, plain=plain), source, ROLE_OF_USE[use])
            for use in ROLE_OF_USE
            for example in bundled(source, use)  # type: ignore[arg-type]  # the uses are those of `bundled`
        ]
    return [Candidate(as_question(e.prompt, e, plain=plain), source) for e in read_prompts(source) if e.kind != "text"]


def _require_sorted(
    questions: Sequence[Question], classes: Mapping[str, Sorted], settings: ScreeningSettings, settled: frozenset[str]
) -> None:
    keys = [question.example.id for question in questions if question.example.id not in settled]
    reasons = Counter(classes[key].reason for key in keys if classes[key].reply_class == ReplyClass.UNSORTED)
    unsorted = sum(reasons.values())
    if settings.accept_unsorted or unsorted <= MOST_UNSORTED * len(questions):
        return
    listed = ", ".join(f"{reason}: {number}" for reason, number in reasons.most_common())
    raise DataError(
        f"{unsorted} of {len(questions)} replies to the task's prompts ({percent(unsorted / len(questions))}) cannot "
        f"be sorted into refused and answered ({listed}); at most {exact_percent(MOST_UNSORTED)} are expected",
        remedy="name a judge (`screening: {judge: ...}`), or set `screening: {unsorted: accept}`: rows whose reply "
        "cannot be sorted are trained on and not held",
    )


def _require_enough(name: str, one: HeldSet) -> None:
    fewest = FEWEST_REFUSALS if one.keep == "refusals" else FEWEST_ANSWERS
    if one.groups >= fewest and one.by_role["constraint"]:
        return
    asked = "; ".join(f"{one.kept.get(source, 0)} of {number} {source}" for source, number in one.asked.items())
    verb, remedy = _TOO_FEW[one.keep]
    raise InfeasibleError(
        f"{name}: this model {verb} too little to hold: {one.groups} groups of prompts ({asked}), expected at least "
        f"{fewest}",
        remedy=remedy,
    )
