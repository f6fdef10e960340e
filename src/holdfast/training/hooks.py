"""What a defense may do, and when.

One optimizer step, in order:

    choose_batch   per micro-batch   which rows are trained on
    micro_step     per micro-batch   how one micro-batch becomes gradients (default: the engine's way)
    task_loss      per micro-batch   the loss of those rows (default: TRL's)
    extra_loss     per micro-batch   a term added to it
    on_gradient    once              the accumulated, reduced gradient, before clipping
    before_step    once              after clipping, before `optimizer.step`
    after_step     once              after `optimizer.step`

`validate` comes first, `initialise` once the reference is measured (no checkpoint is loaded yet), `attach` when the
optimizer is made (a resumed run has its weights by then); `transform` once, after training (post-hoc defenses);
`saved_form` around everything that writes the model. A defense is a small object; it never subclasses the trainer.

Side data are passed over by `run.data.draw` (which rows this step uses, a pure function of seed and step) and
`run.engine.side_gradient` (their gradient, micro-batched, dropout off, reduced over ranks, `.grad` and the random state
untouched), so accumulation, data parallelism and exact resuming are not a defense's concern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.library_types import LanguageModel
from holdfast.core.registry import Registry, nearest

if TYPE_CHECKING:
    from holdfast.constraint.gradients import ParameterSpace
    from holdfast.core.units import Unit
    from holdfast.scoring.forward import Forward
    from holdfast.training.config import SafetyArguments
    from holdfast.training.run import Progress, Theta0
    from holdfast.training.side_data import SideData
    from holdfast.training.step import StepEngine

F = TypeVar("F", bound=Callable[..., Any])
Inputs = dict[str, Any]
Items = Tensor | int | None
"""How many scored tokens the whole step has, by which the task loss is divided; None where the model divides itself."""
Row = dict[str, Any]
Stage = Literal["align", "finetune", "posthoc"]
Need = Literal["safety", "harmful", "unaligned"]
"""safety: a safety set, of which the constraint share is used; harmful: harmful pairs; unaligned: the weights before
alignment."""


class TrainingRun(Protocol):
    """The run as a defense sees it; `holdfast.training.run.Run` is one."""

    @property
    def model(self) -> LanguageModel: ...  # unwrapped, with its adapter

    @property
    def args(self) -> SafetyArguments: ...  # `SafeSFTConfig`, or another trainer's `SafetyArguments`

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...  # made before `attach`

    @property
    def progress(self) -> Progress: ...  # where the run is

    @property
    def data(self) -> SideData: ...  # safety sets, harmful pairs, and which rows of them a step uses

    @property
    def theta_0(self) -> Theta0: ...  # the reference

    @property
    def engine(self) -> StepEngine: ...  # computes gradients: of the task, the constraints, and rows beside them

    @property
    def forward(self) -> Forward: ...  # passes over rows without a gradient: padding, batch size, device, precision

    @property
    def folder(self) -> Path: ...  # of the run's files

    def other_loss(self) -> str | None:
        """What makes the task loss another than the mean NLL over the scored tokens of a batch; None where it is that.

        Named as the user sets it: `label smoothing`, `a compute_loss_func of your own`.
        """

    def space(self) -> ParameterSpace:
        """The trainable parameters as one vector."""


def two_pass_only(loss: F) -> F:
    """Declares a defense's own loss that the fused step does not ask: it has its own form there, or no fused step."""
    loss.two_pass_only = True  # type: ignore[attr-defined]
    return loss


