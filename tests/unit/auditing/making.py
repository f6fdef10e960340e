"""Tiny models and adapters on disk, rows of data, and degradations computed one token at a time in float64."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests import tiny
from tests.unit.constraint.literal import move

from holdfast.auditing import windows
from holdfast.auditing.audit import audit
from holdfast.auditing.results import PartialResults
from holdfast.constraint.chance import ChanceConstraint
from holdfast.data.encode import Encoded, encode
from holdfast.data.examples import Example, as_chat, make_example

CHECKED = ("nll_token", "nll_sum", "nll_first", "kl_token", "kl_first")


def write_adapter(folder: Path, base: Path, *, size: float = 0.3, seed: int = 5, config=None) -> Path:
    """A LoRA adapter on the tiny model with a random change of the given size."""
    model = tiny.LlamaForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, config or tiny.lora())
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape))
    adapted.save_pretrained(folder)
    return folder


def examples(n: int, *, seed: int = 0) -> list[Example]:
    rows = tiny.rows(n, seed=seed)
    return [as_chat(make_example(row["prompt"], row["completion"], f"row {i}")) for i, row in enumerate(rows)]


def encodings(n: int, *, seed: int = 0) -> list[Encoded]:
    return [encode(example, tiny.tokenizer(), max_length=None) for example in examples(n, seed=seed)]


def write_rows(path: Path, n: int, *, seed: int = 0, extra: list[dict] | None = None) -> Path:
    lines = [json.dumps(row) for row in [*tiny.rows(n, seed=seed), *(extra or [])]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def plain(ref: Path, base: Path | None = None):
    """A model by transformers and PEFT alone: a folder, or an adapter on a base."""
    if base is None:
        return tiny.LlamaForCausalLM.from_pretrained(ref).eval()
    return PeftModel.from_pretrained(tiny.LlamaForCausalLM.from_pretrained(base), ref).eval()


def literal(before, after, row: Encoded, first_k: int) -> dict[str, float]:
    """Every unit for one example: no batch, no padding, all logits, log-softmax in float64."""
    with torch.no_grad():
        ids = torch.tensor([row.input_ids])
        log_p, log_q = (torch.log_softmax(m(input_ids=ids).logits[0].double(), -1) for m in (before, after))
    gaps, kls = [], []
    for position in range(1, len(row.input_ids)):
        if row.labels[position] != -100:
            p, q = log_p[position - 1], log_q[position - 1]
            gaps.append(float(p[row.labels[position]] - q[row.labels[position]]))
            kls.append(sum(float(p[v].exp() * (p[v] - q[v])) for v in range(len(p))))
    early = gaps[:first_k]
    return {
        "nll_token": sum(gaps) / len(gaps),
        "nll_sum": sum(gaps),
        "nll_first": sum(early) / len(early),
        "kl_token": sum(kls) / len(kls),
        "kl_first": sum(kls[:first_k]) / len(kls[:first_k]),
    }


__all__ = ["CHECKED", "LoraConfig", "encodings", "examples", "literal", "move", "plain", "write_adapter", "write_rows"]


def dying_audit(before: str, after: str, data: str, output: str) -> None:
    """An audit in windows of eight rows whose process is killed when it has written the second."""
    write = PartialResults.write

    def dying(self, name, k, *rest):
        write(self, name, k, *rest)
        if k == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    windows.WINDOW, PartialResults.write = 8, dying
    audit(before, after, data, ChanceConstraint(tau=0.05, alpha=0.3, first_k=2), output=output, device="cpu")
