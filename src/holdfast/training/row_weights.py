"""The task loss as a mean over rows instead of over tokens: `train: {loss_weights: rows}`.

    tokens (TRL's)   L = 1/N sum_t NLL_t                             N scored tokens of the whole step
    rows             L = 1/R sum_r 1/n_r sum_{t of row r} NLL_t      R rows with a scored token, n_r of them in row r

A long completion counts no more than a short one. R takes the place of N wherever TRL and the Trainer divide by it:
it is counted over all micro-batches and processes of a step, so that accumulation and data parallelism are as exact as
for tokens. Evaluation keeps the mean over tokens, by which runs are compared.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast.core.errors import UnsupportedError
from holdfast.data.encode import IGNORE
from holdfast.training.hooks import Inputs, Items

if TYPE_CHECKING:
    from holdfast.training.trainer import SafeTrainer

FIRST_TRL = (1, 15)  # the first whose trainer hands over the log-probability of every token


def count_items(labels: Tensor, *, by_rows: bool) -> int:
    """Scored tokens of a padded batch, or its rows that have one."""
    scored = labels[:, 1:] != IGNORE
    return int((scored.any(1) if by_rows else scored).sum())


def one_a_row(batch: Inputs) -> Inputs:
    """Labels of two positions, the second scored in every row that has a scored token: to be counted by the Trainer."""
    scored = (batch["labels"][:, 1:] != IGNORE).any(1)
    first = torch.full_like(scored, IGNORE, dtype=torch.long)
    return {"labels": torch.stack([first, torch.where(scored, 1, IGNORE)], dim=1)}


class RowMeans:
    """A model whose token log-probabilities are divided by the scored tokens of their row.

    Where the step's count is not known (`items` None), TRL divides by the tokens of the micro-batch, which this undoes:
    the loss is then the mean over its rows.
    """

    def __init__(self, model: nn.Module, items: Items) -> None:
        self._model, self._items = model, items

    def __call__(self, **inputs: object) -> Any:
        output = self._model(**inputs)
        counts = output.label_mask.sum(1, keepdim=True)
        weights = 1.0 / counts.clamp(min=1)
        if self._items is None:
            weights = weights * counts.sum() / (counts > 0).sum().clamp(min=1)
        output.log_probs = output.log_probs * weights
        return output


def require_row_weights(trainer: SafeTrainer) -> None:
    """Refuse `loss_weights: rows` where rows cannot be told apart, or where the loss is another one."""
    args, defense = trainer.args, trainer.defense
    if not trainer.by_rows:
        return
    why = None
    if args.packing or args.padding_free:
        why = "packing and padding_free join rows"
    elif trainer.run.other_loss() is not None:
        why = f"the loss is another one ({trainer.run.other_loss()})"
    elif not defense.by_rows(args.stage):
        why = f"defense {defense.name!r} weighs the tokens of its loss itself"
    elif tuple(map(int, version("trl").split(".")[:2])) < FIRST_TRL:
        why = f"TRL {version('trl')} does not hand over the losses of single tokens, as 1.15 is the first to do"
    if why is not None:
        raise UnsupportedError(f"loss_weights: rows is not possible: {why}", remedy="set loss_weights: tokens")
