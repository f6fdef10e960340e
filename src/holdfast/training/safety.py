"""A safety set inside a training run: split, encoded, with its reference losses and its constraint."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.constraint import feasibility
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.ranks import barrier, rank
from holdfast.core.units import FIRST_UNITS, KL_UNITS
from holdfast.data import splits
from holdfast.data.encode import Encoded, encode_all, first_tokens, require_usable_tokenizer
from holdfast.data.examples import Example, searchable_texts
from holdfast.data.sources import examples_from_rows, read_examples
from holdfast.data.split_record import require_same, save_record
from holdfast.data.splits import Split
from holdfast.defaults import constraint_defaults
from holdfast.scoring.completion import deterministic, require_understood_head
from holdfast.scoring.forward import Forward
from holdfast.scoring.reference import ReferenceTable, cache_folder, data_sha256, noise_floor, reference_table

logger = logging.getLogger(__name__)

DEFAULT = "safety"
CONVERSATIONS = ("messages", "conversations")
PREFERENCE = ("chosen", "rejected")
TOKENIZER_CHANGES = ("chat_template_path", "eos_token", "pad_token")
ROLES = ("constraint", "monitor", "certify")


@dataclass
class SafetySet:
    """One constraint and the examples it speaks of; what is measured at theta_0 is empty until then."""

    name: str
    constraint: ChanceConstraint
    split: Split
    constraint_set: list[Encoded]  # examples that steer training
    monitor_set: list[Encoded]  # examples that are only looked at
    n_truncated: int
    reference: ReferenceTable | None = None
    # Losses at theta_0 in the constraint's unit.
    constraint_reference: Tensor = field(default_factory=lambda: torch.empty(0))
    monitor_reference: Tensor = field(default_factory=lambda: torch.empty(0))
    noise_floor: float | None = None  # 99 % quantile of |D| at theta_0, but for a nudge (`Theta0.nudged`)

    @property
    def all_encoded(self) -> list[Encoded]:
        """Every example whose reference loss is needed; the certify split stays closed."""
        return [*self.constraint_set, *self.monitor_set]

    @cached_property
    def steering_rows(self) -> list[Encoded]:
        """The constraint split as steps measure it: a unit of the first k tokens needs none of those that follow."""
        c = self.constraint
        cut = c.unit in FIRST_UNITS
        return [first_tokens(row, c.first_k) for row in self.constraint_set] if cut else self.constraint_set

    def rows(self, positions: Sequence[int]) -> list[Encoded]:
        """These examples of the constraint split, as steps measure them."""
        return [self.steering_rows[i] for i in positions]

    def folder(self, run_dir: Path) -> Path:
        """Where this set's files go: the run folder, or a folder of its own when there are several sets."""
        return run_dir if self.name == DEFAULT else run_dir / self.name


def named(value: Any, constraint: Any) -> dict[str, tuple[Any, ChanceConstraint]]:
    """Safety sets with their constraints by name, from one or several of each."""
    sets = dict(value) if isinstance(value, Mapping) and not _is_roles(value) else {DEFAULT: value}
    if constraint is None:
        constraint = ChanceConstraint(**constraint_defaults())
    constraints = dict(constraint) if isinstance(constraint, Mapping) else dict.fromkeys(sets, constraint)
    if set(sets) != set(constraints):
        raise ConfigError(
            f"safety sets are named {sorted(sets)}, constraints {sorted(constraints)}",
            remedy="give each safety set a constraint of the same name, or one constraint for all",
        )
    for name in sets:
        if not name.replace("_", "").replace("-", "").isalnum():
            raise ConfigError(f"safety set name {name!r}", remedy="use letters, digits, '-' and '_'")
    return {name: (one, constraints[name]) for name, one in sets.items()}


def _is_roles(value: Any) -> bool:
    """Whether a mapping is one ready-made split (a DatasetDict with our role names) rather than several sets."""
    return isinstance(value, Mapping) and "constraint" in value and set(value) <= set(ROLES)


def as_split(value: Any, *, name: str, fractions: tuple[float, float, float], seed: int) -> Split:
    """A split from whatever the user gave: a `Split`, a mapping of roles, or what `as_examples` takes."""
    if isinstance(value, Split):
        return value
    if _is_roles(value):
        return splits.split_from_roles(*(as_examples(value.get(role, ()), f"{name}/{role}") for role in ROLES))
    return splits.split_examples(as_examples(value, name), fractions=fractions, seed=seed)


