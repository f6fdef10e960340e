"""Arguments of a trainer: TRL's own, plus what the safety set needs (`SafetyArguments`).

Each trainer has its class of both, of which `SafeSFTConfig` is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, Self, TypeVar, get_args

from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available
from trl import SFTConfig

from holdfast.core.errors import ConfigError
from holdfast.defaults import default
from holdfast.training.step import ENGINES
from holdfast.training.support import require_supported_zero

if TYPE_CHECKING:
    from transformers import TrainingArguments as _Joined
else:
    _Joined = object  # as a dataclass of transformers it would bring back the defaults that TRL's classes change

T = TypeVar("T")
_Switch = Literal["auto", "on", "off"]
_Spikes = Literal["skip", "off"]
_Weights = Literal["tokens", "rows"]
COUNTS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "safety_batch_size", "safety_micro_batch_size", "safety_eval_batch_size",
)  # fmt: skip
LOWER_IS_BETTER = ("_violation_rate", "_violation_upper", "_cvar", "_g")


def _is_safety_metric(metric: str | None) -> bool:
    """Whether this is a figure of the monitor split, of which less is safer."""
    return metric is not None and "safety_" in metric and metric.endswith(LOWER_IS_BETTER)


def is_behaviour_metric(metric: str | None) -> bool:
    """Whether this is a figure of the behaviour monitor, of which more is safer."""
    return metric is not None and metric.removeprefix("eval_").startswith("behaviour_")


def setting(default: T, meaning: str) -> T:
    """A field with its default, and the help text that transformers' parser shows."""
    made: T = field(default=default, metadata={"help": meaning})
    return made


