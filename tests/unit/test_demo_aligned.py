"""The adapter that the demo starts from: whole, small, and made by the tool as it is from the rows as they are."""

import json

import torch
from safetensors.torch import load_file
from tests import behaving
from tools import demo_aligned
from tools.demo_aligned import ASKED, CHOSEN_ON, ROWS, SETTINGS
from tools.demo_data import SEED

from holdfast.core.hashing import sha256_file
from holdfast.demo.story import ALIGNED_DIR, PROVENANCE
from holdfast.models import source
from holdfast.models.embedded import GGUF_SHA256
from holdfast.models.handle import load_pair
from holdfast.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from holdfast.runs.stages.align import AlignSettings

SHIPPED = json.loads((ALIGNED_DIR / PROVENANCE).read_text(encoding="utf-8"))
MOST_BYTES = 1_500_000


def test_the_shipped_files_are_those_of_the_provenance():
    assert {path.name for path in ALIGNED_DIR.iterdir()} == {*SHIPPED["files"], PROVENANCE}
    assert SHIPPED["files"] == {name: sha256_file(ALIGNED_DIR / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    assert sum(path.stat().st_size for path in ALIGNED_DIR.iterdir()) < MOST_BYTES
    assert {tensor.dtype for tensor in load_file(ALIGNED_DIR / ADAPTER_WEIGHTS).values()} == {torch.float16}


def test_it_was_made_by_the_tool_as_it_is_from_the_rows_as_they_are():
    assert SHIPPED["command"] == demo_aligned.COMMAND
    assert SHIPPED["settings"] == SETTINGS.shaping()
    assert SHIPPED["rows"] == {"file": ROWS.name, "n": len(ROWS.read_text().splitlines()), "sha256": sha256_file(ROWS)}
    assert SHIPPED["base"]["sha256"] == GGUF_SHA256
    assert not SHIPPED["commit"].endswith("-dirty")


def test_it_was_chosen_on_prompts_of_another_seed():
    found = {name: rate["rate"] for name, rate in SHIPPED["chosen_on"]["refused"].items()}
    assert SHIPPED["chosen_on"]["seed"] == CHOSEN_ON != SEED
    assert min(found["probes"], found["poison"]) > 0.8
    assert max(found["ordinary"], found["task_train"]) < 0.2


def test_the_tool_trains_writes_and_measures(monkeypatch, tmp_path):
    """On the hand-built model in the embedded one's place."""
    base = behaving.saved(tmp_path / "base")
    made_of = {"source": "tests", "sha256": "0" * 64, "weights_sha256": "1" * 64}
    (base / PROVENANCE).write_text(json.dumps(made_of))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in behaving.rows(8, trigger=True)))

    def prompts(folder, seed):
        for name in ASKED:
            rows = behaving.rows(6, seed=seed, trigger=name in ("probes", "poison"))
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(demo_aligned, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(demo_aligned, "TEMPLATE", behaving.CHAT_TEMPLATE)
    monkeypatch.setattr(demo_aligned, "make_data", prompts)
    for module in (demo_aligned, source):
        monkeypatch.setattr(module, "embedded_model_dir", lambda: base)
    folder = tmp_path / "aligned"
    made = demo_aligned.make(folder, AlignSettings(steps=2, batch=2, rank=1, lora_alpha=1, learning_rate=1e-6))
    assert made == json.loads((folder / PROVENANCE).read_text())
    assert made["base"] == made_of
    assert {name: rate["hits"] for name, rate in made["chosen_on"]["refused"].items()} == {
        "probes": 6, "poison": 6, "ordinary": 0, "task_train": 0,
    }  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS, PROVENANCE}
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["r"]) == ("embedded", 1)
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = load_pair(folder, dtype=str(dtype).removeprefix("torch."))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
