"""Training a judge: a multi-label head and LoRA (or all weights) of any decoder, on pairs that people labelled.

Loss of a pair with logits z over K categories, divided by K throughout: its categories,
sum_c log(1 + exp(-(2 y_c - 1) z_c)), plus `harm_weight` times its harm, -log h for an unsafe and -log(1 - h) for a safe
pair, with h = max sigmoid(z_c) over the categories it has (over all where it has none or they are unknown). A pair
known only as unsafe counts with its harm alone. The second term, off unless asked for, is there because h is what a
judge is read by: by categories alone, a pair that may belong to any of three has a low maximum, however surely it is
unsafe.
The epoch with the best AUROC on the validation prompts is kept, its temperature is fitted there, and the figures are
computed once, on the test split, with the weights as they are saved (rounded to bfloat16).

Data: BeaverTails pairs, parted by normalised prompt. Test: the complete test split. Training and validation: rows of
the train split whose prompt is not in the test split, with all rows of one prompt on one side.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from holdfast.core.errors import ConfigError, DataError, NumericalError, ResourceError, UnsupportedError
from holdfast.core.hashing import sha256_json
from holdfast.core.library_types import Tokenizer
from holdfast.core.seeding import derive_seed, generator, sample
from holdfast.data.examples import normalise
from holdfast.judging.judges.classifier import Opened, encode, score
from holdfast.models.classifier import class_logits, right_padded
from holdfast.models.library_errors import out_of_memory
from holdfast_lab.data.catalogue import CATEGORIES, load
from holdfast_lab.evaluation.judge_figures import auroc

Progress = Callable[[dict[str, Any]], None]
LEARNING_RATES = {"lora": 5e-4, "full": 5e-5}
WEIGHT_DECAY, CLIP, WARM_UP = 0.01, 1.0, 0.1
LOSS_REPORTS = 10
_CHUNK = 50  # batches that are drawn together and sorted by length


@dataclass(frozen=True)
class JudgeSettings:
    base: str = "embedded"  # hub id, folder or `embedded`
    base_revision: str | None = None  # commit, tag or branch of a hub id
    full: bool = False  # train every weight instead of LoRA and the head
    epochs: int = 3
    learning_rate: float | None = None  # the highest; None for 5e-4 with LoRA, 5e-5 in full
    batch_size: int = 32
    rank: int = 16  # of LoRA, with alpha = 2 rank
    dropout: float = 0.05
    max_length: int = 1024  # tokens of a conversation, in training and afterwards in judging
    harm_weight: float = 0.0  # of the pair's harm beside its categories; above 0 it was never measured on real data
    validation: float = 0.1  # share of the prompts that choose the epoch and the temperature
    seed: int = 0
    limit: int | None = None
    test_limit: int | None = None
    # of the frozen weights under LoRA; trained weights are fp32, with bf16 autocast on a GPU
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        least = {"epochs": 1, "batch_size": 1, "rank": 1, "max_length": 16, "seed": 0, "limit": 2, "test_limit": 2}
        rules = {
            **{name: (getattr(self, name) is None or getattr(self, name) >= n, f"at least {n}")
               for name, n in least.items()},
            "learning_rate": (0 < self.rate < 1, "a number between 0 and 1"),
            "validation": (0 < self.validation < 1, "a share between 0 and 1"),
            "harm_weight": (0 <= self.harm_weight < math.inf, "a number of at least 0"),
            "dropout": (0 <= self.dropout < 1, "at least 0 and below 1"),
            "dtype": (self.dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
        }  # fmt: skip
        for name, (fits, expected) in rules.items():
            if not fits:
                what = f"judge training: {name} = {getattr(self, name)}, expected {expected}"
                raise ConfigError(what, remedy=f"change --{name.replace('_', '-')}")
        if self.full and self.dtype == "bfloat16":
            what = "judge training in full with bfloat16 weights: small updates would be rounded away"
            raise UnsupportedError(what, remedy="leave dtype at float32, or train with LoRA")

    @property
    def kind(self) -> str:
        return "full" if self.full else "lora"

    @property
    def rate(self) -> float:
        return LEARNING_RATES[self.kind] if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True)
class LabelledPair:
    """A prompt and a reply that people called safe or unsafe.

    `categories` is None where an unsafe pair's categories are unknown; a safe pair has none of them.
    """

    prompt: str = field(repr=False)
    reply: str = field(repr=False)
    unsafe: bool
    categories: Mapping[str, bool] | None


@dataclass(frozen=True)
class JudgeData:
    """The three parts, and where they come from as JSON."""

    train: tuple[LabelledPair, ...]
    validation: tuple[LabelledPair, ...]
    test: tuple[LabelledPair, ...]
    record: dict[str, Any]


def judge_data(
    *, seed: int, validation: float, limit: int | None = None, test_limit: int | None = None, folder: Path | None = None
) -> JudgeData:
    """Read and part the pairs; limits are drawn at random by the seed, None takes all.

    `validation` is the share of the prompts that choose the epoch and the temperature.
    """
    sources = {split: load("beavertails", split, folder=folder) for split in ("train", "test")}
    found, held_out = ([_pair(row) for row in source.rows] for source in sources.values())
    closed = {normalise(pair.prompt) for pair in held_out}
    usable = [pair for pair in found if normalise(pair.prompt) not in closed]
    train, choice = _parted(sample(usable, limit, seed, "judge limit"), validation, seed)
    test = sample(held_out, test_limit, seed, "judge test limit")
    parts = {"train": train, "validation": choice, "test": test}
    for name, pairs in parts.items():
        unsafe = sum(pair.unsafe for pair in pairs)
        if not 0 < unsafe < len(pairs):
            raise DataError(
                f"judge data, {name} part: {unsafe} unsafe and {len(pairs) - unsafe} safe pairs, expected some of each",
                remedy="raise the limit, or give a data folder with more of BeaverTails",
            )
    assert not closed & {normalise(p.prompt) for p in (*train, *choice)}, "a training prompt is in the test split"
    record = {
        "sources": {split: source.describe() for split, source in sources.items()},
        "shared_with_test": len(found) - len(usable), "disjoint_from_test": len(usable),
        "test_complete": len(test) == len(held_out),
        "parts": {name: _described(pairs) for name, pairs in parts.items()},
    }  # fmt: skip
    return JudgeData(tuple(train), tuple(choice), tuple(test), record)


def _pair(row: Mapping[str, Any]) -> LabelledPair:
    unsafe = not row["is_safe"]
    named = (row["categories"] or ()) if unsafe else ()
    known = dict.fromkeys(CATEGORIES, False) | dict.fromkeys(named, True)
    return LabelledPair(row["prompt"], row["response"], unsafe, None if unsafe and not named else known)


def _parted(pairs: Sequence[LabelledPair], share: float, seed: int) -> tuple[list[LabelledPair], list[LabelledPair]]:
    """Training and validation pairs: round(share * prompts) of the prompts, at least one, are for validation."""
    prompts = sorted({normalise(pair.prompt) for pair in pairs})
    order = generator(seed, "judge validation").permutation(len(prompts)).tolist()
    held = {prompts[place] for place in order[: max(1, round(share * len(prompts)))]}
    train, validation = ([p for p in pairs if (normalise(p.prompt) in held) == wanted] for wanted in (False, True))
    return train, validation


def _described(pairs: Sequence[LabelledPair]) -> dict[str, object]:
    rows = sorted(sha256_json([pair.prompt, pair.reply, pair.unsafe]) for pair in pairs)
    return {
        "rows": len(pairs), "unsafe": sum(pair.unsafe for pair in pairs),
        "flag_only": sum(pair.categories is None for pair in pairs),
        "prompts": len({normalise(pair.prompt) for pair in pairs}), "sha256": sha256_json(rows),
    }  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """Encoded conversations with what the loss needs: y (rows x K), and which rows are known only as unsafe."""

    rows: list[list[int]]
    targets: Tensor
    flag_only: Tensor
    unsafe: list[bool]
    truncated: int


def prepare(tokenizer: Tokenizer, pairs: Sequence[LabelledPair], names: Sequence[str], max_length: int) -> Batches:
    texts = encode(tokenizer, [pair.prompt for pair in pairs], [pair.reply for pair in pairs], max_length=max_length)
    targets = torch.tensor([[float((pair.categories or {}).get(name, False)) for name in names] for pair in pairs])
    flag_only = torch.tensor([pair.categories is None for pair in pairs])
    unsafe = [pair.unsafe for pair in pairs]
    return Batches([text.ids for text in texts], targets, flag_only, unsafe, sum(text.truncated for text in texts))


def judge_loss(logits: Tensor, targets: Tensor, flag_only: Tensor, harm_weight: float) -> Tensor:
    """Mean over rows of the loss above; `targets` are zero where the categories are unknown."""
    by_category = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    named = targets > 0
    open_to_all = ~named.any(dim=1, keepdim=True)
    worst = logits.masked_fill(~(named | open_to_all), -math.inf).amax(dim=1)
    unsafe = flag_only | ~open_to_all[:, 0]
    harm = functional.softplus(torch.where(unsafe, -worst, worst))
    return torch.where(flag_only, harm, by_category + harm_weight * harm).mean() / logits.shape[1]


def rate_factor(step: int, total: int) -> float:
    """Linear warm-up over a tenth of the steps, then linear decay to zero; `step` counts from 0."""
    warm = max(1, math.ceil(WARM_UP * total))
    return (step + 1) / warm if step < warm else (total - step) / max(1, total - warm)


def epoch_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Every row once: drawn at random, like lengths together within 50 batches, batches in random order."""
    draw = generator(seed, "judge order", epoch)
    order = draw.permutation(len(lengths)).tolist()
    found = []
    for start in range(0, len(order), _CHUNK * batch_size):
        chunk = sorted(order[start : start + _CHUNK * batch_size], key=lambda i: (lengths[i], i))
        found += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    return [found[place] for place in draw.permutation(len(found)).tolist()]


