"""Makes the adapter that `holdfast init --model embedded` writes with the run file: `python -m tools.starter_aligned`.

LoRA on every linear layer of the embedded SmolLM2-135M-Instruct, trained as `holdfast align` does, in float32, on the
bundled prompts for steering and on requests at work (`tools/work_requests.py`); stored in float16. It takes about 40
minutes on two cores. `provenance.json` beside it says what made it, and what it refuses of prompts that it was not
trained on, by which its strength was chosen. The same machine and versions give the same adapter; elsewhere the last
bits may differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tools.demo_aligned import write_adapter
from tools.work_requests import HELD_OUT, TRAINED

from holdfast.core.files import json_text, read_json, write_json, write_text
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.examples import Example, make_example
from holdfast.data.sources import read_examples
from holdfast.demo.data import DATA_DIR
from holdfast.demo.starter import ADAPTER_DIR
from holdfast.demo.story import PROVENANCE
from holdfast.judging.reply_classes import ReplyClass
from holdfast.models.content import content_of
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.handle import load_pair
from holdfast.models.source import EMBEDDED
from holdfast.runs.stages.align import AlignSettings, keep_freed_memory, train_rows, training_rows
from holdfast.runs.stages.alignment_rows import AlignmentPrompts, bundled_prompts
from holdfast.screening.asking import asker_of

COMMAND = "python -m tools.starter_aligned"
SETTINGS = AlignSettings(steps=160, rank=8, lora_alpha=16, refusal_share=0.35)
STRENGTH = 0.85
"""B is stored times this: with all of it 19 % of the everyday prompts were refused (the limit of `align` is 20 %)."""
README = """\
# An adapter that lets the embedded model refuse

`holdfast init` wrote it. It is LoRA on SmolLM2-135M-Instruct, taught to refuse what the bundled prompts of holdfast ask
for, and to go on answering ordinary ones. It is for trials on a CPU: a model of this size is no model to deploy.
`provenance.json` says how it was made, and what it refuses of prompts that it was not trained on.
"""


def prompts(settings: AlignSettings) -> AlignmentPrompts:
    """Those of `holdfast align`, with requests at work as a further ordinary source."""
    used = bundled_prompts((), held_out=settings.held_out, seed=settings.seed)
    starter = [*read_examples(str(DATA_DIR / "task_train.jsonl")), *read_examples(str(DATA_DIR / "poison.jsonl"))]
    held_out = {**used.held_out, "work": _asked(HELD_OUT), "the demo's rows": starter}
    return replace(used, ordinary={**used.ordinary, "work": _asked(TRAINED)}, held_out=held_out)


def _asked(texts: Sequence[str]) -> list[Example]:
    return [make_example(text, "") for text in texts]


def trained(used: AlignmentPrompts, settings: AlignSettings) -> Any:
    """The embedded model with its adapter."""
    model, tokenizer = load_pair(EMBEDDED, dtype="float32")
    asker = asker_of(model, tokenizer, model_sha256=content_of(EMBEDDED).sha256)
    replies = asker.sort([example for examples in used.ordinary.values() for example in examples], what="ordinary")
    return train_rows(model, tokenizer, training_rows(used, replies, tokenizer, settings), settings)


def counted(used: AlignmentPrompts, folder: Path) -> dict[str, dict[str, int]]:
    """How many prompts of each held-out set get which kind of reply."""
    model, tokenizer = load_pair(folder, dtype="float32")
    asker = asker_of(model, tokenizer, model_sha256=content_of(folder).sha256)
    found = {}
    for name, examples in used.held_out.items():
        kinds = [one.reply_class for one in asker.sort(examples, what=name).values()]
        found[name] = {"asked": len(kinds), **{str(kind): kinds.count(kind) for kind in ReplyClass}}
    return found


def make(folder: Path, settings: AlignSettings = SETTINGS) -> dict[str, Any]:
    """Train, write and measure the adapter; returns its provenance."""
    keep_freed_memory()
    used = prompts(settings)
    return finish(trained(used, settings), used, folder, settings)


def finish(model: Any, used: AlignmentPrompts, folder: Path, settings: AlignSettings) -> dict[str, Any]:
    """Write a trained adapter at its strength, and measure it."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.mul_(STRENGTH)
    base = read_json(embedded_model_dir() / PROVENANCE)
    files = write_adapter(model, folder)
    sets = {"refuse": used.refuse, **used.ordinary}
    provenance = {
        "command": COMMAND, "commit": commit(), "settings": settings.shaping(), "strength": STRENGTH,
        "trained_in": "float32", "base": {name: base[name] for name in ("source", "sha256", "weights_sha256")},
        "prompts": {name: sha256_json([example.id for example in examples]) for name, examples in sets.items()},
        "files": files, "versions": versions(), "hardware": hardware(), "held_out": counted(used, folder),
    }  # fmt: skip
    write_text(folder / "README.md", README)
    write_json(folder / PROVENANCE, provenance)
    return provenance


def main(arguments: Sequence[str]) -> None:
    """Make the adapter and print its provenance."""
    sys.stdout.write(json_text(make(Path(arguments[0]) if arguments else ADAPTER_DIR)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
