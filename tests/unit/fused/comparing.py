"""A LoRA model's packed pass against its own forward and backward, row by row; tiny random models of many kinds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from holdfast.data.encode import Encoded
from holdfast.fused.body import Body, EagerPasses
from holdfast.fused.grouped_lora import GroupedAdapter
from holdfast.fused.packed_rows import Groups
from holdfast.fused.support import other_mixers, plain_layers
from holdfast.scoring.completion import deterministic, hidden_states

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip


def tiny(config_class: type, *, target: Sequence[str], seed: int = 0, start: bool = False, **settings: Any) -> Any:
    """A model with LoRA, whose B is not zero unless `start`."""
    torch.manual_seed(seed)
    config = config_class(**{**SMALL, **settings})
    model = AutoModelForCausalLM.from_config(config)
    return adapted(model, target, start=start)


def adapted(model: Any, target: Sequence[str], *, start: bool = False, **settings: Any) -> Any:
    lora = LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": list(target), "task_type": "CAUSAL_LM", **settings})
    found = get_peft_model(model, lora)
    if not start:
        torch.manual_seed(1)
        for name, p in found.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.2)
    return found


def encoded(lengths: Sequence[int], *, seed: int = 0, prompt: int = 1) -> list[Encoded]:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, 64, (n,), generator=draw).tolist() for n in lengths]
    return [Encoded(str(i), tuple(ids), (-100,) * prompt + tuple(ids[prompt:]), False) for i, ids in enumerate(rows)]


def passes(model: Any, count: int = 2) -> EagerPasses:
    layers, mixers = plain_layers(model), other_mixers(model)
    assert not isinstance(layers, str), layers
    assert not isinstance(mixers, str), mixers
    return EagerPasses(Body(model, GroupedAdapter(layers, count), mixers, device=CPU, precision=nullcontext))


def seeds(tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(7)) / width


def packed(run: EagerPasses, groups: Groups) -> tuple[Tensor, list[Tensor]]:
    """Hidden states, and every group's gradient as one vector."""
    caught: list[Tensor] = []

    def gradient_of(hidden: Tensor) -> Tensor:
        caught.append(hidden.clone())
        return seeds(*hidden.shape).to(hidden.dtype)

    found = run.gradients(groups, gradient_of)
    return caught[0], [torch.cat([g.flatten() for g in group]) for group in found]


def own(model: Any, run: EagerPasses, groups: Groups) -> tuple[Tensor, list[Tensor]]:
    """The same by the model's own forward on each row alone."""
    parameters = run.body.adapter.parameters
    states, found, start = [], [], 0
    total = sum(len(ids) for group in groups for ids, _ in group)
    for group in groups:
        sums = [torch.zeros_like(p) for p in parameters]
        for ids, _ in group:
            batch = {"input_ids": torch.tensor([list(ids)])}
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            with deterministic(model):
                hidden = hidden_states(model, batch)[0]
                seed = seeds(total, hidden.shape[1])[start : start + len(ids)].to(hidden.dtype)
                parts = torch.autograd.grad(hidden, parameters, seed, allow_unused=True)
            sums = [s if g is None else s + g for s, g in zip(sums, parts, strict=True)]
            states.append(hidden.detach())
            start += len(ids)
        found.append(torch.cat([s.flatten() for s in sums]))
    return torch.cat(states), found


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).double().norm() / b.double().norm().clamp(min=1e-30))
