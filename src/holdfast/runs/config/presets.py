"""Named sets of values that a run file starts from; keys written in the file win."""

import copy
from collections.abc import Mapping
from typing import Any

from holdfast.defaults import Default, own_reply_defaults, train_defaults
from holdfast.records.run_record import SINGLE
from holdfast.runs.config.blocks import SPELLED_OUT, SafetyBlock, is_single, on_protocol_data

SETUP = "section 'Setup'"
HYPERPARAMETERS = "appendix 'Defense Hyperparameters'"
DEFENSES = "section 'Defenses'"
ALGORITHM = "Algorithm 1"
SILENT = "paper is silent: ours"
LITERATURE = "paper is silent: what the code of the compared defenses does"
SMALL_MODEL = "ours, for a model of 135M parameters"

_BOTH = (
    Default("train.per_device_train_batch_size", 10, HYPERPARAMETERS),
    Default("train.gradient_accumulation_steps", 1, f"{SILENT}; batches of 10 on one device"),
    Default("train.optim", "adamw_torch", HYPERPARAMETERS),
    Default("train.weight_decay", 0.1, HYPERPARAMETERS),
    Default("train.lr_scheduler_type", "constant", SETUP),
    Default("train.warmup_steps", 0, f"{SETUP}: constant schedule"),
    Default("train.max_length", 512, SETUP),
    Default("train.safety_batch_size", 10, f"{HYPERPARAMETERS}: disjoint batches of 10"),
    Default("lora.r", 32, SETUP),
    Default("lora.alpha", 4, SETUP),
    Default("lora.dropout", 0.05, HYPERPARAMETERS),
    Default("lora.target_modules", ["q_proj", "k_proj", "v_proj"], SETUP),
    Default("dtype", "bfloat16", SETUP),
    Default("seed", 42, "three seeds, not named; ours: 42, 1337, 2024"),
)
PAPER = (
    Default("constraint.unit", "nll_sum", "definition of the degradation (sum over completion tokens)"),
    Default("constraint.tau", 0.1, DEFENSES),
    Default("constraint.beta", 10.0, DEFENSES),
    Default("constraint.alpha", 0.05, DEFENSES),
    Default("constraint.majorizer", "ramp", "section 'Chance-Constrained Safety Preservation'"),
    Default("constraint.buffer", 0.0, f"{SILENT}; a buffer is mentioned without a value"),
    Default("defense.space", "gradient", ALGORITHM),
    Default("defense.rate", 1.0, f"{DEFENSES}: kappa is the inverse of the learning rate, so gamma = kappa*lr = 1"),
    Default("defense.estimator", "batch", f"{ALGORITHM}: minibatch estimates"),
    Default("train.adam_beta1", 0.9, HYPERPARAMETERS),
    Default("train.adam_beta2", 0.999, HYPERPARAMETERS),
    Default("train.learning_rate", 1e-5, SETUP),
    Default("train.num_train_epochs", 20, SETUP),
    Default("train.max_grad_norm", 1.0, f"{SILENT} (variant: 0, no clipping)"),
    Default("train.loss_type", "nll", f"{SILENT}: token-mean task loss"),
    *_BOTH,
)
SMALL = (
    Default("train.learning_rate", 3e-4, f"{SMALL_MODEL}: the paper's 1e-5 neither teaches nor breaks it"),
    Default("train.num_train_epochs", 3, f"{SMALL_MODEL}: 300 steps"),
    Default("train.max_grad_norm", 1.0, SILENT),
    Default("train.gradient_checkpointing", False, f"{SMALL_MODEL}: it fits without"),
    *_BOTH,
)
"""Plain SFT breaks an aligned SmolLM2-135M with these; constraint and filter are holdfast's own defaults."""

_PROTOCOL = (
    Default("adapter_policy", "merge", f"{SETUP}: the adapter is merged after alignment"),
    Default("roles.harm_prompts", "beavertails_test", SETUP),
    Default("roles.constraint", None, f"{SETUP}: the alignment pairs are the constraint set"),
    Default("roles.poison", 1000, f"{SETUP}: up to N"),
    Default("roles.evaluation", 700, SETUP),
    Default("roles.seed", 42, SILENT),
)
PAPER_PROTOCOL = (
    *_PROTOCOL,
    Default("template", "alpaca", LITERATURE),
    Default("roles.safe", "beavertails", SETUP),
    Default("roles.align", 5000, SETUP),
    Default("roles.monitor", 500, SILENT),
    Default("roles.certify", 500, SILENT),
    Default("roles.harmful", 5000, f"{SILENT}; as many as there are safe pairs"),
)
SMALL_PROTOCOL = (
    *_PROTOCOL,
    Default("template", "chat", f"{SMALL_MODEL}: a chat model keeps its own format"),
    Default("roles.safe", "refusals", f"{SMALL_MODEL}: BeaverTails' safe answers hardly change what it does"),
    Default("roles.align", 1500, SMALL_MODEL),
    Default("roles.monitor", 400, SILENT),
    Default("roles.certify", 300, SILENT),
    Default("roles.asked", 1500, "ours: the attack's prompts are of another kind than those of the refusals"),
    Default("roles.harmful", 500, SILENT),
)
PRESETS = {"paper": PAPER, "small": SMALL}
PROTOCOLS = {"paper": PAPER_PROTOCOL, "small": SMALL_PROTOCOL}
"""What a preset adds to a run on the protocol's own data: a task by name, or `role:`."""


