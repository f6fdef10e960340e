"""Named sets of values that a run file starts from; keys written in the file win."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.config.safety_sets import SafetyBlock, is_single, on_protocol_data
from holdfast.defaults import train_defaults
from holdfast.records.run_record import SINGLE

SETUP = "section 'Setup'"
HYPERPARAMETERS = "appendix 'Defense Hyperparameters'"
DEFENSES = "section 'Defenses'"
ALGORITHM = "Algorithm 1"
SILENT = "paper is silent: ours"
LITERATURE = "paper is silent: what the code of the compared defenses does"
SMALL_MODEL = "ours, for a model of 135M parameters"


@dataclass(frozen=True)
class PresetValue:
    """One value of a preset, and where it comes from."""

    key: str
    value: Any
    source: str


PAPER = (
    PresetValue("constraint.unit", "nll_sum", "definition of the degradation (sum over completion tokens)"),
    PresetValue("constraint.tau", 0.1, DEFENSES),
    PresetValue("constraint.beta", 10.0, DEFENSES),
    PresetValue("constraint.alpha", 0.05, DEFENSES),
    PresetValue("constraint.majorizer", "ramp", "section 'Chance-Constrained Safety Preservation'"),
    PresetValue("constraint.buffer", 0.0, f"{SILENT}; a buffer is mentioned without a value"),
    PresetValue("filter.space", "gradient", ALGORITHM),
    PresetValue("filter.rate", 1.0, f"{DEFENSES}: kappa is the inverse of the learning rate, so gamma = kappa*lr = 1"),
    PresetValue("filter.estimator", "batch", f"{ALGORITHM}: minibatch estimates"),
    PresetValue("train.per_device_train_batch_size", 10, HYPERPARAMETERS),
    PresetValue("train.gradient_accumulation_steps", 1, f"{SILENT}; batches of 10 on one device"),
    PresetValue("train.safety_batch_size", 10, f"{HYPERPARAMETERS}: disjoint batches of 10"),
    PresetValue("train.optim", "adamw_torch", HYPERPARAMETERS),
    PresetValue("train.adam_beta1", 0.9, HYPERPARAMETERS),
    PresetValue("train.adam_beta2", 0.999, HYPERPARAMETERS),
    PresetValue("train.weight_decay", 0.1, HYPERPARAMETERS),
    PresetValue("train.learning_rate", 1e-5, SETUP),
    PresetValue("train.lr_scheduler_type", "constant", SETUP),
    PresetValue("train.warmup_steps", 0, f"{SETUP}: constant schedule"),
    PresetValue("train.num_train_epochs", 20, SETUP),
    PresetValue("train.max_length", 512, SETUP),
    PresetValue("train.max_grad_norm", 1.0, f"{SILENT} (variant: 0, no clipping)"),
    PresetValue("train.loss_type", "nll", f"{SILENT}: token-mean task loss"),
    PresetValue("lora.r", 32, SETUP),
    PresetValue("lora.alpha", 4, SETUP),
    PresetValue("lora.dropout", 0.05, HYPERPARAMETERS),
    PresetValue("lora.target_modules", ["q_proj", "k_proj", "v_proj"], SETUP),
    PresetValue("dtype", "bfloat16", SETUP),
    PresetValue("seed", 42, "three seeds, not named; ours: 42, 1337, 2024"),
)
SMALL = (
    PresetValue("train.per_device_train_batch_size", 10, HYPERPARAMETERS),
    PresetValue("train.gradient_accumulation_steps", 1, f"{SILENT}; batches of 10 on one device"),
    PresetValue("train.safety_batch_size", 10, HYPERPARAMETERS),
    PresetValue("train.optim", "adamw_torch", HYPERPARAMETERS),
    PresetValue("train.weight_decay", 0.1, HYPERPARAMETERS),
    PresetValue("train.learning_rate", 3e-4, f"{SMALL_MODEL}: the paper's 1e-5 neither teaches nor breaks it"),
    PresetValue("train.lr_scheduler_type", "constant", SETUP),
    PresetValue("train.warmup_steps", 0, f"{SETUP}: constant schedule"),
    PresetValue("train.num_train_epochs", 3, f"{SMALL_MODEL}: 300 steps"),
    PresetValue("train.max_length", 512, SETUP),
    PresetValue("train.max_grad_norm", 1.0, SILENT),
    PresetValue("train.gradient_checkpointing", False, f"{SMALL_MODEL}: it fits without"),
    PresetValue("lora.r", 32, SETUP),
    PresetValue("lora.alpha", 4, SETUP),
    PresetValue("lora.dropout", 0.05, HYPERPARAMETERS),
    PresetValue("lora.target_modules", ["q_proj", "k_proj", "v_proj"], SETUP),
    PresetValue("dtype", "bfloat16", SETUP),
    PresetValue("seed", 42, "three seeds, not named; ours: 42, 1337, 2024"),
)
"""Plain SFT breaks an aligned SmolLM2-135M with these; constraint and filter are holdfast's own defaults."""

