"""The data of a run beside the task's: safety sets, harmful pairs, and which rows of them a step uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.constraint.draws import Batch, ImportanceDraws
from holdfast.core.errors import ConfigError, DataError
from holdfast.core.hashing import sha256_json
from holdfast.core.library_types import Tokenizer
from holdfast.core.ranks import from_first, rank, world
from holdfast.core.seeding import generator
from holdfast.data import streams
from holdfast.data.encode import Encoded, collate, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example
from holdfast.training.fingerprint import Unaligned, unaligned_sha256
from holdfast.training.hooks import Defense, Inputs, Items
from holdfast.training.probe import looked_at
from holdfast.training.row_weights import count_items
from holdfast.training.safety import SafetySet, as_examples
from holdfast.training.side_pass import scored_tokens

if TYPE_CHECKING:
    from datasets import Dataset

    from holdfast.training.trainer import SafeTrainer

logger = logging.getLogger(__name__)

STAGES = ("align", "finetune")
NEEDS = {
    "safety": ("a safety set", "safety_dataset=..., or defense='sft'"),
    "harmful": ("harmful pairs", "harmful_dataset=... (prompts with the replies to be unlearned)"),
    "unaligned": (
        "the weights before alignment",
        "unaligned=... (the base model, or the alignment adapter that was merged into the model)",
    ),
}


def require_stage(defense: Defense, stage: str) -> None:
    """Refuse a defense in a stage in which it does nothing."""
    if stage not in STAGES:
        raise ConfigError(f"stage is {stage!r}", remedy=f"use {' or '.join(STAGES)}")
    acts = {"finetune" if s == "posthoc" else s for s in defense.stages}  # post-hoc follows fine-tuning in one run
    if stage not in acts:
        raise ConfigError(
            f"defense {defense.name!r} acts in the {' and '.join(sorted(acts))} stage, this is the {stage} stage",
            remedy=f"set stage: {sorted(acts)[0]}, or use another defense (holdfast ls defenses)",
        )


def require_side_data(defense: Defense, stage: str, given: Mapping[str, object]) -> None:
    """Refuse a defense whose side data are missing; `given`: need -> what the user passed for it, or None."""
    for need in sorted(defense.needed(stage)):
        if given.get(need) is None:
            what, remedy = NEEDS[need]
            raise ConfigError(f"defense {defense.name!r} needs {what}", remedy=f"pass {remedy}")


class SideData:
    """Safety sets and harmful pairs, encoded; draws are pure functions of seed, step and, by importance, a table."""

    def __init__(
        self, trainer: SafeTrainer, safety: Mapping[str, SafetySet], harmful: object, unaligned: Unaligned | None
    ) -> None:
        self._trainer = trainer
        self.safety = dict(safety)
        self.unaligned = unaligned  # the weights before alignment: see `holdfast.models.alignment_shift`
        self._streams = {name: self._stream(one) for name, one in self.safety.items()}
        self._chosen: dict[str, tuple[int, Batch]] = {}  # the step for which a batch was chosen, and the batch
        self.harmful_examples: list[Example] = []  # harmful pairs, for defenses that need them
        self.harmful: list[Encoded] = []  # the same, tokenised
        if harmful is not None and "harmful" in trainer.defense.needed(trainer.args.stage):
            self.harmful_examples = as_examples(harmful, "harmful")
            if not self.harmful_examples:
                raise DataError("the harmful pairs are empty", remedy="give at least one")
            require_usable_tokenizer(self.tokenizer, needs_chat=any(e.kind == "chat" for e in self.harmful_examples))
            self.harmful = self.encode(self.harmful_examples)
        self._unaligned_sha256: str | None = None

    def _stream(self, safety: SafetySet) -> streams.StepStream:
        trainer, size = self._trainer, self._trainer.args.safety_batch_size or self.task_batch
        _require_shares(size, "safety_batch_size {} cannot be shared equally by {} processes")
        estimator = getattr(trainer.defense.config, "estimator", None)
        if size * safety.constraint.alpha < 1 and estimator == "batch":
            logger.warning(
                "%s: %d examples per step with alpha=%g: a single violator exceeds the budget of its batch; "
                "estimator ema or table averages over steps",
                safety.name, size, safety.constraint.alpha,
            )  # fmt: skip
        return streams.StepStream(len(safety.constraint_set), size, trainer.args.stream_seed, safety.name)

    def identify_unaligned(self) -> None:
        """Note which weights before alignment are used: now, since a folder may change while training runs."""
        unaligned, needed = self.unaligned, self._trainer.defense.needed(self._trainer.args.stage)
        if unaligned is not None and "unaligned" in needed:
            self._unaligned_sha256 = from_first(lambda: unaligned_sha256(unaligned))

    def fingerprint(self) -> dict[str, str]:
        """What a resumed run must share: the side data. Empty for defenses without any."""
        harmful = sha256_json([[list(e.input_ids), list(e.labels)] for e in self.harmful]) if self.harmful else None
        found = {"harmful": harmful, "unaligned": self._unaligned_sha256}
        return {name: digest for name, digest in found.items() if digest is not None}

    @property
    def task(self) -> Dataset:
        """The task's rows, tokenised, as the trainer has them."""
        return self._trainer.train_dataset

    @property
    def tokenizer(self) -> Tokenizer:
        return self._trainer.processing_class

    @property
    def safe(self) -> list[Encoded]:
        """The constraint examples of all safety sets: the safe pairs a defense may train on. The rest is held out."""
        return [example for one in self.safety.values() for example in one.constraint_set]

    def encode(self, examples: Sequence[Example]) -> list[Encoded]:
        """Tokenise examples as the safety sets are."""
        return encode_all(examples, self.tokenizer, max_length=self._trainer.args.max_length, role="safety").examples

    @property
    def task_batch(self) -> int:
        """Rows of a whole step, over all processes and micro-batches."""
        args = self._trainer.args
        return int(args.per_device_train_batch_size * world() * args.gradient_accumulation_steps)

    def safety_batch(self, name: str) -> list[int]:
        """Positions, in the constraint split, of this step's global safety batch; the same for any number of ranks."""
        step = int(self._trainer.state.global_step)
        chosen_at, batch = self._chosen.get(name, (-1, None))
        return self._streams[name].indices(step) if batch is None or chosen_at != step else batch.positions

    def safety_weights(self, name: str) -> Tensor | None:
        """What the terms of those rows are multiplied by; None where they were drawn alike."""
        chosen_at, batch = self._chosen.get(name, (-1, None))
        return None if batch is None or chosen_at != int(self._trainer.state.global_step) else batch.weights

    def look(self, name: str, rows: int, draws: ImportanceDraws | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Positions of `rows` rows of a set, drawn for this step, their D_i as the parameters are now, and weights.

        By what was seen of the rows where `draws` are given, else without replacement; then there are no weights.
        """
        stream, step, weights = self._streams[name], int(self._trainer.state.global_step), None
        if draws is None:
            places = generator(stream.seed, name, "look", step).permutation(stream.size)[:rows].tolist()
        else:
            first = float(generator(stream.seed, name, "looks").random())
            places, weights = draws.batch(rows, step, first)
        unique = sorted(set(places))  # by importance a row may come up more than once
        at = torch.tensor([unique.index(place) for place in places])
        return torch.tensor(places), looked_at(self._trainer.run, name, unique)[at], weights

    def choose(self, name: str, draws: ImportanceDraws) -> None:
        """Draw this step's safety batch by what was seen of its rows; by seed and step apart from that."""
        stream, step = self._streams[name], int(self._trainer.state.global_step)
        first = float(generator(stream.seed, name, "importance").random())
        self._chosen[name] = step, draws.batch(stream.batch_size, step, first)

    def draw(self, rows: Sequence[Encoded], name: str, size: int | None = None) -> list[int]:
        """Positions of this step's global batch of side rows, of `size` or as many as the safety batch has.

        Without replacement inside a pass, a new order for every pass.
        """
        args = self._trainer.args
        size = size or args.safety_batch_size or self.task_batch
        _require_shares(size, f"a batch of {{}} {name} rows cannot be shared equally by {{}} processes")
        return streams.StepStream(len(rows), size, args.stream_seed, name).indices(int(self._trainer.state.global_step))

    def own_share(self, rows: Sequence[Encoded]) -> tuple[Inputs, Items]:
        """Of a step's `task_batch` rows this process's part for this micro-batch, and what the loss is divided by."""
        args, progress = self._trainer.args, self._trainer.run.progress
        each = args.per_device_train_batch_size
        needed = each * progress.micro_batches * world()
        if len(rows) < needed:
            raise ConfigError(f"{len(rows)} rows for a step of {needed}", remedy="draw task_batch rows")
        used = rows[:needed]
        mine = streams.shard(used, rank(), world())
        batch = collate(mine[progress.micro * each : (progress.micro + 1) * each], self.tokenizer.pad_token_id)
        counted = used if args.average_tokens_across_devices else mine
        items = torch.tensor(len(counted) if self._trainer.by_rows else scored_tokens(counted), device=args.device)
        return {name: tensor.to(args.device) for name, tensor in batch.items()}, items

    def token_share(self, inputs: Inputs, items: Items) -> float:
        """What this micro-batch's mean loss is multiplied by to become its part of the step's: over tokens, or rows."""
        if items is None:
            return 1.0  # the Trainer divides by the number of micro-batches
        here = count_items(inputs["labels"], by_rows=self._trainer.by_rows)
        processes = world() if self._trainer.args.average_tokens_across_devices else 1
        return here * processes / max(int(items), 1)


def _require_shares(size: int, words: str) -> None:
    if size % world():
        raise ConfigError(words.format(size, world()), remedy=f"use a multiple of {world()}")