def splits_of(
    dataset: Any, constraint: Any, args: Any, task_prompts: Sequence[str] | None
) -> dict[str, tuple[Split, ChanceConstraint]]:
    """Every safety set with its constraint, split and proven to share nothing with the task or another set.

    `dataset` is as `SafeSFTTrainer` takes it; `task_prompts` None where the task data cannot be searched.
    """
    found = {}
    for name, (value, c) in ({} if dataset is None else named(dataset, constraint)).items():
        split = as_split(value, name=name, fractions=args.safety_fractions, seed=args.stream_seed)
        splits.require_disjoint(split)
        if split.certify and task_prompts is None:
            raise UnsupportedError(
                "the task data is a stream or already tokenised, so it cannot be searched for certify prompts",
                remedy="pass rows with text, or keep no certify split: safety_fractions=(0.75, 0.25, 0.0)",
            )
        if split.certify and task_prompts is not None:
            split = splits.move_leaks(split, task_prompts) if args.on_leak == "move" else split
            splits.require_unseen(split.certify, task_prompts)
        found[name] = (split, c)
    splits.require_apart({name: split for name, (split, _) in found.items()})
    return found


def as_examples(value: Any, name: str) -> list[Example]:
    """Examples from whatever the user gave: a file or hub id, examples, rows or a data set."""
    if isinstance(value, str | Path):
        return read_examples(str(value))
    if isinstance(value, Sequence) and all(isinstance(item, Example) for item in value):
        return list(value)
    if not hasattr(value, "__len__"):
        raise UnsupportedError(
            f"data set {name!r} is a stream ({type(value).__name__}): it cannot be split and measured once",
            remedy="materialise it, for example with Dataset.from_list(list(stream))",
        )
    return examples_from_rows(value, name=name)


def task_prompts(dataset: Any, formatting: Callable[[Any], str] | None, text_field: str) -> list[str] | None:
    """One or several strings per row: where a certify prompt could be.

    Of a conversation these are all turns that are not the assistant's, joined, and each of them alone (as
    `searchable_texts` does for examples); otherwise the prompt, or the whole text where there is no prompt.

    Lenient where the safety set is strict: a task row may hold anything that TRL accepts (tools, a last turn that is
    not the assistant's), and only its prompt's text matters here. None when rows cannot be read as text: a stream, or
    tokens.
    """
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "column_names"):
        return None
    if formatting is not None:
        return [str(formatting(row)) for row in dataset]
    known = ("prompt", *CONVERSATIONS, text_field, *PREFERENCE)
    column = next((name for name in known if name in dataset.column_names), None)
    if column is None:
        return None
    found = [text for value in dataset[column] for text in _texts(value)]
    replies = ("completion", *PREFERENCE) if column in ("prompt", *PREFERENCE) else ()
    for reply in (name for name in replies if name in dataset.column_names and name != column):
        found += [turn for value in dataset[reply] for turn in _asked(value)]
    return found


def trained_texts(given: Mapping[str, Any], args: Any, harmful: Any) -> list[str] | None:
    """What a run trains on, as `task_prompts` gives it; with harmful pairs, which some defenses train against."""
    found = task_prompts(
        given.get("train_dataset"), given.get("formatting_func"), getattr(args, "dataset_text_field", "text")
    )
    if found is None or harmful is None:
        return found
    return found + [text for example in as_examples(harmful, "harmful") for text in searchable_texts(example)]


def _texts(value: Any) -> list[str]:
    """A string as it is; of a conversation, what was not said by the assistant, one turn a line, and turn by turn."""
    if not isinstance(value, list | tuple):
        return [str(value)]
    asked = _asked(value)
    return list(dict.fromkeys(["\n".join(asked), *asked]))


def _asked(value: Any) -> list[str]:
    """The turns of a conversation that are not the assistant's; none of a string."""
    turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list | tuple) else []
    asked = [turn for turn in turns if turn.get("role", turn.get("from")) not in ("assistant", "gpt")]
    return [str(turn.get("content") or turn.get("value") or "") for turn in asked]


def require_task_tokenizer(args: Any, given: Mapping[str, Any]) -> None:
    """Refuse a tokenizer that cannot encode the task data, in our words and before TRL meets it."""
    tokenizer = given.get("processing_class")
    if tokenizer is not None and not any(getattr(args, name, None) for name in TOKENIZER_CHANGES):
        first = next(iter(given["train_dataset"]))
        chat = "messages" in first or "conversations" in first or isinstance(first.get("prompt"), list)
        require_usable_tokenizer(tokenizer, needs_chat=chat)


