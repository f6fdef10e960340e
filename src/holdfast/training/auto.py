"""`safety_dataset="auto"` in Python: the trainer asks its own model before it is built."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.certification.kept import Limits
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.defaults import own_reply_defaults
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.fingerprint import model_fingerprint
from holdfast.models.model_files import ADAPTER_CONFIG
from holdfast.models.source import EMBEDDED
from holdfast.screening.asking import Progress, asker_of
from holdfast.screening.record import FOLDER, fixed_screening
from holdfast.screening.screen import Screening, ask_and_screen, belongs_to, task_examples
from holdfast.screening.settings import ScreeningSettings
from holdfast.training.hooks import Defense
from holdfast.training.safety import announce
from holdfast.training.support import require_whole_model

if TYPE_CHECKING:
    from datasets import Dataset

    from holdfast.training.config import SafetyArguments
    from holdfast.training.trainer import SafeTrainer

AUTO = "auto"
QUIET = 10.0  # seconds between two lines


def _is_auto(value: object) -> bool:
    """Whether the trainer is to build its safety sets; a data set may not be compared with text."""
    return isinstance(value, str) and value == AUTO


def start_of(model: str | LanguageModel) -> str | LanguageModel:
    """The model as TRL takes it: `embedded` is the folder of the small model, and an adapter is refused by name."""
    if model == EMBEDDED:
        return str(embedded_model_dir())
    if isinstance(model, str | Path) and (Path(model) / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{model} is an adapter, expected a model",
            remedy="a run file merges it: hf.run(hf.load_config('run.yaml')); here pass the merged model itself",
        )
    return model


def screened(
    model: str | LanguageModel, dataset: object, args: SafetyArguments, given: dict[str, Any], *,
    create: Callable[..., LanguageModel],
) -> tuple[str | LanguageModel, Screening | None]:  # fmt: skip
    """The model, loaded where it had to be asked, and the screening; its conflicts are taken out of `train_dataset`.

    `dataset` is `safety_dataset` as given: `auto`, a `Screening`, or pairs, with which nothing is done; `given` are the
    trainer's other arguments; `create` loads a model as TRL would.
    """
    model = start_of(model)
    screening = dataset if isinstance(dataset, Screening) else None
    if _is_auto(dataset):
        model, given["processing_class"] = _loaded(model, args, given, create)
        screening = ask_theta_0(model, args, given)
    if screening is not None:
        given["train_dataset"] = without_conflicts(given["train_dataset"], screening)
    return model, screening


def _loaded(
    model: str | LanguageModel, args: SafetyArguments, given: dict[str, Any], create: Callable[..., LanguageModel]
) -> tuple[LanguageModel, Tokenizer]:
    """The model and its tokenizer as TRL would make them: they are asked before TRL gets them."""
    from transformers import AutoTokenizer

    if isinstance(model, str):
        options = {"trust_remote_code": getattr(args, "trust_remote_code", False), **(args.model_init_kwargs or {})}
        if (quantization := given.pop("quantization_config", None)) is not None:  # TRL takes it beside a name alone
            options.setdefault("quantization_config", quantization)
        model = create(model, **options)
    tokenizer = given.get("processing_class")
    return model, AutoTokenizer.from_pretrained(model.config._name_or_path) if tokenizer is None else tokenizer


def ask_theta_0(model: LanguageModel, args: SafetyArguments, given: Mapping[str, Any]) -> Screening:
    """Screen the trainer's own data with its own model; the sets lie in `run_dir` and are read by a resumed run."""
    if given.get("formatting_func") is not None:
        raise UnsupportedError(
            "safety_dataset='auto' with a formatting_func: its text has no prompt to ask",
            remedy="give prompt/completion or messages rows, or pass safety_dataset=...",
        )
    require_whole_model(
        args, "safety_dataset='auto'", "screen first on one device: safety_dataset=holdfast.screen(model, dataset)"
    )
    folder = Path(args.run_dir or args.output_dir) / FOLDER
    if args.push_to_hub and folder.resolve().is_relative_to(Path(args.output_dir).resolve()):  # the Trainer pushes it
        raise ConfigError(
            f"push_to_hub with safety_dataset='auto': the hub would get the prompts and replies in {folder.resolve()}",
            remedy="set run_dir to a folder outside output_dir",
        )
    rows = task_examples(given["train_dataset"], replies="reward_funcs" not in given)
    settings = ScreeningSettings(seed=args.stream_seed)
    digest = model_fingerprint(model)

    def make() -> Screening:
        if not getattr(model, "hf_device_map", None):
            model.to(args.device)
        asker = asker_of(model, given["processing_class"], model_sha256=digest, progress=_announced())
        return ask_and_screen(model, rows, asker, settings)

    # Whether this start resumes is known only later; a checkpoint is bound to the sets, and refuses others itself.
    return fixed_screening(folder, belongs_to(digest, rows, settings, "chat"), make, started=False)


def without_conflicts(dataset: Dataset, screening: Screening) -> Dataset:
    """The data set without the rows that screening drops; the caller's own object is not changed."""
    if len(dataset) != screening.rows:
        raise ConfigError(
            f"the screening is of {screening.rows} rows, train_dataset has {len(dataset)}",
            remedy="pass the data set that was screened as train_dataset: the trainer leaves the conflicts out",
        )
    dropped = screening.dropped
    return dataset.select([i for i in range(len(dataset)) if i not in dropped]) if dropped else dataset


def constraints_of(
    screening: Screening | None, given: ChanceConstraint | Mapping[str, ChanceConstraint] | None, defense: Defense
) -> ChanceConstraint | Mapping[str, ChanceConstraint]:
    """The constraints: as given; in the defense's unit; of sets that were asked for with the limits of the table."""
    if given is not None:
        return given
    unit = defense.unit
    if screening is None:
        return ChanceConstraint(unit=unit)
    keeps = {name: screening.counts[name]["keep"] for name in screening.sets}
    return {name: ChanceConstraint(**{"unit": unit, **own_reply_defaults(keep, unit)}) for name, keep in keeps.items()}


def where_needed(dataset: object, defense: Defense, stage: str) -> object:
    """The safety data as given; `auto` only where the defense needs a safety set."""
    return None if _is_auto(dataset) and "safety" not in defense.needed(stage) else dataset


def watch_screened(trainer: SafeTrainer) -> None:
    """Have the trainer watch the prompts of its screening, where it has any."""
    screening: Screening | None = trainer.screening
    if screening is not None and screening.monitor.any:
        # Of refusals the constraint's alpha may be lost.
        kept = [name for name in screening.sets if screening.counts[name]["keep"] == "refusals"]
        lost = max((trainer.safety[name].constraint.alpha for name in kept), default=Limits().refusals)
        trainer.watch_behaviour(screening.monitor, Limits(refusals=lost))


def _announced() -> Progress:
    """Says how far asking is: at the beginning and end of every part, and every ten seconds."""
    said = -math.inf

    def show(what: str, done: int, total: int) -> None:
        nonlocal said
        if done in (0, total) or time.monotonic() - said >= QUIET:
            said = time.monotonic()
            announce(f"asking the model: {what}, {done} of {total}")

    return show
