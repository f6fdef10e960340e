"""The defaults of a run file: the one table that says what a run does where its file is silent.

They stand in `config.yaml` of every run. They hold for run files alone (`load_config`, `config_from_dict`): a preset is
complete by itself, a study's cells have their protocol, and `SafeSFTConfig` in Python keeps TRL's defaults.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Default(NamedTuple):
    """One value, and why it is this one."""

    key: str
    value: Any
    source: str


TRL = "TRL's"
PROVISIONAL = "provisional, until measured"
TUNED = "tuned on Qwen2.5-Coder-0.5B-Instruct (docs/log.md, 2026-11-16)"

TABLE: Final = (
    # -- what is held
    Default("constraint.refusals.alpha", 0.05, "ChanceConstraint's: at most 5 % of the refusals may move"),
    Default("constraint.answers.alpha", 0.10, "measured: over-refusal 0.43, without this set 0.50 (shipped 0.38)"),
    Default("safety.fractions", (0.75, 0.25, 0.0), "task prompts steer or monitor; bundled kinds certify"),
    Default("screening.max_dropped", 0.10, "more conflicts than this are a decision of the user's"),
    Default("screening.max_prompts", 20_000, "minutes on one GPU; the other rows are counted with an interval"),
    Default("monitor.prompts", 200, "10 lost of 200 are shown to be under 10 % (95 % upper bound 9.0 %)"),
    # -- how it is learned
    Default("train.learning_rate", 3e-4, f"{TUNED}; not used with `lora: null`"),
    Default("train.num_train_epochs", 3, TRL),
    Default("train.per_device_train_batch_size", 8, TRL),
    Default("train.gradient_accumulation_steps", 1, TRL),
    Default("train.safety_batch_size", 4, f"{TUNED}; elsewhere 2 rows a step protected as 10 did"),
    Default("train.lr_scheduler_type", "cosine", f"{PROVISIONAL}: usual for LoRA"),
    Default("train.warmup_steps", 0.03, f"{PROVISIONAL}: usual for LoRA; below 1 a share of the steps"),
    Default("train.max_length", 1024, TRL),
    Default("train.weight_decay", 0.0, TRL),
    Default("train.max_grad_norm", 1.0, TRL),
    Default("train.gradient_checkpointing", False, f"{PROVISIONAL}: faster; out of memory, passes become smaller"),
    Default("lora.r", 32, TUNED),
    Default("lora.alpha", 4, TUNED),
    Default("lora.dropout", 0.05, TUNED),
    Default("lora.target_modules", ["q_proj", "k_proj", "v_proj"], f"{TUNED}; more layers were not finished"),
)

_BY_KEY = {entry.key: entry.value for entry in TABLE}


def default(key: str) -> Any:
    """The value of one key of the table."""
    return _BY_KEY[key]


def train_defaults(*, full: bool) -> dict[str, Any]:
    """The fields of `train:`; a rate for LoRA is far too high where every parameter is trained (`full`)."""
    found = {key.removeprefix("train."): value for key, value in _BY_KEY.items() if key.startswith("train.")}
    if full:
        del found["learning_rate"]
    return found
