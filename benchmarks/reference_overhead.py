"""What the reference-loss pass costs over bare forward passes on the same padded batches.

The bare passes run `model(input_ids, attention_mask)` as transformers does, logits included; the pass is the trainer's
own (`Forward.losses`): every completion loss, in float32 from the head on. A third column is the noise floor that the
trainer measures after it, in batches of the training size. They take turns in one process; the ratio of their median
times is the result.

    python benchmarks/reference_overhead.py --model embedded --n 2000 --length 200 --output reference.json
    python benchmarks/reference_overhead.py --shape llama-3.1-8b --n 512
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, random_model

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.completion import causal_lm, deterministic
from holdfast.constraint.noise import noise_floor
from holdfast.constraint.passes import Forward
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.seeding import generator
from holdfast.data.collate import collate
from holdfast.data.encode import IGNORE, Encoded
from holdfast.models.handle import load_model

PROMPT_SHARE = 0.5
FIRST_ID = 10  # special tokens come before


def random_examples(n: int, length: int, vocabulary: int, *, spread: float) -> list[Encoded]:
    """Random tokens; lengths vary by `spread` about `length`, half of each is the prompt."""
    draw = generator(0, "reference overhead")
    found = []
    for number in range(n):
        size = max(4, round(length * (1 + spread * (2 * draw.random() - 1))))
        ids = tuple(draw.integers(FIRST_ID, vocabulary, size).tolist())
        cut = round(PROMPT_SHARE * size)
        found.append(Encoded(str(number), ids, (IGNORE,) * cut + ids[cut:], truncated=False))
    return found


def load(options: argparse.Namespace, device: torch.device) -> Any:
    """The model, with an untrained LoRA adapter on q, k and v as at the start of a run where asked for."""
    if options.shape is not None:
        model = random_model(options.shape).to(device)
    else:
        model = load_model(options.model, dtype=options.dtype, device=device)
    if not options.adapter:
        return model.eval()
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=32, lora_alpha=4, target_modules=names, task_type="CAUSAL_LM")).eval()


@torch.no_grad()
def bare_passes(forward: Forward, examples: list[Encoded]) -> None:
    """The same padded batches through `model(...)`, logits included."""
    with deterministic(forward.model):
        for positions in forward.batches(examples):
            rows = collate([examples[i] for i in positions], forward.pad_token_id)
            inputs = {key: rows[key].to(forward.device) for key in ("input_ids", "attention_mask")}
            forward.model(**inputs)


def timed(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds, with everything the device was given finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of alternating repetitions, and their ratios."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load(options, device)
    config = causal_lm(model).config.get_text_config()
    examples = random_examples(options.n, options.length, int(config.vocab_size), spread=options.spread)
    forward = Forward(model, pad_token_id=2, batch_size=options.batch_size, device=device)
    limit = ChanceConstraint()
    reference = forward.losses(examples, limit.first_k).per_token()  # also the warm-up
    training = forward.resized(options.micro_batch)
    runs: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare_passes(forward, examples),
        "losses": lambda: forward.losses(examples, limit.first_k),
        "noise_floor": lambda: noise_floor(training, examples, reference, limit, seed=0),
    }
    floor = 0.0
    for name, run in runs.items():
        found = run()
        floor = found if name == "noise_floor" else floor
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repetitions):
        for name, run in runs.items():
            times[name].append(timed(run, device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    both = medians["losses"] + medians["noise_floor"]
    return {
        "ratio": {"losses": medians["losses"] / medians["bare"], "losses_and_noise_floor": both / medians["bare"]},
        "throughput_of_bare": {"losses": medians["bare"] / medians["losses"]},
        "median_seconds": medians, "seconds": times, "noise_floor": floor,
        "tokens": sum(len(item.input_ids) for item in examples),
        "scored_tokens": sum(item.n_labels for item in examples), "device": str(device),
        "weights": str(model.get_input_embeddings().weight.dtype).removeprefix("torch."),
        "attention": str(getattr(config, "_attn_implementation", None)),
    }  # fmt: skip


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="embedded")
    which.add_argument("--shape", default=None, choices=sorted(SHAPES), help="random weights, bfloat16")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--spread", type=float, default=0.2, help="lengths vary by this share")
    parser.add_argument("--batch-size", type=int, default=8, help="rows a forward (safety_eval_batch_size)")
    parser.add_argument("--micro-batch", type=int, default=10, help="rows of a training pass, for the noise floor")
    parser.add_argument("--adapter", action="store_true", help="with an untrained LoRA adapter, as training starts")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"], help="of --model")
    parser.add_argument("--device", default=None)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    unused = ("output", "model", "dtype") if options.shape is not None else ("output",)
    settings = {key: value for key, value in vars(options).items() if key not in unused and value is not None}
    result = overhead(options)
    result |= {"settings": settings, "versions": versions(), "commit": commit(), "hardware": hardware()}
    if options.output is not None:
        write_json(options.output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
