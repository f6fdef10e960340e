"""The one table of defaults: what holds where a run file, a command of the evidence or a call says nothing.

A run's `config.yaml` shows them all. A preset is complete by itself, a study's cells have their protocol, and
`SafeSFTConfig` keeps TRL's training fields unless it is given these: `SafeSFTConfig(**train_defaults(full=False))`.
"""

from collections.abc import Collection
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from holdfast.core.units import KL_UNITS


class Default(NamedTuple):
    """One value, and why it is this one."""

    key: str
    value: Any
    source: str


TRL = "TRL's"
PAPER = "the paper's"
PROVISIONAL = "provisional, until measured"
MEASURED = "measured on SmolLM2-135M-Instruct (docs/log.md, the defaults of `defense: holdfast`)"
EMBEDDED = "chosen on the embedded model (docs/log.md)"
FOURTH_ROUND = "tuned on Qwen2.5-Coder-0.5B- and 1.5B-Instruct (docs/log.md, 2026-11-18)"
SEVENTH_ROUND = "tuned on Qwen2.5-Coder-0.5B- and 1.5B-Instruct (docs/log.md, 2026-11-19)"
TUNED = "tuned on Qwen2.5-Coder-0.5B-Instruct (docs/log.md, 2026-11-16)"

TABLE: Final = (
    Default("seed", 42, "the first of the paper's three"),
    # -- what is held
    Default("constraint.tau", 0.1, PAPER),
    Default("constraint.alpha", 0.05, PAPER),
    Default("constraint.majorizer", "ramp", PAPER),
    Default("constraint.beta", 10.0, f"{PAPER}: 1 / tau, so that no degradation is free"),
    Default("constraint.unit", "kl_token", MEASURED),
    Default("constraint.unit_of_two_models", "nll_token", "of audits: KL would need both in memory"),
    Default("constraint.buffer", 0.0, PAPER),
    Default("constraint.first_k", 8, "refusals are decided early"),
    Default("constraint.refusals.alpha", 0.05, "constraint.alpha: at most 5 % of the refusals may move"),
    Default("constraint.refusals.unit", "kl_first", f"{FOURTH_ROUND}: a refusal is decided in its first tokens"),
    Default("constraint.refusals.tau", 0.01, FOURTH_ROUND),
    Default("constraint.refusals.beta", 100.0, "1 / tau"),
    Default("constraint.refusals.majorizer", "capped_ramp", f"{SEVENTH_ROUND}: a lost refusal counts once"),
    Default("constraint.answers.alpha", 0.10, "measured: over-refusal 0.43, without this set 0.50 (shipped 0.38)"),
    Default("safety.fractions", (0.75, 0.25, 0.0), "task prompts steer or monitor; bundled kinds certify"),
    Default("safety.data.fractions", (0.6, 0.2, 0.2), "of pairs in a file: constraint, monitor, certify"),
    Default("safety.openings", 1, "each further opening shares the allowed error"),
    Default("screening.max_dropped", 0.10, "more conflicts than this are a decision of the user's"),
    Default("screening.max_prompts", 20_000, "minutes on one GPU; the other rows are counted with an interval"),
    Default("monitor.prompts", 200, "10 lost of 200 are shown to be under 10 % (95 % upper bound 9.0 %)"),
    # -- how it is enforced: the options of `defense: holdfast`
    Default("defense.space", "update", f"{MEASURED}: AdamW does not keep what the filtered gradient satisfies"),
    Default("defense.rate", 0.3, MEASURED),
    Default("defense.metric", "auto", "Adam's where the optimizer has second moments"),
    Default("defense.trust_region", 3.0, PROVISIONAL),
    Default("defense.estimator", "ema", f"{MEASURED}: a small batch cannot express a rate of 5 %"),
    Default("defense.decay", 0.9, MEASURED),
    Default("defense.value_decay", None, "as defense.decay"),
    Default("defense.reserve", 0.0, "all of alpha may be used"),
    Default("defense.dual", 0.0, "the optimizer's gradient is the task's alone"),
    Default("defense.every", 1, "every step measures what it holds"),
    Default("defense.draw", "pass", "all rows in turn"),
    Default("defense.rest", 1, "every set is measured at every step"),
    Default("defense.verify", 0, "no step is looked at twice"),
    Default("defense.anchor", False, "steps go as far from theta_0 as the barrier lets them"),
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
    # -- `holdfast align`, for models that do not refuse
    Default("align.steps", 120, f"{EMBEDDED}, in bfloat16, one seed; with 60 it refused 27 % of tasks"),
    Default("align.learning_rate", 8e-4, EMBEDDED),
    Default("align.batch", 8, EMBEDDED),
    Default("align.refusal_share", 0.4, f"{EMBEDDED}; refusals alone would teach it to refuse everything"),
    Default("align.rank", 16, EMBEDDED),
    Default("align.lora_alpha", 32, EMBEDDED),
    Default("align.max_length", 512, "tokens of a row with a refusal"),
    Default("align.held_out", 200, "as many as the monitor asks"),
    Default("align.save_steps", 20, "a sixth of the steps: ten to twenty minutes on two CPU cores"),
    # -- what is shown about it
    Default("certify.confidence", 0.95, "usual"),
    Default("evidence.max_new_tokens", 128, "a reply shows well before that whether it refuses"),
    Default("evidence.harm_tau", 0.1, PROVISIONAL),
)

