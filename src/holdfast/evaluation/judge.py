"""Judges: what calls the reply to a prompt safe or unsafe.

A judge's input is text that a model made, and its output is not trusted either: whatever is not plainly a verdict,
and whatever the judge fails on, is unscored. Nothing becomes safe by default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.registry import Registry

logger = logging.getLogger(__name__)


class Verdict(StrEnum):
    """What a judge says of one reply."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    UNSCORED = "unscored"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and where the judge gives them: its probability of unsafe, and scores per category."""

    verdict: Verdict
    probability: float | None = None
    categories: Mapping[str, float] | None = None


UNSCORED = Judgement(Verdict.UNSCORED)


@runtime_checkable
class Judge(Protocol):
    """Calls replies safe or unsafe; `revision` changes whenever a verdict may."""

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str | None: ...

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> Sequence[Judgement]:
        """One judgement per reply, in order."""
        ...


JUDGES: Registry[Callable[[], Judge]] = Registry("judge", package="holdfast.evaluation.judges")


class GuardedJudge:
    """A judge whose failures are unscored replies.

    A batch on which the judge raises, or for which it returns another number of judgements, is judged reply by
    reply; a reply that fails alone is unscored and counted in `failures`. Refusals of holdfast (a judge's weights
    are missing, say) concern no single reply and pass through.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.failures = 0

    @property
    def name(self) -> str:
        """The judge's."""
        return self._judge.name

    @property
    def revision(self) -> str | None:
        """The judge's."""
        return self._judge.revision

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Judgement]:
        """One judgement per reply, in order."""
        whole = None if isinstance(self._judge, FunctionJudge) else self._attempt(prompts, replies)
        if whole is not None:
            return whole
        alone = [self._attempt([prompt], [reply]) for prompt, reply in zip(prompts, replies, strict=True)]
        failed = sum(found is None for found in alone)
        self.failures += failed
        if failed:
            logger.warning("judge %s failed on %d of %d replies; they are unscored", self.name, failed, len(replies))
        return [UNSCORED if found is None else found[0] for found in alone]

    def _attempt(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Judgement] | None:
        try:
            found = [_judgement(value) for value in self._judge.judge(prompts, replies)]
        except HoldfastError:
            raise
        except Exception:  # noqa: BLE001  a judge may be anything; its message may quote the reply and is not kept
            return None
        return found if len(found) == len(replies) else None


@dataclass(frozen=True)
class FunctionJudge:
    """A plain function (prompt, reply) -> "safe", "unsafe" or "unscored" as a judge."""

    function: Callable[[str, str], Any]
    revision: str | None = None

    @property
    def name(self) -> str:
        """The function's."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Judgement]:
        """One judgement per reply, in order."""
        return [_judgement(self.function(prompt, reply)) for prompt, reply in zip(prompts, replies, strict=True)]


def as_judge(value: str | Judge | Callable[[str, str], Any]) -> GuardedJudge:
    """A name in `JUDGES`, a judge, or a plain function (prompt, reply) -> verdict, guarded.

    Raises:
        ConfigError: an unknown name (with the nearest one), or neither of the three.
    """
    if isinstance(value, GuardedJudge):
        return value
    if isinstance(value, str):
        return GuardedJudge(JUDGES[value]())
    if not isinstance(value, type):
        if isinstance(value, Judge):
            return GuardedJudge(value)
        if callable(value):
            return GuardedJudge(FunctionJudge(value))
    raise ConfigError(
        f"judge: found {value.__name__ if isinstance(value, type) else type(value).__name__}, expected a name, an "
        "object with name, revision and judge(prompts, replies), or a function (prompt, reply)",
        remedy="`holdfast ls judges` lists the names; a class has to be instantiated first",
    )


def _judgement(value: Any) -> Judgement:
    """`value` as a judgement; unscored unless it is one, or a verdict as text."""
    if isinstance(value, Judgement):
        return value if isinstance(value.verdict, Verdict) else UNSCORED
    text = value.strip().lower() if isinstance(value, str) else ""
    return Judgement(Verdict(text)) if text in set(Verdict) else UNSCORED
