"""Random encoded rows, an adapter with a known change, and token losses computed one at a time."""

from __future__ import annotations

import torch
from peft import get_peft_model
from tests import tiny

from holdfast.data.encode import Encoded
from holdfast.scoring.forward import Forward

PAD = 0


def encoded(lengths: list[tuple[int, int]], *, vocabulary: int = 64, seed: int = 0) -> list[Encoded]:
    """Random rows with the given (prompt, completion) lengths."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number, (prompt, reply) in enumerate(lengths):
        ids = torch.randint(3, vocabulary, (prompt + reply,), generator=draw).tolist()
        found.append(Encoded(f"e{number}", tuple(ids), tuple([-100] * prompt + ids[prompt:]), truncated=False))
    return found


ROWS = encoded([(4, 12), (7, 3), (2, 8), (5, 9), (3, 1)])


def literal_nll(model, row: Encoded) -> list[float]:
    """NLL of each completion token: one row, no padding, one token at a time."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.input_ids])).logits[0].float()
    found = []
    for position in range(1, len(row.input_ids)):
        if row.labels[position] != -100:
            found.append(-float(torch.log_softmax(logits[position - 1], -1)[row.labels[position]]))
    return found


def adapted(*, dropout: float = 0.0, trained: float = 0.0, dtype=torch.float32, **kwargs):
    """The tiny model with LoRA; `trained` is the size of a random change of the adapter."""
    model = get_peft_model(tiny.model(dtype=dtype), tiny.lora(dropout, **kwargs))
    return move(model, trained)


def move(model, size: float):
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, generator=draw).to(p.dtype))
    return model


def forward(model, batch_size: int = 8) -> Forward:
    return Forward(model, pad_token_id=PAD, batch_size=batch_size, device=torch.device("cpu"))
