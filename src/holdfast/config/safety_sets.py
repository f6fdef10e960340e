"""What a run holds: pairs of a file, the protocol's, or the model's own replies to prompts; and what `auto` means."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, field_validator, model_serializer, model_validator

from holdfast.config.blocks import DataBlock, Number
from holdfast.defaults import default
from holdfast.records.run_record import SINGLE

AUTO = "auto"
SPELLED_OUT: Final[dict[str, dict[str, Any]]] = {
    "refusals": {"prompts": ["task", "probes"], "keep": "refusals"},
    "answers": {"prompts": ["everyday", "borderline"], "keep": "answers"},
}
"""`safety: auto`."""
BUNDLED = ("probes", "everyday", "borderline")
"""Prompts that are shipped with holdfast, by name."""
NAMED_PROMPTS = ("task", *BUNDLED)


class SafetyBlock(DataBlock):
    """What must stay likely: pairs of prompts and replies, or the model's own replies to prompts."""

    role: Literal["constraint"] | None = None
    """`constraint`: the protocol's constraint, monitor and certify pairs, instead of `data`."""
    prompts: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1)
    """What to ask the model before training: `task`, `probes`, `everyday`, `borderline`, files and hub data sets."""
    keep: Literal["refusals", "answers"] | None = None
    """Which of its replies to `prompts` are held."""
    fractions: Annotated[tuple[Number, Number, Number], Field(strict=False)] = (0.6, 0.2, 0.2)
    """Shares for steering (constraint), watching (monitor) and certifying; they add up to 1."""
    on_leak: Literal["error", "move"] = "error"
    """A certify prompt that also occurs in the task data: refuse, or move it to the constraint share."""
    openings: int = Field(default=1, ge=1)
    """How often the certify share may be opened; each opening gets an equal part of the allowed error."""

    @model_validator(mode="before")
    @classmethod
    def _shares_of_prompts(cls, value: Any) -> Any:
        """Prompts are shared out by holdfast: task prompts steer or monitor, whole bundled kinds certify."""
        if not isinstance(value, Mapping) or value.get("prompts") is None:
            return value
        for name in ("fractions", "on_leak"):
            if name in value:
                raise ValueError(f"`{name}` belongs to `data`; prompts are shared out by holdfast, so remove it")
        return {**value, "fractions": default("safety.fractions")}

    @field_validator("fractions")
    @classmethod
    def _fractions(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(value) < 0 or value[0] == 0 or abs(sum(value) - 1) > 1e-6:
            raise ValueError("expected three shares that add up to 1, the first above 0")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> SafetyBlock:
        if sum(value is not None for value in (self.data, self.role, self.prompts)) != 1:
            raise ValueError(
                "expected one of `data` (a file or hub data set), `role: constraint` and `prompts` (what to ask)"
            )
        self.only_with_data()
        if (self.prompts is None) != (self.keep is None):
            raise ValueError(
                "`prompts` needs `keep: refusals` or `keep: answers`"
                if self.keep is None
                else "`keep` belongs to `prompts`, which is not given"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_default(self, dump: Any) -> dict[str, Any]:
        """What belongs to the block's kind: settings that were stored before `prompts` was known keep their hash."""
        values = dump(self)
        if self.prompts is not None:
            return {key: values[key] for key in ("prompts", "keep", "openings")}
        return {k: v for k, v in values.items() if v is not None or k not in ("skip_bad", "prompts", "keep")}

    @property
    def source(self) -> str:
        """Where the examples come from, for records."""
        if self.prompts is not None:
            return f"{self.keep} of {', '.join(self.prompts)}"
        return self.data if self.data is not None else f"role {self.role}"


def is_single(value: Any, block: type[BaseModel] | None = None) -> bool:
    """Whether a `safety` or `constraint` value is one block rather than a mapping of names to blocks."""
    if not isinstance(value, Mapping) or not value:
        return isinstance(value, Mapping)
    if block is not None and any(key in block.model_fields for key in value):
        return True
    return not all(isinstance(item, Mapping) for item in value.values())


def on_protocol_data(raw: Mapping[str, Any]) -> bool:
    """Whether a run uses the protocol's own data: a task by name, or a role."""
    task = raw.get("task")
    return isinstance(task, Mapping) and any(task.get(key) is not None for key in ("name", "role"))


def with_safety_sets(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the safety sets that the file need not write.

    | where `safety` is not written          | it is                                     |
    |----------------------------------------|-------------------------------------------|
    | `stage: align`, `task: {role: align}`  | none: there is nothing yet to be kept     |
    | `task: {name: ...}`                    | the protocol's, `{role: constraint}`      |
    | otherwise, and where it says `auto`    | the model's own replies (`SPELLED_OUT`)   |

    Constraints that are written by name need not name every set that is asked for.
    """
    filled = dict(raw)
    if "safety" not in raw:
        task = raw.get("task")
        aligns = isinstance(task, Mapping) and task.get("role") == "align"
        if raw.get("stage", "align" if aligns else None) == "align":
            filled["safety"] = {}
        else:
            filled["safety"] = {"role": "constraint"} if on_protocol_data(raw) else AUTO
    if filled["safety"] == AUTO:
        filled["safety"] = copy.deepcopy(SPELLED_OUT)
    written = raw.get("constraint", {})
    if not is_single(written) and isinstance(written, Mapping):
        filled["constraint"] = {name: {} for name in _asked(filled["safety"])} | dict(written)
    return filled


def with_default_limits(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the alpha of each set that is asked for, where the file and the preset name none."""
    constraint = raw.get("constraint")
    if not isinstance(constraint, Mapping):
        return dict(raw)
    limits = {
        name: {"alpha": default(f"constraint.{kept}.alpha"), **constraint[name]}
        for name, kept in _asked(raw.get("safety")).items()
        if isinstance(constraint.get(name), Mapping) and kept in SPELLED_OUT
    }
    return {**raw, "constraint": {**constraint, **limits}}


def _asked(safety: Any) -> dict[str, Any]:
    """The sets with `prompts`, as written, by name: which replies each keeps."""
    if not isinstance(safety, Mapping):
        return {}
    sets = {SINGLE: safety} if is_single(safety, SafetyBlock) else safety
    return {name: block.get("keep") for name, block in sets.items() if block.get("prompts") is not None}
