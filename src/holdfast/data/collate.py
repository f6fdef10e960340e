"""Encoded examples to a right-padded batch of tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from holdfast.data.encode import IGNORE, Encoded


def collate(batch: Sequence[Encoded], pad_token_id: int, pad_to_multiple_of: int | None = None) -> dict[str, Tensor]:
    """Pad on the right to the longest example, rounded up to `pad_to_multiple_of`.

    The mask and labels come from lengths, not from comparing ids with the pad id, so a real EOS keeps its
    label and its attention when it doubles as the pad token.

    Returns:
        `input_ids`, `attention_mask` and `labels` (-100 on padding), each int64 of shape (batch, length).
    """
    multiple = pad_to_multiple_of or 1
    width = -(-max(len(item.input_ids) for item in batch) // multiple) * multiple
    input_ids = np.full((len(batch), width), pad_token_id)
    attention_mask = np.zeros((len(batch), width), dtype=np.int64)
    labels = np.full((len(batch), width), IGNORE)
    for row, item in enumerate(batch):
        length = len(item.input_ids)
        input_ids[row, :length] = item.input_ids
        attention_mask[row, :length] = 1
        labels[row, :length] = item.labels
    arrays = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
