"""The tiny language model by hand: one row at a time, plain autograd, nothing of the trainer's but its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor

import holdfast as hf
from tests import tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import weights

SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 4, "logging_strategy": "no"}
TASK, SAFETY = 4, 6
"""Rows of both sets, all of which every step uses, so that their order does not matter."""


def whole_batch_trainer(
    folder: Path, defense: Any, constraint: hf.ChanceConstraint, *, accumulation: int = 1, **options: Any
) -> hf.SafeSFTTrainer:
    """A trainer whose every step sees all task rows and all safety rows."""
    given = {
        "train_dataset": tiny.dataset(TASK, seed=1, start="w1"),
        "safety_dataset": {"constraint": tiny.dataset(SAFETY, seed=2)},
        "constraint": constraint,
        "defense": defense,
    }
    layout = {"per_device_train_batch_size": TASK // accumulation, "gradient_accumulation_steps": accumulation}
    settings = {**SGD, **layout, "safety_batch_size": SAFETY, "safety_micro_batch_size": 4, **options}
    return build(folder, given=given, **settings)


class PlainLM:
    """The same model and rows as a trainer's, from its first weights."""

    def __init__(self, trainer: hf.SafeSFTTrainer) -> None:
        self.model = get_peft_model(tiny.model(), tiny.lora()).train()
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        start = weights(trainer)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if p.requires_grad:
                    p.copy_(start[name])
        self.task = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
        self.safety = [(row.input_ids, row.labels) for row in trainer.safety["safety"].constraint_set]
        with torch.no_grad():
            self.start = [self._mean_nll(row) for row in self.safety]

    def _nll(self, row: tuple[Sequence[int], Sequence[int]]) -> list[Tensor]:
        ids, labels = row
        logits = self.model(input_ids=torch.tensor([list(ids)])).logits[0]
        return [
            -torch.log_softmax(logits[i - 1], -1)[label] for i, label in enumerate(labels) if i > 0 and label != -100
        ]

    def _mean_nll(self, row: tuple[Sequence[int], Sequence[int]]) -> Tensor:
        return torch.stack(self._nll(row)).mean()

    def task_loss(self) -> Tensor:
        """Mean over all completion tokens of all task rows."""
        return torch.stack([nll for row in self.task for nll in self._nll(row)]).mean()

    def degradations(self) -> list[Tensor]:
        """D_i of every safety row, in `nll_token`."""
        return [self._mean_nll(row) - start for row, start in zip(self.safety, self.start, strict=True)]

    def gradient(self, loss: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """A loss and its gradient, as one long vector."""
        value = loss()
        found = torch.autograd.grad(value, self.params, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, found, strict=True)]
        return float(value.detach()), torch.cat([g.reshape(-1) for g in flat])

    def move(self, step: Tensor) -> None:
        """theta <- theta + step."""
        with torch.no_grad():
            for p, piece in zip(self.params, torch.split(step, [p.numel() for p in self.params]), strict=True):
                p.add_(piece.view_as(p))

    def theta(self) -> Tensor:
        """All trainable weights as one vector."""
        return torch.cat([p.detach().reshape(-1) for p in self.params])


def theta(trainer: hf.SafeSFTTrainer) -> Tensor:
    """The same of a trainer."""
    return torch.cat([p.reshape(-1) for p in weights(trainer).values()])