def fit(
    opened: Opened, train: Batches, validation: Batches, settings: JudgeSettings, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Train in place and leave the best epoch's weights; returns one entry per epoch."""
    weights = [p for p in opened.model.parameters() if p.requires_grad]
    lengths = [len(row) for row in train.rows]
    total = settings.epochs * math.ceil(len(lengths) / settings.batch_size)
    optimizer = torch.optim.AdamW(
        weights, lr=settings.rate, weight_decay=WEIGHT_DECAY, fused=opened.model.device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(min(step, total - 1), total))
    meter = _Meter(total, progress)
    history: list[dict[str, Any]] = []
    best, kept = -math.inf, weights
    # Dropout by the seed alone; the caller's generators are left as they were.
    with torch.random.fork_rng(devices=[opened.model.device] if opened.model.device.type == "cuda" else []):
        torch.manual_seed(derive_seed(settings.seed, "judge dropout"))
        for epoch in range(settings.epochs):
            opened.model.train()
            for chosen in epoch_batches(lengths, settings.batch_size, settings.seed, epoch):
                loss = _step(opened, train, chosen, weights, settings.harm_weight)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
                meter.add(loss)
            opened.model.eval()
            quality = auroc(finite_logits(opened, validation).max(axis=1), validation.unsafe)
            assert quality is not None, "the validation part has both labels"
            history.append({"epoch": epoch + 1, "train_loss": _taken_mean(meter.epoch), "validation_auroc": quality})
            if quality > best:
                best, kept = quality, [p.detach().clone() for p in weights]
    assert best >= 0, "an epoch was kept"
    with torch.no_grad():
        for parameter, value in zip(weights, kept, strict=True):
            # Rounded as it will be saved, so that the figures are those of the judge that is loaded later.
            parameter.copy_(value.to(torch.bfloat16))
    return history


def finite_logits(opened: Opened, part: Batches) -> NDArray[np.floating]:
    """z of every row and category."""
    logits = score(opened, part.rows)
    if not np.isfinite(logits).all():
        raise NumericalError("training the judge: logits are not finite", remedy="lower --learning-rate")
    return logits


def _step(opened: Opened, train: Batches, chosen: list[int], weights: list[Tensor], harm_weight: float) -> Tensor:
    """Gradients of one batch, clipped; nothing here waits for the GPU."""
    device = opened.model.device
    ids, mask = right_padded([train.rows[i] for i in chosen])
    parts = [ids, mask, train.targets[chosen], train.flag_only[chosen]]
    if device.type == "cuda":
        parts = [part.pin_memory().to(device, non_blocking=True) for part in parts]
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=opened.autocast):
            logits = class_logits(opened.model, parts[0], parts[1])
        loss = judge_loss(logits, parts[2], parts[3], harm_weight)
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ResourceError(
            f"training the judge: a batch of {len(chosen)} texts of up to {ids.shape[1]} tokens does not fit in memory",
            remedy="lower --batch-size or --max-length",
        ) from error
    torch.nn.utils.clip_grad_norm_(weights, CLIP)
    return loss.detach()


class _Meter:
    """Keeps losses on the device and reads them a few times a run: each reading waits for the GPU."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._step = total, progress or (lambda row: None), 0
        self._recent, self.epoch = list[Tensor](), list[Tensor]()
        self._progress({"stage": "judge", "total_steps": total, "step": 0})

    def add(self, loss: Tensor) -> None:
        self._step += 1
        self._recent.append(loss)
        self.epoch.append(loss)
        row: dict[str, Any] = {"step": self._step}
        if self._step % max(1, self._total // LOSS_REPORTS) == 0 or self._step == self._total:
            row["loss"] = _taken_mean(self._recent)
        self._progress(row)


def _taken_mean(losses: list[Tensor]) -> float:
    loss = float(torch.stack(losses).mean())
    losses.clear()
    if not math.isfinite(loss):
        raise NumericalError("training the judge: the loss is not finite", remedy="lower --learning-rate")
    return loss
