"""A whole run with a defense of LoRA's factors: what is saved is what was measured; a resumed run saves the same."""

from __future__ import annotations

import json
import os
import signal

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.aligned import run_file

from holdfast.data.encode import encode_all
from holdfast.models.handle import load_model, load_pair
from holdfast.runs.pipeline import read_data, run
from holdfast.scoring.forward import Forward

DEFENSES = {
    "asft": {"name": "asft"},
    "safelora": {"name": "safelora", "mode": "threshold", "threshold": 1.0},
    "salora": {"name": "salora", "safety_rank": 3, "task_rank": 3},
}
WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize("name", DEFENSES)
def test_saved_measured_and_resumed_are_one_adapter(tmp_path, name):
    config = run_file(tmp_path, defense=DEFENSES[name])
    folder = run(config).folder

    stored = pq.read_table(folder / "audit.parquet").to_pydict()
    examples = {row.id: row for row in read_data(config).safety["safety"].monitor}
    model, tokenizer = load_pair(folder / "adapter")  # merged into the aligned model
    rows = encode_all(list(examples.values()), tokenizer, max_length=1024, role="safety").examples
    forward = Forward(model, pad_token_id=tokenizer.pad_token_id, batch_size=4, device=torch.device("cpu"))
    found = dict(zip([row.id for row in rows], forward.losses(rows, 8).total.tolist(), strict=True))
    measured = dict(zip(stored["id"], stored["nll_after"], strict=True))
    assert {key: measured[key] for key in found} == pytest.approx(found, rel=1e-4)
    before = dict(zip(stored["id"], stored["nll_before"], strict=True))
    assert max(abs(before[key] - value) for key, value in found.items()) > 1e-3

    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == (8 if name == "salora" else 4)
    unmerged = PeftModel.from_pretrained(load_model(config.model), folder / "adapter")
    ids = torch.tensor([rows[0].input_ids])
    with torch.no_grad():
        torch.testing.assert_close(unmerged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)

    last = load_file(folder / "checkpoints" / "checkpoint-2" / WEIGHTS)
    for key, value in load_file(folder / "adapter" / WEIGHTS).items():  # only safelora changes B after the last step
        assert torch.equal(value, last[key]) is not (name == "safelora" and ".lora_B." in key)

    stopped = run_file(tmp_path, defense=DEFENSES[name], output_dir=str(tmp_path / "stopped"))
    with pytest.raises(KeyboardInterrupt):
        run(stopped, listeners=[lambda row: row.get("total_steps") and os.kill(os.getpid(), signal.SIGTERM)])
    assert not (tmp_path / "stopped" / "adapter").exists()
    again = run(stopped, resume=True).folder
    assert (again / "adapter" / WEIGHTS).read_bytes() == (folder / "adapter" / WEIGHTS).read_bytes()
