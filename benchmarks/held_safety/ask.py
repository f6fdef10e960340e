"""The model's own refusals of AdvBench prompts: the safety file of a user who has such prompts and no replies.

    python -m benchmarks.held_safety.ask WORK --model 0.5b

writes WORK/sets/advbench.0.5b.jsonl: the prompts that the shipped model refuses, with its whole refusal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.held_safety.cells import read_plan
from benchmarks.held_safety.data import examples_of, write_rows

from holdfast.data.examples import prompt_text
from holdfast.data.templates import use_template
from holdfast.judging.reply_classes import REFUSED, sort_reply
from holdfast.models.content import content_of
from holdfast.models.handle import load_unmerged
from holdfast_lab.evaluation.evaluate import HARM, Decoding, Questions, answer

TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep the model's own refusals of AdvBench prompts.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", required=True, help="Of cells.yaml.")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, help="Only so many prompts, for a trial.")
    options = parser.parse_args()
    work: Path = options.work
    place = work / "sets" / f"advbench.{options.model}.jsonl"
    if place.is_file():
        return
    ref = work / "models" / read_plan().models[options.model]["folder"]
    model, tokenizer = load_unmerged(ref, dtype=options.dtype)
    use_template(tokenizer, "chat")
    prompts = examples_of(work / "data" / "advbench.jsonl", options.limit)
    decoding = Decoding(harm_tokens=TOKENS, batch_size=options.batch_size)
    replies = answer(
        model, tokenizer, Questions(harm=prompts), decoding,
        folder=work / "sets" / options.model, model_sha256=content_of(ref).sha256,
    )[HARM]  # fmt: skip
    rows = [
        {"prompt": prompt_text(example), "completion": reply.text}
        for example, reply in zip(prompts, replies, strict=True)
        if not reply.truncated and sort_reply(reply.text, truncated=False) == REFUSED
    ]
    write_rows(place, rows)
    print(f"{len(rows)} of {len(prompts)} AdvBench prompts refused")


if __name__ == "__main__":
    main()
