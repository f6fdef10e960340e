"""What a defense may do, and when.

One optimizer step, in order:

    choose_batch   per micro-batch   which rows are trained on
    micro_step     per micro-batch   how one micro-batch becomes gradients (default: forward, backward)
    extra_loss     per micro-batch   a term added to the task loss
    on_gradient    once              the accumulated, reduced gradient, before clipping
    before_step    once              after clipping, before `optimizer.step`
    after_step     once              after `optimizer.step`

`validate` comes first, `attach` once after the optimizer is made; `transform` once, after training (post-hoc defenses).
A defense is a small object; it never subclasses the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import Tensor

from holdfast.core.errors import ConfigError
from holdfast.core.registry import Registry, nearest

if TYPE_CHECKING:
    from holdfast.constraint.gradients import Vector
    from holdfast.trainers.safety import SafetySet
    from holdfast.trainers.safety_pass import SafetyBatch

Inputs = dict[str, Any]
Row = dict[str, Any]


class TrainingRun(Protocol):
    """The trainer as a defense sees it."""

    model: Any
    args: Any
    optimizer: Any

    @property
    def safety(self) -> Mapping[str, SafetySet]:
        """Safety sets by name."""

    @property
    def step(self) -> int:
        """Optimizer steps completed."""

    def safety_batch(self, name: str) -> list[int]:
        """Positions, in the constraint split, of this step's global safety batch."""

    def safety_pass(self, name: str, weight: Callable[[Tensor], Tensor]) -> tuple[SafetyBatch, Vector]:
        """This step's safety batch: degradations of all ranks, and the gradient of `mean_i weight(D)_i`, reduced."""


class Defense:
    """Base of all defenses; the default does nothing, which is plain SFT."""

    name: ClassVar[str]
    stage: ClassVar[Literal["align", "finetune", "posthoc"]]
    summary: ClassVar[str]
    passes: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings, with the authors' defaults."""

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    def validate(self, run: TrainingRun) -> None:
        """Refuse what this defense cannot do with this model, before anything is measured."""

    def attach(self, run: TrainingRun) -> None:
        """Prepare for training; the optimizer exists and holds the trainable parameters."""

    def choose_batch(self, run: TrainingRun, inputs: Inputs) -> Inputs:
        """The micro-batch to train on."""
        return inputs

    def micro_step(self, run: TrainingRun, backward: Callable[[], Tensor]) -> Tensor:
        """Accumulate the gradient of one micro-batch and return its detached loss."""
        return backward()

    def extra_loss(self, run: TrainingRun, model: Any, inputs: Inputs) -> Tensor | None:
        """A term added to the task loss of this micro-batch, already scaled for gradient accumulation."""
        return None

    def on_gradient(self, run: TrainingRun) -> None:
        """Once per optimizer step: `.grad` holds the accumulated task gradient, reduced over ranks, not yet clipped."""

    def before_step(self, run: TrainingRun) -> None:
        """Right before the optimizer moves the parameters."""

    def after_step(self, run: TrainingRun) -> None:
        """Right after the optimizer moved them."""

    def transform(self, run: TrainingRun) -> None:
        """Change the trained model once, after training."""

    def row(self) -> Row:
        """What this step adds to its line of `events.jsonl`; also logged as `safety/<key>` where numeric."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs (a collective call)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def describe(self) -> dict[str, Any]:
        """Name and settings, for the fingerprint and the record."""
        return {"name": self.name, **(asdict(self.config) if is_dataclass(self.config) else {})}  # type: ignore[arg-type]


DEFENSES: Registry[type[Defense]] = Registry("defense", package="holdfast.defenses")


def make_defense(choice: str | Defense | Mapping[str, Any]) -> Defense:
    """A defense from its name, from `{"name": ..., option: ...}`, or as it is."""
    if isinstance(choice, Defense):
        return choice
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "name" not in options:
        raise ConfigError(
            "the defense has no name", remedy="write defense: holdfast, or defense: {name: holdfast, ...}"
        )
    cls = DEFENSES[options.pop("name")]
    known = [f.name for f in fields(cls.Config)]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"defense {cls.name!r} has no option {option!r}",
                remedy=nearest(option, known) if known else "it takes no options",
            )
    return cls(cls.Config(**options))