@dataclass
class SafetyArguments(_Joined):
    """What every trainer takes beside TRL's arguments; a base of its class, before TRL's."""

    stage: str = setting(
        "finetune", "What this run is: 'align' (train on safe pairs) or 'finetune' (train on the task)."
    )
    safety_batch_size: int | None = setting(
        None,
        "Safety examples per optimizer step, over all processes. Default: 4 in a run file, in Python the task's "
        "global batch.",
    )
    safety_micro_batch_size: int | None = setting(
        None, "Safety examples per process and forward pass. Default: per_device_train_batch_size."
    )
    safety_eval_batch_size: int = setting(
        8, "Rows per forward pass when measuring reference losses and the monitor split."
    )
    safety_fractions: tuple[float, float, float] = setting(
        default("safety.data.fractions"), "Shares of the safety set: constraint, monitor, certify."
    )
    safety_seed: int | None = setting(None, "Seed of the safety split and stream. Default: seed.")
    step: str = setting(
        "auto",
        "How gradients are computed: 'fused' over packed rows, holdfast's of task and constraint in one "
        "pass; 'two_pass' one after the other (the reference); 'auto' fused on a GPU where the model allows it.",
    )
    step_graphs: _Switch = setting("auto", "Record the fused step as CUDA graphs; 'auto' where it is possible.")
    skip_inactive_rows: _Switch = setting(
        "auto",
        "Look at the safety rows before the fused step, and leave out those whose gradient is zero (the "
        "same step); 'auto' while most are.",
    )
    probe_rows: int = setting(
        0,
        "After every step, measure g on this many fixed examples of each safety set's constraint split "
        "(events.jsonl, result.json); steers nothing and costs a forward pass of them. 0: not.",
    )
    rollback: bool = setting(
        False, "End with the last checkpoint whose behaviour was not over its limits, where the last is not."
    )
    on_leak: str = setting(
        "error", "A certify prompt that occurs in the task data: 'error', or 'move' it to the constraint split."
    )
    reference_cache: str | None = setting(None, "Folder where reference losses are shared between runs.")
    run_dir: str | None = setting(None, "Folder of events.jsonl, reference.* and splits.json. Default: output_dir.")

    def __post_init__(self) -> None:
        require_supported_zero(self)
        metric, greater = self.metric_for_best_model, getattr(self, "greater_is_better", None)
        for wrong, worst, instead in (
            (_is_safety_metric(metric) and greater, "the least safe", False),
            (is_behaviour_metric(metric) and greater is False, "the worst", True),
        ):
            if wrong:
                raise ConfigError(
                    f"greater_is_better={greater} with metric_for_best_model={metric!r} would keep {worst} checkpoint",
                    remedy=f"leave greater_is_better unset or set it to {instead}",
                )
        if _is_safety_metric(metric):  # transformers takes what does not end in "loss" for a score to be maximised
            self.greater_is_better = False
        if getattr(self, "bf16", None) is None and not is_torch_bf16_gpu_available():
            self.bf16 = False  # TRL would switch it on everywhere, and fail on a machine without such a GPU
        super().__post_init__()
        self._check_rollback()
        if self.on_leak not in ("error", "move"):
            raise ConfigError(f"on_leak is {self.on_leak!r}", remedy="use 'error' or 'move'")
        switch = get_args(_Switch)
        self._check_choices({"step": ("auto", *ENGINES), "step_graphs": switch, "skip_inactive_rows": switch})
        counts = {name: getattr(self, name) for name in COUNTS}
        small = [f"{name} is {n}, expected at least 1" for name, n in counts.items() if n is not None and n < 1]
        small += ["max_steps is 0, with which nothing is trained"] if self.max_steps == 0 else []
        if small:
            raise ConfigError(small[0], remedy="set a positive number, or leave it out")
        if self.probe_rows < 0:
            raise ConfigError(f"probe_rows is {self.probe_rows}, expected 0 or more", remedy="0 measures no probe")
        self.safety_fractions = tuple(self.safety_fractions)  # type: ignore[assignment]  # YAML and JSON give lists

    def _check_rollback(self) -> None:
        """Refuse a rollback that has nowhere to go back to, or that another rule would undo."""
        strategy = str(getattr(self.save_strategy, "value", self.save_strategy))
        if self.rollback and strategy not in ("steps", "epoch"):
            raise ConfigError(
                f"rollback with save_strategy {strategy!r}: there are no checkpoints to return to",
                remedy="set save_strategy to steps or epoch, or leave rollback out",
            )
        if self.rollback and self.load_best_model_at_end:
            raise ConfigError(
                "rollback and load_best_model_at_end both choose the weights that the run ends with",
                remedy="use one of them",
            )

    @property
    def stream_seed(self) -> int:
        """The seed of everything drawn from the safety set."""
        return int(self.seed if self.safety_seed is None else self.safety_seed)

    @property
    def place_model_on_device(self) -> bool | None:
        """Under DeepSpeed at once, not when its engine is made: theta_0 is measured before, and the model is whole."""
        return True if getattr(self, "deepspeed_plugin", None) is not None else None

    def _check_choices(self, choices: Mapping[str, tuple[str | None, ...]]) -> None:
        """Refuse a value that is not among its setting's choices."""
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name} is {value!r}", remedy=f"use one of {', '.join(filter(None, known))}")

    @classmethod
    def of(cls, args: TrainingArguments | None) -> Self:
        """These arguments; of TRL's own class, or none, with defaults for the rest."""
        if args is None:
            return cls("trainer_output")
        return args if isinstance(args, cls) else cls.from_trl(args)

    @classmethod
    def from_trl(cls, args: TrainingArguments, **changes: object) -> Self:
        """The same arguments with safety defaults, for users who pass TRL's own class."""
        values = {f.name: getattr(args, f.name) for f in fields(args) if f.init} | changes
        if _is_safety_metric(args.metric_for_best_model):
            values["greater_is_better"] = None  # filled in by transformers, which cannot know the metric's direction
        return cls(**values)


@dataclass
class SafeSFTConfig(SafetyArguments, SFTConfig):
    """Arguments of `SafeSFTTrainer`; every field of `trl.SFTConfig` is accepted too."""

    spikes: _Spikes | None = setting(
        None,
        "A step whose task loss is far above all before: 'skip' it (the default), and end the run where "
        "there are ten in 100 steps; 'off' applies it.",
    )
    loss_weights: _Weights | None = setting(
        None,
        "What the task loss is a mean over: 'tokens' of the step (TRL's, the default), or 'rows', each by "
        "the mean over its own tokens.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choices({"spikes": (None, *get_args(_Spikes)), "loss_weights": (None, *get_args(_Weights))})

    @classmethod
    def from_sft(cls, args: SFTConfig) -> Self:
        """`from_trl`, by the name that it has here."""
        return cls.from_trl(args)