def describe_preset(name: str) -> list[Default]:
    """Every value of a preset with the place in the paper that states it, or that it is our choice."""
    return [*PRESETS[name], *PROTOCOLS[name]]


def defense_name(raw: Mapping[str, Any]) -> Any:
    """The defense that settings name, as a word or in a block."""
    written = raw.get("defense", "holdfast")
    return written.get("name", "holdfast") if isinstance(written, Mapping) else written


def filled(raw: Mapping[str, Any], *, complete: bool) -> dict[str, Any]:
    """The settings with what the file need not write: the preset's values, then those of the table.

    `constraint` becomes one block a safety set. `preset: paper` is passed on to the defense, which knows its own
    constants. With `complete`, `train` says all that it means to.
    """
    values, preset = {**raw, "safety": safety_sets(raw)}, str(raw.get("preset"))
    entries, name = PRESETS.get(preset, ()), defense_name(raw)
    if on_protocol_data(raw):
        entries += PROTOCOLS.get(preset, ())
        values = {"roles": {}, **({"stage": "align"} if raw["task"].get("role") == "align" else {}), **values}
    if preset == "paper" and isinstance(name, str):
        written = raw.get("defense")
        values["defense"] = {"preset": "paper", **(written if isinstance(written, Mapping) else {"name": name})}
    limit: dict[str, Any] = {}
    for entry in entries:
        block, _, field = entry.key.rpartition(".")
        if not block:
            values.setdefault(field, entry.value)
        elif block == "constraint":
            limit[field] = entry.value
        elif block != "defense" and isinstance(written := values.get(block, {}), Mapping):
            values[block] = {field: entry.value, **written}
    values["constraint"] = _constraints(values, name, limit)
    train = values.get("train", {})
    if raw.get("preset") is None and not complete and isinstance(train, Mapping):
        # What the file says comes first: problems are reported in its order.
        values["train"] = {**train, **train_defaults(full=raw.get("lora", {}) is None), **train}
    return values


def safety_sets(raw: Mapping[str, Any]) -> Any:
    """The safety sets, where the file names none:

    | `stage: align`, `task: {role: align}`  | none: there is nothing yet to be kept     |
    | `task: {name: ...}`                    | the protocol's, `{role: constraint}`      |
    | otherwise, and where it says `auto`    | the model's own replies (`SPELLED_OUT`)   |
    """
    task = raw.get("task")
    aligns = isinstance(task, Mapping) and task.get("role") == "align"
    silent = {"role": "constraint"} if on_protocol_data(raw) else "auto"
    if raw.get("stage", "align" if aligns else None) == "align":
        silent = {}
    safety = raw.get("safety", silent)
    return copy.deepcopy(SPELLED_OUT) if safety == "auto" else safety


def _constraints(values: Mapping[str, Any], defense: Any, preset: Mapping[str, Any]) -> Any:
    """One block a safety set: what is written (for all or by name), preset, what is asked for, the defense's unit.

    Nearly all defenses have the same unit, KL to the reference, so that their runs compare.
    """
    from holdfast.training.hooks import DEFENSES

    safety, written = values["safety"], values.get("constraint", {})
    if safety == {} or not isinstance(written, Mapping):
        return {} if safety == {} else written
    named = isinstance(safety, Mapping) and not is_single(safety, SafetyBlock)
    sets = safety if named else {SINGLE: safety}
    asked = [name for name, block in sets.items() if isinstance(block, Mapping) and block.get("prompts") is not None]
    keeps = {name: sets[name]["keep"] for name in asked if sets[name].get("keep") in SPELLED_OUT}
    blocks = dict.fromkeys(sets, written) if is_single(written) else {name: {} for name in asked} | dict(written)
    unit = {"unit": DEFENSES[defense].unit} if isinstance(defense, str) and defense in DEFENSES else {}
    found = {}
    for name, block in blocks.items():
        over = {**preset, **block}
        limits = own_reply_defaults(keeps[name], {**unit, **over}.get("unit"), over) if name in keeps else {}
        found[name] = {**unit, **limits, **over}
    return found
