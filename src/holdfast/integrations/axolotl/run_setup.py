"""An Axolotl run as a holdfast run: the same settings in a run file's words, and its folder.

The folder `OUTPUT_DIR/holdfast` is an ordinary run folder, so that `holdfast audit`, `certify`, `verify` and `report`
read it like any other. Axolotl's rows lie in it as `task.jsonl`, for their owner alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.files import write_parts
from holdfast.core.hashing import plain
from holdfast.defaults import default
from holdfast.integrations.axolotl.conversations import Conversation
from holdfast.integrations.axolotl.settings import OF_RUN_FILE, TRAIN
from holdfast.runs.config import RunConfig
from holdfast.runs.config.load import config_from_dict
from holdfast.runs.config.resolve import ResolvedRun, constraints, defaults, defense, resolved, screening_settings
from holdfast.training.config import SafeSFTConfig

if TYPE_CHECKING:
    from axolotl.utils.dict import DictDefault
    from transformers import TrainingArguments

FOLDER = "holdfast"
TASK = "task.jsonl"
DEFENSES = ("holdfast", "sft")
OWNER = 0o600
# Of Axolotl's trainer, stored with the run.
ARGUMENTS = (
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "weight_decay", "max_grad_norm", "warmup_steps", "lr_scheduler_type", "adam_beta1", "adam_beta2", "adam_epsilon",
    "bf16", "gradient_checkpointing",
)  # fmt: skip


def run_folder(cfg: DictDefault) -> Path:
    return Path(cfg.output_dir) / FOLDER


def planned(cfg: DictDefault, args: TrainingArguments) -> ResolvedRun:
    """The run, resolved; `args` are Axolotl's, which receive the fields of the safety pass."""
    config = run_config(cfg, args)
    given = {key: value for key, value in config.train.items() if key in TRAIN}
    folder = str(run_folder(cfg))
    missing = {k: v for k, v in defaults(SafeSFTConfig).items() if not hasattr(args, k)}
    own = {"run_dir": folder, "stage": "finetune", "step": "two_pass", "max_length": int(cfg.sequence_len)}
    for name, value in {**missing, **given, **own, "stream_seed": config.seed}.items():
        setattr(args, name, value)
    return ResolvedRun(config, constraints(config), defense(config), args, resolved(config), screening_settings(config))


def run_config(cfg: DictDefault, args: TrainingArguments) -> RunConfig:
    """The settings of a run file that says the same as the Axolotl file."""
    block = plain(cfg.get("holdfast") or {})  # Axolotl's mappings answer every key with None
    train = dict(block.get("train") or {})
    if other := sorted(set(train) - set(TRAIN)):
        what = f"holdfast: train: {', '.join(other)}: everything but the safety pass is Axolotl's"
        raise ConfigError(what, remedy=f"set it at the top of the Axolotl file; here: {', '.join(TRAIN)}")
    counted = {name for name in ("max_steps", "warmup_steps") if cfg.get(name) is None}  # of rows: some may leave yet
    mirrored = {name: plain(getattr(args, name)) for name in ARGUMENTS if hasattr(args, name) and name not in counted}
    raw = {
        "model": str(cfg.base_model), "dtype": _dtype(cfg), "task": {"data": str(run_folder(cfg) / TASK)},
        "lora": _lora(cfg), "output_dir": str(run_folder(cfg).resolve()), "seed": int(cfg.seed or default("seed")),
        "train": {
            **mirrored, "max_length": int(cfg.sequence_len), "safety_batch_size": default("train.safety_batch_size"),
            **train,
        },
        **({"revision": cfg.revision_of_model} if cfg.revision_of_model else {}),
        **{key: block[key] for key in OF_RUN_FILE if block.get(key) is not None},
    }  # fmt: skip
    config = config_from_dict(raw, where="holdfast", complete=True)
    if config.defense.name not in DEFENSES:
        what = f"defense {config.defense.name!r} under Axolotl: it has a loss, batches or saved weights of its own"
        raise UnsupportedError(what, remedy=f"use {' or '.join(DEFENSES)}, or holdfast's own trainer (holdfast train)")
    return config


def write_task(path: Path, rows: Sequence[Conversation]) -> None:
    """Axolotl's rows as a file that the evidence can name."""
    write_parts(path, (f"{json.dumps({'messages': turns})}\n".encode() for turns in rows), mode=OWNER)


def _lora(cfg: DictDefault) -> dict[str, Any] | None:
    if not cfg.adapter:
        return None
    targets = "all-linear" if cfg.lora_target_linear else cfg.lora_target_modules
    return {
        "r": int(cfg.lora_r), "alpha": float(cfg.lora_alpha or cfg.lora_r), "dropout": float(cfg.lora_dropout or 0.0),
        "target_modules": targets if isinstance(targets, str) else [str(name) for name in targets or ()],
    }  # fmt: skip


def _dtype(cfg: DictDefault) -> str:
    """In which the model was loaded, and in which certificates compare."""
    name = str(cfg.torch_dtype).removeprefix("torch.")
    return name if name in ("bfloat16", "float32") else "auto"
