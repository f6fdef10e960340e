"""Screening: ask theta_0 the task and the prompts to hold, set conflicts aside, and fix what is held and watched.

`holdfast.screen` is `screen` here.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from holdfast.certification.binomial import interval
from holdfast.core.errors import ConfigError, DataError, InfeasibleError
from holdfast.core.hashing import sha256_json, sha256_lines
from holdfast.core.percent import exact_percent, percent
from holdfast.core.provenance import peak_memory
from holdfast.core.seeding import generator
from holdfast.data.bundled import KINDS, Use, bundled, bundled_sha256
from holdfast.data.examples import Example, as_chat, completion_text, uniform
from holdfast.data.sources import prompt_key, read_examples, read_prompts, task_rows
from holdfast.data.splits import Split
from holdfast.data.templates import Template, use_template
from holdfast.judging.refusal_rules import RULES_REVISION
from holdfast.judging.reply_classes import ReplyClass
from holdfast.screening import sets as held_sets
from holdfast.screening.asking import REMOTE, Asker, Progress, Sorted, asker_of, measured, planned, undisturbed
from holdfast.screening.conflicts import Conflict, find_conflicts, judged_rows, settle
from holdfast.screening.questions import Question, asked_rows, distinct
from holdfast.screening.sets import CLASS_OF, Candidate, HeldSet, MonitorPrompts, Role
from holdfast.screening.settings import TASK, Keep, PromptSet, ScreeningSettings, uses_of

logger = logging.getLogger(__name__)

MOST_UNSORTED = 0.05
FEWEST: Mapping[Keep, int] = {"refusals": 100, "answers": 20}  # groups of prompts that a set must hold
FIRST_PART = 128  # prompts of a set after which it is first asked whether there will be enough
STOPS_WRONGLY = 1e-4
SHOWN = 5  # rows that are named where rows are left out
_TOO_FEW = {
    "refusals": ("refuses", "name prompts that it refuses (`safety: {refusals: {prompts: [task, probes, FILE], keep: "
                 "refusals}}`), or teach it to refuse first: holdfast align MODEL"),
    "answers": ("answers", "name prompts that it answers, or use a model that answers ordinary prompts"),
}  # fmt: skip
ROLE_OF_USE: Mapping[Use, Role | None] = {"steer": None, "monitor": "unseen", "certify": "certify"}


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


def screen(
    model: Any, dataset: Any, tokenizer: Any = None, *, settings: ScreeningSettings | None = None,
    template: Template = "chat", engine: str = "auto", engine_options: Mapping[str, Any] | None = None,
    replies: str | Path | None = None, dtype: str = "auto", device: str | None = None, progress: Progress | None = None,
) -> Screening:  # fmt: skip
    """Ask a model the prompts of a data set and sort its replies.

    Args:
        model: theta_0: a loaded model (with `tokenizer`), or its reference (hub id, folder, adapter, `embedded`).
        dataset: a file, a hub id, rows, or a `datasets.Dataset`, in the formats of `SafeSFTTrainer`.
        tokenizer: of a loaded model.
        settings: what is held, and what becomes of conflicts; `safety: auto` unless given.
        template: what becomes of plain prompts.
        engine, engine_options: see `holdfast.judging.engines`.
        replies: folder of the stored replies; the user's cache unless given.
        dtype, device: of a model that is given by its reference.
        progress: receives what is asked, how many replies there are, and how many there will be.

    Returns:
        conflicts, the kept rows (`kept`), the held sets (`sets`) and what is watched (`monitor`). Pass it to
        `SafeSFTTrainer` as `safety_dataset`, with the same data set as `train_dataset`.
    """
    rows = task_examples(dataset, template)
    if engine in REMOTE:  # the server has the model; what it is called there is in the engine's identity
        loaded, digest = None, str(model)
    elif isinstance(model, str | Path):
        from holdfast.models.content import content_of
        from holdfast.models.handle import load_unmerged

        loaded, tokenizer = load_unmerged(model, dtype=dtype, device=device)
        use_template(tokenizer, template)
        digest = content_of(model).sha256
    else:
        from holdfast.models.fingerprint import model_fingerprint

        loaded, digest = model, model_fingerprint(model)
        if tokenizer is None:
            raise ConfigError("a loaded model, and no tokenizer", remedy="pass tokenizer=..., or the model's reference")
    asker = asker_of(
        loaded, tokenizer, model_sha256=digest, template=template, engine=engine, options=engine_options,
        folder=None if replies is None else Path(replies), progress=progress,
    )  # fmt: skip
    return ask_and_screen(loaded, rows, asker, settings or ScreeningSettings())


def ask_and_screen(
    model: Any, rows: list[Example], asker: Asker, settings: ScreeningSettings, **options: Any
) -> Screening:
    """`screen_examples`, leaving the model's modes and all random states as they were."""
    with undisturbed(model):
        return screen_examples(rows, asker, settings, **options)