def encode_set(
    name: str, constraint: ChanceConstraint, split: Split, tokenizer: Any, *, max_length: int | None
) -> SafetySet:
    """Tokenise the constraint and monitor splits."""
    if not split.constraint:
        raise DataError(f"safety set {name!r} has no constraint example", remedy="add safety examples")
    chat = any(example.kind == "chat" for example in (*split.constraint, *split.monitor))
    require_usable_tokenizer(tokenizer, needs_chat=chat)
    steering, looking = (
        encode_all(part, tokenizer, max_length=max_length, role="safety") for part in (split.constraint, split.monitor)
    )
    truncated = steering.n_truncated + looking.n_truncated
    return SafetySet(name, constraint, split, steering.examples, looking.examples, truncated)


def measure_all(trainer: Any) -> None:
    """Measure every safety set of a run at theta_0; a defense that promises the constraints must be able to start."""
    defense, sets = trainer.defense, list(trainer.safety.values())
    for one in sets if defense.constrains else ():
        feasibility.require_feasible_start(one.constraint, getattr(defense.config, "reserve", 0.0))
    by_kl = [one for one in sets if one.constraint.unit in KL_UNITS]
    trainer.run.theta_0.keep_states([example for one in by_kl for example in one.all_encoded])
    for one in sets:
        if defense.constrains:
            feasibility.warn_of_free_degradation(one.constraint, one.name)
            if (note := feasibility.likelihood_note(one.constraint)) is not None:
                announce(f"{one.name}: {note}")
        _measure(one, trainer)
    if sets and not defense.constrains:
        announce(f"defense {defense.name!r} does not enforce these limits: the run is only measured by them")


def _measure(safety: SafetySet, trainer: Any) -> None:
    """Fill in reference losses and noise floor at theta_0, and hold the constraint's refusals against them."""
    forward: Forward = trainer.run.forward
    constraint, model, args = safety.constraint, forward.model, trainer.args
    with deterministic(model), forward.precision():
        require_understood_head(model, forward.batch(safety.constraint_set[:1]))
    examples, cut = safety.all_encoded, len(safety.constraint_set)
    own = {**trainer._theta_0, "data": data_sha256(examples), "first_k": constraint.first_k}
    folder = safety.folder(trainer.run_dir)
    require_same(safety.split.record, folder)
    if rank() == 0:
        logger.info("measuring the model before training on %d examples of %s", len(examples), safety.name)
    safety.reference = reference_table(
        forward, examples, own, stem=folder / "reference", cache=cache_folder(args.reference_cache),
        roles=(cut, len(examples) - cut),
    )  # fmt: skip
    if rank() == 0:
        save_record(safety.split.record, folder)
    barrier()
    losses = safety.reference.in_unit(constraint)
    safety.constraint_reference, safety.monitor_reference = losses[:cut], losses[cut:]
    # In training's batch size: kernels differ between shapes, and with them the last bits.
    training, reference = forward.resized(trainer.run.side_rows), safety.constraint_reference
    # A KL grows with the square of a nudge, a likelihood with the nudge itself.
    with trainer.run.theta_0.nudged() if constraint.unit in KL_UNITS else nullcontext():
        safety.noise_floor = noise_floor(training, safety.steering_rows, reference, constraint, args.stream_seed)
    announce(f"{safety.name}: {constraint.describe()}")
    announce(
        f"{safety.name}: {cut} constraint, {len(safety.monitor_set)} monitor, {len(safety.split.certify)} certify "
        f"examples; noise floor at theta_0 {safety.noise_floor:.2g} (unit {constraint.unit}, 99% quantile of |D|)"
    )
    if cut_short := safety.n_truncated:
        announce(f"{safety.name}: {cut_short} examples are cut at max_length; their degradation covers the kept part")
    feasibility.require_tau_above_noise(constraint, safety.noise_floor)
    if rank() == 0:
        feasibility.warn_of_noise(constraint, safety.noise_floor, safety.name)


def announce(text: str) -> None:
    """Say what the constraint is and how noisy it is: to the log where one listens, otherwise to stderr."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(text)
    elif rank() == 0:
        print(f"holdfast: {text}", file=sys.stderr)