class Defense:
    """Base of all defenses; the default does nothing, which is plain SFT.

    Attributes:
        stages: when it acts.
        summary: one line for lists.
        passes: model passes per optimizer step.
        needs: side data.
        reference: the publication it implements.
        fsdp: whether it is supported under FSDP2; where not, such a run is refused.
        deepspeed: the same under DeepSpeed's ZeRO-1 and 2, whose optimizer holds parts that are not the model's own.
        constrains: whether it promises the chance constraint; a run that ends outside it then exits with 4.
        fresh_lora: whether it needs a LoRA adapter that begins with this run (no full fine-tuning, none continued).
        unit: in which a run is measured, and steered where the defense does that, by default.
        off: options with which it is plain SFT under a constraint that nothing violates; None where there are none.
        packs: whether its task pass may run over packed rows (`step: fused`): it leaves TRL's loss, the model's modules
            and their hooks alone.
        joint_terms: whether its constraints' rows go through the model with the task's then; `extra_loss` is not asked.
        linear: whether the step depends on the accumulated gradient alone, so that two micro-batches of b rows are one
            of 2 b. Where not, the docstring defines what a step of several micro-batches is.
        paper: the constants of *Beyond Average Safety*, where they differ from the authors' defaults; `preset: paper`.
    """

    name: ClassVar[str]
    stages: ClassVar[tuple[Stage, ...]] = ("finetune",)
    summary: ClassVar[str]
    passes: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    reference: ClassVar[str] = ""
    fsdp: ClassVar[bool] = False
    deepspeed: ClassVar[bool] = False
    constrains: ClassVar[bool] = False
    fresh_lora: ClassVar[bool] = False
    unit: ClassVar[Unit] = "kl_token"
    off: ClassVar[Mapping[str, Any] | None] = {}
    packs: ClassVar[bool] = False
    joint_terms: ClassVar[bool] = False
    linear: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, Any]] = {}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings, with the authors' defaults."""

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config
        self._row: Row = {}

    @classmethod
    def needed(cls, stage: str) -> frozenset[Need]:
        """The side data it needs in a stage; of a defense with two stages not always all of `needs`."""
        return cls.needs

    @classmethod
    def packed(cls, stage: str) -> bool:
        """`packs` in a stage: of a defense with two stages one may have a loss of its own."""
        return cls.packs

    @classmethod
    def by_rows(cls, stage: str) -> bool:
        """Whether the task loss may be a mean over rows (`loss_weights: rows`): it is TRL's, with the run's `items`."""
        return cls.task_loss is Defense.task_loss

    def validate(self, run: TrainingRun) -> None:
        """Refuse what this defense cannot do with this model, before anything is measured."""

    def initialise(self, run: TrainingRun) -> None:
        """Once theta_0 is measured, before any checkpoint is loaded: keep it, or change how the model is written."""

    def attach(self, run: TrainingRun) -> None:
        """Prepare for training; the optimizer exists and holds the trainable parameters."""

    def choose_batch(self, run: TrainingRun, inputs: Inputs, items: Items) -> tuple[Inputs, Items]:
        """The micro-batch to train on, and what the loss of the whole step that it is part of is divided by.

        The number of its scored tokens; with `loss_weights: rows`, of its rows.
        """
        return inputs, items

    def micro_step(self, run: TrainingRun, inputs: Inputs, items: Items) -> Tensor:
        """Accumulate the gradient of one micro-batch and return its detached loss."""
        return run.engine.accumulate(inputs, items, {})

    def task_loss(
        self, run: TrainingRun, model: nn.Module, inputs: Inputs, items: Items, default: Callable[[], Tensor]
    ) -> Tensor:
        """The loss of this micro-batch, scaled as its part of the step (see `SideData.token_share`); `default`: TRL's.

        `model` is wrapped for data parallelism.
        """
        return default()

    def extra_loss(self, run: TrainingRun, model: nn.Module, inputs: Inputs) -> Tensor | None:
        """A term added to the task loss of this micro-batch, already scaled for gradient accumulation."""
        return None

    def on_gradient(self, run: TrainingRun) -> None:
        """Once per optimizer step: `.grad` holds the accumulated task gradient, reduced over ranks, not yet clipped."""

    def skip_step(self, run: TrainingRun) -> None:
        """Instead of the three around it: this step's gradient was discarded, and the optimizer will move nothing."""

    def before_step(self, run: TrainingRun) -> None:
        """Right before the optimizer moves the parameters."""

    def after_step(self, run: TrainingRun) -> None:
        """Right after the optimizer moved them."""

    def transform(self, run: TrainingRun) -> None:
        """Change the trained model once, after training; also the place to take off hooks."""

    @contextmanager
    def saved_form(self, run: TrainingRun) -> Iterator[None]:
        """A context in which the model is what should be written as an ordinary model or adapter."""
        yield

    def row(self) -> Row:
        """What this step adds to its line of `events.jsonl`; also logged as `safety/<key>` where numeric."""
        return self._row

    def state_dict(self) -> dict[str, object]:
        """What a resumed run needs (a collective call)."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def describe(self) -> dict[str, object]:
        """Name and settings, for the fingerprint and the record."""
        return {"name": self.name, **(asdict(self.config) if is_dataclass(self.config) else {})}  # type: ignore[arg-type]


DEFENSES: Registry[type[Defense]] = Registry("defense", package="holdfast.defenses")


def with_paper_constants(cls: type[Defense], options: Mapping[str, object]) -> dict[str, Any]:
    """The options with the paper's constants below them where they say `preset: paper`."""
    options = dict(options)
    preset = options.pop("preset", None)
    if preset not in (None, "paper"):
        raise ConfigError(f"defense {cls.name!r}: unknown preset {preset!r}", remedy="use paper, or leave it out")
    return {**cls.paper, **options} if preset else options


def make_defense(choice: str | Defense | Mapping[str, Any]) -> Defense:
    """A defense from its name, from `{"name": ..., option: ...}` (also `preset: "paper"`), or as it is."""
    if isinstance(choice, Defense):
        return choice
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "name" not in options:
        raise ConfigError(
            "the defense has no name", remedy="write defense: holdfast, or defense: {name: holdfast, ...}"
        )
    cls = DEFENSES[options.pop("name")]
    options = with_paper_constants(cls, options)
    known = [f.name for f in fields(cls.Config)]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"defense {cls.name!r} has no option {option!r}",
                remedy=nearest(option, known) if known else "it takes no options",
            )
    return cls(cls.Config(**options))