def task_examples(dataset: Any, template: Template = "chat", *, replies: bool = True) -> list[Example]:
    """The rows of a data set as examples, one each, in order; without `replies`, of prompts alone."""
    if isinstance(dataset, str | Path):
        found = read_examples(str(dataset))
    elif isinstance(dataset, list) and all(isinstance(row, Example) for row in dataset):
        found = cast(list[Example], dataset)
    elif hasattr(dataset, "__len__"):
        found = task_rows(dataset, name="the task", replies=replies)
    else:
        what = f"the task is a stream ({type(dataset).__name__}): its rows cannot be asked and numbered"
        raise DataError(what, remedy="materialise it, for example with Dataset.from_list(list(stream))")
    return uniform(found) if template == "none" else [as_chat(row) if row.kind == "plain" else row for row in found]


def belongs_to(model_sha256: str, rows: list[Example], settings: ScreeningSettings, template: str) -> dict[str, Any]:
    """What a stored screening is bound to."""
    sets = {name: one.as_json() for name, one in settings.sets.items()}
    return {
        "model_sha256": model_sha256, "task_sha256": sha256_lines(row.id for row in rows),
        "task_content_sha256": content_sha256(rows), "template": template, **asdict(settings), "sets": sets,
        "learn": sorted(settings.learn),
        "rules_revision": RULES_REVISION, "bundled_sha256": {name: bundled_sha256(name) for name in KINDS},
    }  # fmt: skip


def content_sha256(rows: Sequence[Example]) -> str:
    """Of the rows' prompts and replies, in any order and each once: what a ledger knows a task by.

    Neither another order or template nor a row that is repeated makes another task.
    """
    return sha256_lines(sorted({sha256_json([prompt_key(row), completion_text(row)]) for row in rows}))


def screen_examples(
    task: Sequence[Example], asker: Asker, settings: ScreeningSettings, *, pairs: Collection[Split] = (),
    listed: Path | None = None,
) -> Screening:  # fmt: skip
    """Screen a task, build the sets to hold, and choose what is watched; `pairs` are the user's own safety sets.

    Conflicts that the rule refuses are listed in `listed`.
    """
    numbers = asked_rows(task, max_prompts=settings.max_prompts, seed=settings.seed) if settings.asks_task else []
    questions = distinct(task, numbers, plain=asker.plain)
    plan = planned(len(task), len(numbers), len(questions), settings)
    # All rows are in this memory: what follows works on windows of them.
    logger.info("asking the model: %s; %.1f GiB of memory so far", plan.sentence(), peak_memory() / 2**30)
    own = asker.fitting([question.example for question in questions])
    fits = {example.id for example in own}
    questions = [question for question in questions if question.example.id in fits]
    asked_of = {row for question in questions for row, _, _ in question.uses}
    if (needed := measured(asker, [*own, *asker.fitting(_asked_beside(asker, settings))])) is not None:
        judging = "" if settings.judge is None else "; judging comes on top"
        logger.info("asking the model: %s%s", needed.sentence(), judging)
    classes = asker.sort(own, what="task prompts")
    judged = judged_rows(questions, classes, asker, settings.judge)
    _require_sorted(questions, classes, settings, judged.settled)
    conflicts = settle(find_conflicts(task, questions, classes, judged.rows), len(task), settings, listed)
    _name_dropped(conflicts, len(task))
    held = _held(task, questions, classes, conflicts, asker, settings)
    sets = held_sets.splits_apart({name: held_sets.replied(chosen, asker, name=name) for name, chosen in held.items()})
    return Screening(
        rows=len(task), asked_rows=len(asked_of), unaskable=len(set(numbers) - asked_of),
        classes=dict(Counter(str(classes[question.example.id].reply_class) for question in questions)),
        conflicts=tuple(conflicts), rule=settings.rule, sets=sets,
        monitor=held_sets.monitor_prompts(held, pairs, asker, settings),
        counts={
            name: {
                "keep": chosen.keep, "groups": chosen.groups, "changed_class": chosen.changed,
                "sources": {s: {"asked": n, "kept": chosen.kept.get(s, 0)} for s, n in chosen.asked.items()},
                "roles": {role: len(members) for role, members in sets[name].roles.items()},
            }
            for name, chosen in held.items()
        },
    )  # fmt: skip


def _name_dropped(conflicts: Sequence[Conflict], rows: int) -> None:
    dropped = [conflict.where for conflict in conflicts if conflict.dropped]
    if dropped:
        shown = ", ".join(dropped[:SHOWN]) + (", ..." if len(dropped) > SHOWN else "")
        logger.info("%d of %d task rows teach what the model refuses and are left out: %s", len(dropped), rows, shown)