PAPER_PROTOCOL = (
    PresetValue("template", "alpaca", LITERATURE),
    PresetValue("adapter_policy", "merge", f"{SETUP}: the adapter is merged after alignment"),
    PresetValue("roles.safe", "beavertails", SETUP),
    PresetValue("roles.harm_prompts", "beavertails_test", SETUP),
    PresetValue("roles.align", 5000, SETUP),
    PresetValue("roles.constraint", None, f"{SETUP}: the alignment pairs are the constraint set"),
    PresetValue("roles.monitor", 500, SILENT),
    PresetValue("roles.certify", 500, SILENT),
    PresetValue("roles.harmful", 5000, f"{SILENT}; as many as there are safe pairs"),
    PresetValue("roles.poison", 1000, f"{SETUP}: up to N"),
    PresetValue("roles.evaluation", 700, SETUP),
    PresetValue("roles.seed", 42, SILENT),
)
SMALL_PROTOCOL = (
    PresetValue("template", "chat", f"{SMALL_MODEL}: a chat model keeps its own format"),
    PresetValue("adapter_policy", "merge", f"{SETUP}: the adapter is merged after alignment"),
    PresetValue("roles.safe", "refusals", f"{SMALL_MODEL}: BeaverTails' safe answers hardly change what it does"),
    PresetValue("roles.harm_prompts", "beavertails_test", SETUP),
    PresetValue("roles.align", 1500, SMALL_MODEL),
    PresetValue("roles.constraint", None, f"{SETUP}: the alignment pairs are the constraint set"),
    PresetValue("roles.monitor", 400, SILENT),
    PresetValue("roles.certify", 300, SILENT),
    PresetValue("roles.asked", 1500, "ours: the attack's prompts are of another kind than those of the refusals"),
    PresetValue("roles.harmful", 500, SILENT),
    PresetValue("roles.poison", 1000, f"{SETUP}: up to N"),
    PresetValue("roles.evaluation", 700, SETUP),
    PresetValue("roles.seed", 42, SILENT),
)
PRESETS = {"paper": PAPER, "small": SMALL}
PROTOCOLS = {"paper": PAPER_PROTOCOL, "small": SMALL_PROTOCOL}
"""What a preset adds to a run on the protocol's own data: a task by name, or `role:`."""


def describe_preset(name: str) -> list[PresetValue]:
    """Every value of a preset with the place in the paper that states it, or that it is our choice."""
    return [*PRESETS[name], *PROTOCOLS[name]]


def with_preset(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the preset's values wherever the file is silent.

    The filter's values are left out unless the defense is `holdfast`, LoRA's when the file says `lora: null`, and
    those of the protocol unless its data are used. `preset: paper` is passed on to another defense.
    """
    preset = str(raw.get("preset"))
    values = PRESETS.get(preset, ())
    if on_protocol_data(raw):
        values = (*values, *PROTOCOLS.get(preset, ()))
    defense = raw.get("defense", "holdfast")
    name = defense.get("name", "holdfast") if isinstance(defense, Mapping) else defense
    merged = dict(raw)
    if preset == "paper" and name != "holdfast" and isinstance(name, str):
        merged["defense"] = {"preset": "paper", **(defense if isinstance(defense, Mapping) else {"name": name})}
    for entry in values:
        block, _, field = entry.key.rpartition(".")
        if not block:
            merged.setdefault(field, entry.value)
        elif block != "filter" or name == "holdfast":
            merged[block] = _fill(block, merged.get(block, {}), field, entry.value)
    return merged


def with_default_unit(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the defense's unit where the file names none: for nearly all of them KL to the reference.

    So runs of different defenses are measured alike. KL needs a fresh adapter; without one (all parameters trained, or
    an adapter continued) it is the constraint's default. docs/log.md has the experiment that chose it.
    """
    from holdfast.trainers.hooks import DEFENSES

    defense = raw.get("defense", "holdfast")
    name = defense.get("name", "holdfast") if isinstance(defense, Mapping) else defense
    fresh = raw.get("lora", {}) is not None and raw.get("adapter_policy", "merge") == "merge"
    if not isinstance(name, str) or name not in DEFENSES or not fresh or raw.get("safety") == {}:
        return dict(raw)
    return {**raw, "constraint": _fill("constraint", raw.get("constraint", {}), "unit", DEFENSES[name].unit)}


def with_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the training fields of `holdfast.defaults` where the file names none; a preset has its own."""
    train = raw.get("train", {})
    if raw.get("preset") is not None or not isinstance(train, Mapping):
        return dict(raw)
    defaults = train_defaults(full=raw.get("lora", {}) is None)
    # What the file says comes first: problems are reported in its order.
    return {**raw, "train": {**train, **{key: v for key, v in defaults.items() if key not in train}}}


def with_protocol_data(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what a run on the protocol's data need not write: its roles, and its stage."""
    if not on_protocol_data(raw):
        return dict(raw)
    stage = {"stage": "align"} if raw["task"].get("role") == "align" else {}
    return {"roles": {}, **stage, **raw}


def _fill(block: str, written: Any, field: str, value: Any) -> Any:
    if not isinstance(written, Mapping):
        return written
    if block == "constraint" and written and not is_single(written):
        return {name: _fill("", inner, field, value) for name, inner in written.items()}
    return {field: value, **written}


def spread_constraint(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a single `constraint` block repeated for every safety set."""
    safety: Any = raw.get("safety")
    constraint = raw.get("constraint", {})
    if safety == {}:
        return {**raw, "constraint": {}}
    if not is_single(constraint):
        return dict(raw)
    named = isinstance(safety, Mapping) and not is_single(safety, SafetyBlock)
    names = list(safety) if named else [SINGLE]
    return {**raw, "constraint": dict.fromkeys(names, constraint)}
