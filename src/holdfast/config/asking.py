"""The blocks of a run that asks its model: what becomes of conflicts, how it is asked, and how it is watched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from holdfast.config.blocks import Block, Number
from holdfast.defaults import default

DROPS_NOTHING = frozenset({"sft"})
"""Defenses that train on every row unless the file says otherwise: what the others are compared with."""


class Learn(Block):
    """Conflicting rows that are meant: they are trained on, and their prompts are not held."""

    learn: str = Field(min_length=1)
    """A file of row ids, relative to the run file."""


def _conflicts(value: Any) -> Any:
    known = value in ("drop", "keep", "fail") if isinstance(value, str) else value is None
    meant = isinstance(value, Mapping) and set(value) == {"learn"} and isinstance(value["learn"], str)
    if known or meant or isinstance(value, Learn):
        return value
    raise ValueError("expected drop, keep, fail or {learn: FILE}")


Conflicts = Annotated[Literal["drop", "keep", "fail"] | Learn | None, BeforeValidator(_conflicts)]


class ConflictsRule(NamedTuple):
    """What becomes of rows whose prompt theta_0 refuses and whose target complies.

    Attributes:
        rule: set them aside, train on them, end the run, or train on those in a file.
        limited: whether at most `screening.max_dropped` of the rows may be set aside: nobody asked for it.
        learn: the file of ids that are trained on and not held.
    """

    rule: Literal["drop", "keep", "fail", "learn"]
    limited: bool
    learn: Path | None


def conflicts_rule(conflicts: Literal["drop", "keep", "fail"] | Learn | None, defense: str) -> ConflictsRule:
    """The rule of a run: as written, without a limit; else `drop` under the limit, or nothing for plain SFT."""
    if isinstance(conflicts, Learn):
        return ConflictsRule("learn", limited=False, learn=Path(conflicts.learn))
    if conflicts is not None:
        return ConflictsRule(conflicts, limited=False, learn=None)
    if defense in DROPS_NOTHING:
        return ConflictsRule("keep", limited=False, learn=None)
    return ConflictsRule("drop", limited=True, learn=None)


class ScreeningBlock(Block):
    """How the model is asked before training, and how its replies are sorted."""

    max_dropped: Number = Field(default=default("screening.max_dropped"), ge=0, le=1)
    """The largest share of the task's rows that is set aside unless `conflicts` is written."""
    max_prompts: int = Field(default=default("screening.max_prompts"), ge=1)
    """Task prompts that are asked; of a longer file a stratified sample."""
    unsorted: Literal["refuse", "accept"] = "refuse"
    """More than 5 % of the replies cannot be sorted: end the run, or go on without them."""
    engine: str = Field(default="auto", min_length=1)
    """What decodes: auto, transformers, continuous, vllm or endpoint."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Of that engine: `{base_url: http://localhost:8000/v1, model_name: ...}` for an endpoint."""
    judge: str | None = Field(default=None, min_length=1)
    """A name of `holdfast ls judges`, or a trained judge's folder: finds more conflicts, settles unsorted replies."""


def _every(value: Any) -> Any:
    if value in ("end", "epoch") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("expected end, epoch or a number of steps of at least 1")


class MonitorBlock(Block):
    """The behaviour monitor: greedy replies to prompts that nothing steers by."""

    prompts: int = Field(default=default("monitor.prompts"), ge=0)
    """At most this many for each of its figures; 0 watches nothing."""
    every: Annotated[int | Literal["end", "epoch"], BeforeValidator(_every)] = "end"
    """When it asks: after training, after each epoch, or after so many steps, and always at the end."""
