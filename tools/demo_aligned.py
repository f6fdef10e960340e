"""Makes the aligned adapter that the demo starts from: `python -m tools.demo_aligned [FOLDER]`.

LoRA of rank 2 on every linear layer of the embedded SmolLM2-135M-Instruct, trained in float32 on the shipped
`align.jsonl` and stored in float16 (1.3 MB; five minutes on two cores). `provenance.json` beside it says what made it
and what it refuses of prompts of another seed: the settings are chosen on those, and the demo's own are not asked. The
same machine and versions give the same adapter; elsewhere the last bits may differ.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tools.demo_data import make as make_data

from holdfast.core.files import json_text, read_json, write_json
from holdfast.core.hashing import sha256_file
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.encode import encode_all
from holdfast.data.examples import as_chat
from holdfast.data.sources import read_examples
from holdfast.demo.data import DATA_DIR
from holdfast.demo.story import ALIGNED_DIR, PROVENANCE, TEMPLATE, refused
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.handle import load_pair
from holdfast.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from holdfast.models.source import EMBEDDED
from holdfast.runs.stages.align import AlignSettings, keep_freed_memory, train_rows
from holdfast.runs.stages.alignment_rows import in_turn

COMMAND = "python -m tools.demo_aligned"
ROWS = DATA_DIR / "align.jsonl"
SETTINGS = AlignSettings(steps=48, learning_rate=2e-3, batch=8, rank=2, lora_alpha=4, max_length=96)
CHOSEN_ON = 120
"""The seed of the prompts that the settings were chosen on; the demo's have another."""
ASKED = ("probes", "poison", "ordinary", "task_train")
REPLY_TOKENS = 16


def trained(settings: AlignSettings) -> Any:
    """The embedded model with an adapter, trained on the aligning rows in a seeded order."""
    model, tokenizer = load_pair(EMBEDDED, dtype="float32")
    tokenizer.chat_template = TEMPLATE
    examples = [as_chat(example) for example in read_examples(str(ROWS))]
    rows = encode_all(examples, tokenizer, max_length=settings.max_length, role="safety").examples
    return train_rows(model, tokenizer, in_turn(rows, settings.steps * settings.batch, settings.seed, "demo"), settings)


def write_adapter(model: Any, folder: Path) -> dict[str, str]:
    """Weights in float16 and the configuration, without options that older PEFTs lack; returns the sha256 of each."""
    model.save_pretrained(folder)
    weights = load_file(folder / ADAPTER_WEIGHTS)
    half = {name: tensor.to(torch.float16) for name, tensor in weights.items()}
    save_file(half, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    said = {name: value for name, value in read_json(folder / ADAPTER_CONFIG).items() if value is not None}
    said |= {"base_model_name_or_path": EMBEDDED, "target_modules": sorted(said["target_modules"])}
    write_json(folder / ADAPTER_CONFIG, said)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card says nothing of this one
    return {name: sha256_file(folder / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


def refusals(folder: Path) -> dict[str, Any]:
    """Refused shares of prompts of the other seed, by file."""
    model, tokenizer = load_pair(folder, dtype="float32")
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as place:
        make_data(Path(place), CHOSEN_ON)
        files = {name: read_examples(str(Path(place) / f"{name}.jsonl")) for name in ASKED}
    return {name: refused(model, tokenizer, rows, REPLY_TOKENS).as_json() for name, rows in files.items()}


def make(folder: Path, settings: AlignSettings = SETTINGS) -> dict[str, Any]:
    """Train, write and measure the adapter; returns its provenance."""
    keep_freed_memory()
    base = read_json(embedded_model_dir() / PROVENANCE)
    provenance = {
        "command": COMMAND, "commit": commit(), "settings": settings.shaping(), "trained_in": "float32",
        "base": {name: base[name] for name in ("source", "sha256", "weights_sha256")},
        "rows": {"file": ROWS.name, "n": len(read_examples(str(ROWS))), "sha256": sha256_file(ROWS)},
        "files": write_adapter(trained(settings), folder), "versions": versions(), "hardware": hardware(),
        "chosen_on": {"seed": CHOSEN_ON, "refused": refusals(folder)},
    }  # fmt: skip
    write_json(folder / PROVENANCE, provenance)
    return provenance


def main(arguments: Sequence[str]) -> None:
    """Make the adapter and print its provenance."""
    sys.stdout.write(json_text(make(Path(arguments[0]) if arguments else ALIGNED_DIR)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
