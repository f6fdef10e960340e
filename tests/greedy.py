"""The oracle of generation: greedy decoding of one prompt at a time, without batch, padding or cache."""

from __future__ import annotations

import torch

from holdfast.data.examples import make_example
from tests import tiny

NEW = 12


def examples(n: int = 9, *, seed: int = 1) -> list:
    """Prompts of different lengths, shuffled so that data order is not length order."""
    made = []
    for i, row in enumerate(tiny.rows(n, seed=seed)):
        extra = " ".join(tiny.WORDS[: (5 * i) % 13])
        made.append(make_example(f"{row['prompt']}{extra}".strip(), row["completion"], f"data:{i + 1}"))
    return made


def one_by_one(model, tokenizer, text: str, *, special: bool = False, new: int = NEW) -> tuple[str, bool, int]:
    """Independent of batching, padding and caching: the argmax of a full forward pass, token by token."""
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        for _ in range(new):
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                return tokenizer.decode(ids[start:], skip_special_tokens=True).strip(), False, len(ids) - start
            ids.append(token)
    return tokenizer.decode(ids[start:], skip_special_tokens=True).strip(), True, new


def chat(text: str) -> str:
    """A plain prompt as the tiny tokenizer's template renders it."""
    return f"<|user|> {text} <|end|> <|assistant|> "


def stopping(model):
    """A model that ends some of its replies: the end token's logit is doubled."""
    with torch.no_grad():
        model.lm_head.weight[1].mul_(2)
    return model