_BY_KEY = {entry.key: entry.value for entry in TABLE}


def default(key: str) -> Any:
    """The value of one key of the table."""
    return _BY_KEY[key]


def block(name: str) -> dict[str, Any]:
    """The values of one block: `defense`, `lora` or `train`, by field."""
    return {key.removeprefix(f"{name}."): value for key, value in _BY_KEY.items() if key.startswith(f"{name}.")}


def train_defaults(*, full: bool) -> dict[str, Any]:
    """The fields of `train:`; a rate for LoRA is far too high where every parameter is trained (`full`)."""
    return {name: value for name, value in block("train").items() if not (full and name == "learning_rate")}


def constraint_defaults(*, kl: bool = True) -> dict[str, Any]:
    """The fields of a `ChanceConstraint`; without `kl` in the unit that audits have of two whole models."""
    names = ("tau", "alpha", "majorizer", "beta", "buffer", "first_k")
    unit = default("constraint.unit" if kl else "constraint.unit_of_two_models")
    return {**{name: default(f"constraint.{name}") for name in names}, "unit": unit}


LATER_OPTIONS: Final = MappingProxyType(
    {
        "value_decay": None,
        "reserve": 0.0,
        "dual": 0.0,
        "anchor": False,
        "every": 1,
        "rest": 1,
        "draw": "pass",
        "verify": 0,
    }
)
"""Options of the filter that earlier versions lacked, switched off: stored settings without them mean these."""


REFUSALS_IN_KL_TOKEN: Final = MappingProxyType({"unit": "kl_token", "tau": 0.03, "beta": 33.3, "majorizer": "ramp"})
"""The limit of refusals where a file asks for `kl_token`: what the second round of tuning chose for that unit."""


def own_reply_defaults(keep: str, unit: str | None, written: Collection[str] = ()) -> dict[str, Any]:
    """The limits of a set of the model's own `refusals` or `answers`, below what is `written`.

    unit, tau, beta and the majorizer were tuned together: they hold for units of KL, and where neither tau nor beta is
    written.
    """
    values = block(f"constraint.{keep}")
    if unit not in KL_UNITS or {"tau", "beta"} & set(written):
        return {"alpha": values["alpha"]}
    whole_reply = keep == "refusals" and unit == "kl_token" and "unit" in written
    return values | REFUSALS_IN_KL_TOKEN if whole_reply else values
