"""How fast the engines reply, against plain `model.generate` at the same batch size in the same process.

`plain` is what a user would write: `model.generate`, left-padded, prompts in the order of the data. `transformers` is
the same with prompts of like length together, and `continuous` refills rows as they end. `generate_batch`, only where
it is named, is transformers' own continuous batching: on a CPU it may not come back. All decode greedily.
Prompts are those of BeaverTails-Evaluation when HOLDFAST_DATA names a folder that has them, otherwise made up.

    python benchmarks/generation.py --n 700 --max-new-tokens 512 --batch-size 64 --output generation.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.core.files import write_json
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.seeding import generator
from holdfast.data.examples import Example, make_example
from holdfast.data.templates import use_template
from holdfast.judging.engines import open_engine
from holdfast.judging.engines.transformers import decoding, left_padded, reply
from holdfast.judging.prompts import end_tokens, prompt_ids
from holdfast.judging.reply import Reply
from holdfast.models.handle import load_pair

ENGINES = ("plain", "transformers", "continuous")
UPSTREAM = "generate_batch"
THINGS = ("bread", "a bookshelf", "soup", "a bicycle", "a garden", "a song", "a letter", "tea", "a kite", "a budget")


def prompts(n: int) -> tuple[list[Example], str]:
    """`n` prompts and where they come from."""
    if os.environ.get("HOLDFAST_DATA"):
        from holdfast_lab.data.catalogue import load

        rows = [row["prompt"] for row in load("beavertails_evaluation").rows]
        if len(rows) >= n:
            return [make_example(text, "", f"row {i}") for i, text in enumerate(rows[:n])], "beavertails_evaluation"
    draw = generator(0, "generation benchmark")
    made = []
    for i in range(n):
        chosen = [THINGS[j] for j in draw.integers(0, len(THINGS), int(draw.integers(1, 12)))]
        made.append(make_example(f"Explain, as question {i}, how to make {', then '.join(chosen)}.", "", f"row {i}"))
    return made, "synthetic"


class Bench:
    """One model, one set of prompts, and the ways to reply to them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.tokenizer = load_pair(options.model, dtype=options.dtype, device=device)
        use_template(self.tokenizer, options.template)
        if options.lora:
            self.model = attach_adapter(self.model)
        self.examples, self.source = prompts(options.n)
        self.steps: dict[str, int] = {}

    def run(self, name: str, examples: Sequence[Example], new: int) -> list[Reply | None]:
        """Replies in order; None where an engine does not say which prompt a reply is for."""
        if name == "plain":
            return list(self._plain(examples, new))
        if name == UPSTREAM:
            return list(self._generate_batch(examples, new))
        engine: Any = open_engine(
            name, model=self.model, tokenizer=self.tokenizer, batch_size=self.options.batch_size,
            template=self.options.template,
        )  # fmt: skip
        found = {made.id: made for batch in engine.generate(examples, max_new_tokens=new) for made in batch}
        if hasattr(engine, "steps"):
            self.steps[name] = engine.steps
        return [found[example.id] for example in examples]

    def _plain(self, examples: Sequence[Example], new: int) -> list[Reply]:
        ids = prompt_ids(self.tokenizer, examples, self.options.template)
        ends, pad, size = end_tokens(self.model, self.tokenizer), self.tokenizer.pad_token_id, self.options.batch_size
        found = []
        self.steps["plain"] = 0
        with torch.no_grad(), decoding(self.model, new, pad, ends) as settings:
            for start in range(0, len(ids), size):
                rows, mask = left_padded(ids[start : start + size], pad)
                out = self.model.generate(
                    input_ids=rows.to(self.model.device), attention_mask=mask.to(self.model.device),
                    generation_config=settings,
                )[:, rows.shape[1] :].tolist()  # fmt: skip
                self.steps["plain"] += len(out[0])
                found += [
                    reply(example.id, row, self.tokenizer, ends)
                    for example, row in zip(examples[start : start + size], out, strict=True)
                ]
        return found

    def _generate_batch(self, examples: Sequence[Example], new: int) -> list[Reply]:
        """Each prompt's request is found again by its tokens, so that equal prompts share a reply."""
        ids = prompt_ids(self.tokenizer, examples, self.options.template)
        ends = end_tokens(self.model, self.tokenizer)
        with torch.no_grad(), decoding(self.model, new, self.tokenizer.pad_token_id, ends) as settings:
            made = self.model.generate_batch(inputs=ids, generation_config=settings)
        by_prompt = {tuple(one.prompt_ids): list(one.generated_tokens) for one in made.values()}
        return [
            reply(example.id, by_prompt[tuple(row)], self.tokenizer, ends)
            for example, row in zip(examples, ids, strict=True)
        ]

    def timed(self, name: str) -> tuple[dict[str, Any], list[Reply | None]]:
        """Seconds, tokens and memory of one engine, after a short warm-up."""
        self.run(name, self.examples[: self.options.batch_size], min(8, self.options.max_new_tokens))
        seconds, memory, found = measured(lambda: self.run(name, self.examples, self.options.max_new_tokens))
        tokens = sum(one.tokens for one in found if one is not None)
        return {
            "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds, "steps": self.steps.get(name),
            "truncated": sum(one.truncated for one in found if one is not None), "device_bytes": memory,
        }, found  # fmt: skip


def attach_adapter(model: Any) -> Any:
    """A LoRA adapter with random weights on q, k and v, not merged."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=32, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return adapted


def measured(function: Callable[[], list[Reply | None]]) -> tuple[float, int | None, list[Reply | None]]:
    """Seconds with everything the device was given finished, peak device memory, and the result."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = function()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() if cuda else None, found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Every engine once, and how it stands against the first."""
    bench = Bench(options)
    results: dict[str, Any] = {}
    first: list[Reply | None] = []
    for name in options.engines:
        try:
            results[name], found = bench.timed(name)
        except Exception as error:
            if name != UPSTREAM:
                raise
            # The baseline of another library may not run here at all.
            results[name] = {
                "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            }
            continue
        first = first or found
        base = results[options.engines[0]]
        same = sum(a == b for a, b in zip(first, found, strict=True))
        results[name] |= {"speedup": base["seconds"] / results[name]["seconds"], "identical": same / len(found)}
        print(json.dumps({name: results[name]}), flush=True)
    return {
        "engines": results, "baseline": options.engines[0], "prompts": bench.source,
        "prompts_sha256": sha256_json([example.id for example in bench.examples]),
        "weights": str(bench.model.dtype), "device": str(bench.model.device),
    }  # fmt: skip


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--n", type=int, default=700)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--device", default=None)
    parser.add_argument("--template", default="chat", choices=["chat", "alpaca", "none"])
    parser.add_argument("--lora", action="store_true", help="with a random LoRA adapter attached")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=[*ENGINES, UPSTREAM])
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    settings = {key: value for key, value in vars(options).items() if key != "output" and value is not None}
    result = compare(options) | {
        "settings": settings, "versions": versions(), "commit": commit(), "hardware": hardware(),
    }  # fmt: skip
    if options.output is not None:
        write_json(options.output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
