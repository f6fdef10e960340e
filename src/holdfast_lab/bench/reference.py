"""How fast reference losses are measured, against bare forward passes over the same padded batches.

    share = tokens per second of `Forward.losses` / tokens per second of `model(input_ids, attention_mask)`

The bare pass computes the logits of every token, as transformers does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from peft import get_peft_model

from holdfast.constraint.chance import ChanceConstraint
from holdfast.data.encode import Encoded, encode_all
from holdfast.data.sources import examples_from_rows
from holdfast.scoring.completion import deterministic
from holdfast.scoring.forward import Forward
from holdfast_lab.bench.measure import now
from holdfast_lab.bench.paths import adapter
from holdfast_lab.bench.rows import rows, safety_pairs, word_tokenizer
from holdfast_lab.bench.settings import Settings
from holdfast_lab.bench.shapes import random_model

ROWS, BATCH, REPETITIONS = 256, 8, 5  # a batch as `safety_eval_batch_size` has it


def reference_throughput(shape: str, settings: Settings, *, n: int = ROWS) -> dict[str, Any]:
    """Median milliseconds of both passes over n safe rows, taking turns, and the share of the bare throughput."""
    tokenizer = word_tokenizer()
    made = rows(safety_pairs(n, seed=settings.seed), seed=settings.seed, name="reference")
    examples = examples_from_rows(made, name="reference")
    encoded = encode_all(examples, tokenizer, max_length=None, role="safety").examples
    model = get_peft_model(random_model(shape), adapter(settings.rank)).eval()
    # The autocast of training.
    precision = partial(torch.autocast, "cuda", torch.bfloat16) if torch.cuda.is_available() else nullcontext
    padding = tokenizer.pad_token_id
    forward = Forward(model, pad_token_id=padding, batch_size=BATCH, device=model.device, precision=precision)
    first_k = ChanceConstraint().first_k
    passes: dict[str, Callable[[], Any]] = {
        "bare": lambda: _bare(forward, encoded),
        "losses": lambda: forward.losses(encoded, first_k),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repetition in range(REPETITIONS + 1):  # the first loads kernels
        for name, run in passes.items():
            start = now()
            run()
            if repetition:
                times[name].append(now() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    tokens = sum(len(item.input_ids) for item in encoded)
    return {
        "shape": shape, "rows": len(encoded), "tokens": tokens, "batch": BATCH,
        "bare_ms": 1e3 * medians["bare"], "losses_ms": 1e3 * medians["losses"],
        "tokens_per_s": tokens / medians["losses"], "share": medians["bare"] / medians["losses"],
    }  # fmt: skip


@torch.no_grad()
def _bare(forward: Forward, encoded: Sequence[Encoded]) -> None:
    ordered = sorted(encoded, key=lambda item: len(item.input_ids))
    with deterministic(forward.model), forward.precision():
        for start in range(0, len(ordered), forward.batch_size):
            batch = forward.batch(ordered[start : start + forward.batch_size])
            forward.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
