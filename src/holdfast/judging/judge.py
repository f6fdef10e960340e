"""Judges: what calls the reply to a prompt safe or unsafe.

A judge's output is not trusted: whatever is not plainly a verdict, and whatever the judge fails on, is unscored.
Nothing becomes safe by default.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.registry import Registry, nearest, written_options

logger = logging.getLogger(__name__)


class Verdict(StrEnum):
    """What a judge says of one reply."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    UNSCORED = "unscored"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and where the judge gives them: its probability of unsafe, and scores per category, all in [0, 1]."""

    verdict: Verdict
    probability: float | None = None
    categories: Mapping[str, float] | None = None


UNSCORED = Judgement(Verdict.UNSCORED)


class Judge(Protocol):
    """Calls replies safe or unsafe; `revision` changes whenever a verdict may."""

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str | None: ...

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> Sequence[Judgement]: ...


# Classes or functions with keyword options. Making a judge is cheap: weights are read when they are first needed.
JUDGES: Registry[Callable[..., Judge]] = Registry("judge", package="holdfast.judging.judges")


class GuardedJudge:
    """A judge whose failures are unscored replies.

    A batch on which the judge raises, or gives another number of judgements, is judged reply by reply; a reply that
    fails alone is unscored and counted in `failures`. Refusals of holdfast (missing weights, say) pass through.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.failures = 0

    @property
    def name(self) -> str:
        return self._judge.name

    @property
    def revision(self) -> str | None:
        return self._judge.revision

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Judgement]:
        if not isinstance(self._judge, FunctionJudge) and (whole := self._attempt(prompts, replies)) is not None:
            return whole
        alone = [self._attempt([prompt], [reply]) for prompt, reply in zip(prompts, replies, strict=True)]
        if failed := alone.count(None):
            self.failures += failed
            logger.warning("judge %s failed on %d of %d replies; they are unscored", self.name, failed, len(replies))
        return [UNSCORED if judgements is None else judgements[0] for judgements in alone]

    def _attempt(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Judgement] | None:
        try:
            # Copies: a judge that shortens what it was given must not shorten what it is held to.
            said = self._judge.judge(list(prompts), list(replies))
            if isinstance(said, Mapping | Set):  # {"safe": 0.1, "unsafe": 0.9} are no two verdicts
                return None
            # One more than there are replies is enough to be wrong, also for a judge that never ends.
            judgements = [_judgement(value) for value in islice(said, len(replies) + 1)]
        except HoldfastError:
            raise
        except Exception:  # noqa: BLE001  a judge may be anything; its message may quote the reply and is not kept
            return None
        return judgements if len(judgements) == len(replies) else None


@dataclass(frozen=True)
class FunctionJudge:
    """A plain function (prompt, reply) -> "safe", "unsafe", "unscored" or a `Judgement`, as a judge."""

    function: Callable[[str, str], Any]
    revision: str | None = None

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Judgement]:
        return [_judgement(self.function(prompt, reply)) for prompt, reply in zip(prompts, replies, strict=True)]


JudgeSpec = str | Path | Mapping[str, Any] | Judge | Callable[[str, str], Any]


def open_judge(spec: JudgeSpec) -> GuardedJudge:
    """The judge that `spec` names, guarded.

    | spec                                 | judge                                                      |
    |--------------------------------------|------------------------------------------------------------|
    | `"guard"`                            | a name in `JUDGES`, with its default options               |
    | `"guard:model=owner/name,dtype=auto"`| a name with options; values are read as JSON, else as text |
    | `{"name": "guard", "model": ...}`    | the same                                                   |
    | a folder that holds judge.json       | a judge that was trained                                   |
    | an object with name, revision, judge | itself                                                     |
    | a function (prompt, reply)           | its return value as a verdict                              |
    """
    if isinstance(spec, GuardedJudge):
        return spec
    if isinstance(spec, str | Path):
        return GuardedJudge(_named(spec))
    if isinstance(spec, Mapping):
        options = dict(spec)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError("judge: a mapping without a name", remedy="give name: and the judge's options")
        return GuardedJudge(_made(name, options) if options or name in JUDGES else _named(name))
    if not isinstance(spec, type):
        # No part is evaluated: a revision may be the hash of large files.
        missing = object()
        if all(inspect.getattr_static(spec, part, missing) is not missing for part in ("name", "revision", "judge")):
            return GuardedJudge(cast("Judge", spec))
        if callable(spec):
            return GuardedJudge(FunctionJudge(spec))
    found = spec.__name__ if isinstance(spec, type) else type(spec).__name__
    expected = "a name, an object with name, revision and judge(prompts, replies), or a function (prompt, reply)"
    remedy = "`holdfast ls judges` lists the names; a class has to be instantiated first"
    raise ConfigError(f"judge: found {found}, expected {expected}", remedy=remedy)


def _named(spec: str | Path) -> Judge:
    name, colon, written = str(spec).partition(":")
    folder = Path(spec).expanduser()
    if isinstance(spec, str) and name in JUDGES:
        example = "guard:model=owner/name,batch_size=8"
        return _made(name, written_options(f"judge {spec!r}", written, example) if colon else {})
    if folder.is_dir():
        from holdfast.judging.judges.trained import TrainedJudge

        return TrainedJudge(folder)
    named = isinstance(spec, str) and "/" not in name
    if named and colon:
        return _made(name, {})  # refuses it
    raise ConfigError(
        f"unknown judge {name!r}, and there is no folder {folder}" if named else f"judge: there is no folder {folder}",
        remedy=(f"{nearest(name, list(JUDGES))}; " if named else "")
        + f"holdfast judge train --output {folder} makes one (in a study, folders are relative to its file); "
        "`holdfast ls judges` lists judges by name",
    )


def _made(name: str, options: dict[str, Any]) -> Judge:
    JUDGES.require_options(name, options, prefix=f"{name}:")
    return JUDGES[name](**options)


def _judgement(value: object) -> Judgement:
    """`value` as a judgement; unscored unless it is one with scores in [0, 1], or a verdict as text.

    Categories that are no mapping raise, which is a failure of the judge.
    """
    if isinstance(value, Judgement):
        scores: list[Any] = [] if value.probability is None else [value.probability]
        scores += [] if value.categories is None else value.categories.values()  # raises where they are no mapping
        return value if isinstance(value.verdict, Verdict) and all(map(is_probability, scores)) else UNSCORED
    text = value.strip().lower() if isinstance(value, str) else ""
    return Judgement(Verdict(text)) if text in set(Verdict) else UNSCORED


def is_probability(value: object) -> bool:
    """Whether this is a number in [0, 1]; a truth value is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