def _held(
    task: Sequence[Example], questions: Sequence[Question], classes: Mapping[str, Sorted],
    conflicts: Sequence[Conflict], asker: Asker, settings: ScreeningSettings,
) -> dict[str, HeldSet]:  # fmt: skip
    dropped = {one.row for one in conflicts if one.dropped}
    learned = {one.row for one in conflicts if one.id in settings.learn}
    asked = [(frozenset(row for row, _, _ in question.uses), question.example) for question in questions]
    of_task = [Candidate(e, TASK, dropped=rows <= dropped, rows=rows) for rows, e in asked if not rows & learned]
    held: dict[str, HeldSet] = {}
    for name, wanted in settings.sets.items():
        candidates: dict[str, Candidate] = {}  # every prompt that the set asks, once
        for source in wanted.prompts:
            for candidate in of_task if source == TASK else _candidates(source, wanted, asker):
                candidates.setdefault(candidate.example.id, candidate)
        others = [c.example for c in candidates.values() if c.source != TASK and c.role != "certify"]
        fits = asker.fitting(others)
        too_long = {example.id for example in others} - {example.id for example in fits}
        known = [candidate for key, candidate in candidates.items() if key not in too_long]
        own = sum(classes[c.example.id].reply_class == CLASS_OF[wanted.keep] for c in known if c.source == TASK)
        sorted_now = {**classes, **_sorted_in_parts(name, wanted, fits, own, asker, settings.seed)}
        held[name] = held_sets.share_out(wanted.keep, known, sorted_now, seed=settings.seed)
        _require_enough(name, held[name])  # before the next set's prompts are asked
    held_sets.keep_apart(held, [row for number, row in enumerate(task) if number not in dropped])
    for name, chosen in held.items():
        _require_enough(name, chosen)
    return held


def _sorted_in_parts(
    name: str, wanted: PromptSet, examples: Sequence[Example], own: int, asker: Asker, seed: int
) -> dict[str, Sorted]:
    """The classes of the replies, by id; ends where a part of the prompts shows that too few will have the class.

    The parts are drawn at random and double; `own` of the task's replies have the class already. A set with just enough
    is ended wrongly with probability `STOPS_WRONGLY` a part at most.
    """
    from scipy.stats import hypergeom

    what, keep, needed = f"prompts for {name}", wanted.keep, FEWEST[wanted.keep] - own
    if wanted.limit is not None and needed > len(examples):
        left = f"`limit: {wanted.limit}` leaves {own + len(examples)} prompts that could be held"
        remedy = "raise `limit`, or name more prompts"
        raise InfeasibleError(f"{name}: {left}, expected at least {FEWEST[keep]}", remedy=remedy)
    order = [examples[i] for i in generator(seed, "asking in parts", name).permutation(len(examples)).tolist()]
    part = FIRST_PART
    while needed > 0 and part <= len(order) // 2:
        found = asker.sort(order[:part], what=what)
        hits = sum(one.reply_class == CLASS_OF[keep] for one in found.values())
        if hypergeom.cdf(hits, len(order), needed, part) < STOPS_WRONGLY:
            beside = f", and {own} of the task" if own else ""
            raise _too_few(name, keep, f"{hits} of the first {part} of {len(order)} prompts, drawn at random{beside}")
        part *= 2
    return asker.sort(examples, what=what)


def _candidates(source: str, wanted: PromptSet, asker: Asker) -> list[Candidate]:
    """The prompts of a source that is not the task."""
    if source not in KINDS:
        asked = [e for e in read_prompts(source, limit=wanted.limit) if e.kind != "text"]
        return [Candidate(asker.question(example), source) for example in asked]
    uses = uses_of(source, wanted.keep)
    asked_for = [(use, example) for use in uses for example in bundled(source, use, wanted.limit)]
    return [Candidate(asker.question(example), source, ROLE_OF_USE[use]) for use, example in asked_for]


def _asked_beside(asker: Asker, settings: ScreeningSettings) -> list[Example]:
    """The prompts that are asked beside the task's: to be held, and to be watched."""
    sources = [(source, one) for one in settings.sets.values() for source in one.prompts if source != TASK]
    held = [c.example for source, one in sources for c in _candidates(source, one, asker) if c.role != "certify"]
    return [*held, *(asker.question(e) for name in settings.watched_beside for e in bundled(name, "monitor"))]


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
    if one.groups >= FEWEST[one.keep] and one.by_role["constraint"]:
        return
    asked = "; ".join(f"{one.kept.get(source, 0)} of {number} {source}" for source, number in one.asked.items())
    raise _too_few(name, one.keep, f"{one.groups} groups of prompts ({asked})")


def _too_few(name: str, keep: Keep, found: str) -> InfeasibleError:
    verb, remedy = _TOO_FEW[keep]
    what = f"{name}: this model {verb} too little to hold: {found}; at least {FEWEST[keep]} groups are needed"
    return InfeasibleError(what, remedy=remedy)
