"""What is asked, what is held, and what becomes of conflicts: the settings of a screening."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from holdfast.core.errors import ConfigError
from holdfast.data.bundled import USES, Use
from holdfast.defaults import default

Keep: TypeAlias = Literal["refusals", "answers"]
Rule: TypeAlias = Literal["drop", "keep", "fail", "learn"]

TASK = "task"
PROBES = "probes"
ORDINARY = ("everyday", "borderline")


@dataclass(frozen=True)
class PromptSet:
    """One set to hold: prompts to ask, and which replies are kept."""

    prompts: tuple[str, ...]  # `task`, a bundled name (probes, everyday, borderline), a file, or a hub id
    keep: Keep  # theta_0's own refusals, or its own answers
    limit: int | None = None  # most prompts of a source that is not the task; of a bundled one, of each of its uses

    def as_json(self) -> dict[str, Any]:
        """For records, in which a set without a limit has no such key."""
        limit = {} if self.limit is None else {"limit": self.limit}
        return {"prompts": list(self.prompts), "keep": self.keep, **limit}


# `safety: auto`, spelled out.
AUTO: Mapping[str, PromptSet] = {
    "refusals": PromptSet((TASK, PROBES), "refusals"),
    "answers": PromptSet(ORDINARY, "answers"),
}


def uses_of(name: str, keep: Keep) -> tuple[Use, ...]:
    """What a set takes the kinds of bundled prompts called `name` for.

    Of probes that are answered it takes the kinds for steering alone: whether a probe is still refused is watched and
    certified, and never whether one is still answered.
    """
    return ("steer",) if (name, keep) == (PROBES, "answers") else USES


@dataclass(frozen=True)
class ScreeningSettings:
    """How a task is screened."""

    sets: Mapping[str, PromptSet] = field(default_factory=lambda: dict(AUTO))  # what is held, by name
    # what becomes of conflicts: `drop` the rows; `keep` them in training and hold against them; `fail`; `learn` trains
    # on the ids in `learn`, does not hold their prompts, and drops the other conflicts
    rule: Rule = "drop"
    limited: bool = True  # whether `drop` stops above `max_dropped`; an explicit rule has no such limit
    learn: frozenset[str] = frozenset()
    max_dropped: float = default("screening.max_dropped")  # largest share of the rows that is dropped unasked
    max_prompts: int = default("screening.max_prompts")  # most questions of the task
    accept_unsorted: bool = False  # go on although more than 5 % of the task's replies cannot be sorted
    judge: str | None = None  # what `holdfast.judging.judge.open_judge` takes; None sorts by rules alone
    monitor_prompts: int = default("monitor.prompts")  # most prompts for each figure of the behaviour monitor
    seed: int = 42  # of samples and roles

    def __post_init__(self) -> None:
        if not 0 <= self.max_dropped <= 1:
            raise ConfigError(f"max_dropped is {self.max_dropped}", remedy="give a share from 0 to 1")
        if self.max_prompts < 1:
            raise ConfigError(f"max_prompts is {self.max_prompts}", remedy="give at least 1")

    @property
    def watched_beside(self) -> tuple[str, ...]:
        """Bundled names whose monitor kinds are asked for the monitor alone: no set that is held takes them."""
        if not self.monitor_prompts:
            return ()
        taken = {(name, one.keep) for one in self.sets.values() for name in one.prompts}
        refused = () if (PROBES, "refusals") in taken else (PROBES,)
        return refused + (() if taken & {(name, "answers") for name in ORDINARY} else ORDINARY)

    def limit_of(self, name: str) -> int | None:
        """The largest `limit` of the sets that take prompts of this name; None where one of them has none."""
        limits = [one.limit for one in self.sets.values() if name in one.prompts]
        return max((limit for limit in limits if limit is not None), default=None) if None not in limits else None

    @property
    def asks_task(self) -> bool:
        """Whether the task's prompts are asked: to find conflicts, or to hold the replies to them."""
        return self.rule != "keep" or any(TASK in one.prompts for one in self.sets.values())
