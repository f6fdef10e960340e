"""`holdfast check`: splits, masks, size and feasibility, without weights and without showing text."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from holdfast.cli.survey import MASK_WIDTH, mask_bar
from holdfast.data.encode import Encoded


def test_it_describes_the_run(run_file, holdfast, tmp_path):
    code, out, _ = holdfast("check", run_file)
    assert code == 0
    assert "task: 60 examples; " in out
    assert "safety: 36 constraint, 12 monitor, 12 certify; " in out
    assert "at most 20% of examples may degrade by more than 0.1" in out
    assert "feasible start: g + buffer = -0.2000 at the unchanged model: it holds" in out
    assert "6 steps of 4 task + 4 safety examples; the constraint set is passed 0.7 times" in out
    assert not (tmp_path / "out").exists()


def test_text_is_hidden_unless_asked_for(run_file, holdfast):
    for arguments in ([], ["--json"]):
        _, out, err = holdfast("check", run_file, *arguments)
        assert "Sorry" not in out + err
        assert "shelf" not in out + err
    _, out, _ = holdfast("check", run_file, "--reveal")
    assert "shelf" in out.replace(" ", "")
    assert "Sorry" in out.replace(" ", "")


def test_revealed_text_cannot_control_the_terminal(run_file, holdfast, tmp_path):
    hostile = {"prompt": "evil", "completion": "a\x1b]52;c;aGk=\x07\x1b[2Jb\r\x9bmc\u202e"}
    (tmp_path / "task.jsonl").write_text(json.dumps(hostile) + "\n")
    code, out, _ = holdfast("check", run_file, "--reveal")
    assert code == 0
    assert "e v i l" in out or "evil" in out.replace(" ", "")
    assert not any(ord(c) < 32 and c != "\n" for c in out)
    assert "\x9b" not in out
    assert "\u202e" not in out


def test_no_weights_are_needed(run_file, holdfast, tiny_model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    code, out, _ = holdfast("check", run_file, f"model={bare}", "--json")
    assert code == 0
    model = json.loads(out)["model"]
    stored = sum(t.numel() for t in load_file(tiny_model / "model.safetensors").values())
    # LoRA of rank 4 on q (32 -> 32) and v (32 -> 16) of two layers: r * (in + out) each.
    assert model == {"parameters": stored, "trainable": 2 * 4 * (64 + 48), "dtype": "float32"}


def test_full_fine_tuning_trains_everything(run_file, holdfast):
    _, out, _ = holdfast("check", run_file, "lora=null", "--json")
    found = json.loads(out)
    assert found["model"]["trainable"] == found["model"]["parameters"]
    assert found["memory"]["weights"] == 4 * found["model"]["parameters"]
    assert found["memory"]["total"] == sum(found["memory"][k] for k in ("weights", "training_state", "activations"))


def test_steps_agree_with_the_trainer(run_file, holdfast, tmp_path):
    overrides = ["train.max_steps=-1", "train.num_train_epochs=0.3", "train.gradient_accumulation_steps=2"]
    _, out, _ = holdfast("check", run_file, *overrides, "--json")
    expected = json.loads(out)["steps"]["steps"]
    code, out, _ = holdfast("train", run_file, *overrides, "train.save_strategy=no", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == expected == 3


def test_the_preset_is_listed_with_its_sources(run_file, holdfast):
    code, out, _ = holdfast("check", run_file, "preset=paper")
    assert code == 0
    assert "preset  train.max_grad_norm = 1.0  (paper is silent: ours" in out


def test_an_infeasible_start_exits_4_after_the_findings(run_file, holdfast):
    code, out, err = holdfast("check", run_file, "constraint.beta=1")
    assert code == 4
    assert "it does NOT hold" in out
    assert err.startswith("error: ")
    code, out, _ = holdfast("check", run_file, "constraint.beta=1", "constraint.allow_infeasible_start=true")
    assert code == 0
    assert "it does NOT hold" in out


@pytest.mark.parametrize("length", [1, 5, MASK_WIDTH, MASK_WIDTH + 1, 500])
def test_the_mask_bar_keeps_its_proportions(length):
    scored = length // 2
    labels = (-100,) * (length - scored) + (7,) * scored
    bar = mask_bar(Encoded("id", (1,) * length, labels, truncated=False))
    assert len(bar) == min(length, MASK_WIDTH)
    assert abs(bar.count("#") - scored * len(bar) / length) <= 1
    assert bar == "." * bar.count(".") + "#" * bar.count("#")


def test_one_scored_token_is_never_lost_in_a_long_bar():
    labels = (-100,) * 700 + (7,) + (-100,) * 299
    assert mask_bar(Encoded("id", (1,) * 1000, labels, truncated=False)).count("#") == 1


def test_check_says_when_the_certify_share_is_too_small(run_file, holdfast):
    expected = "12 certify prompts cannot certify alpha 20 % at 95 % confidence: 14 are needed (about 70 safety prompts"
    _, out, _ = holdfast("check", run_file)
    assert f"  {expected} at these fractions)" in out.splitlines()
    assert json.loads(holdfast("check", run_file, "--json")[1])["safety"]["safety"]["certify_note"].startswith(expected)
    _, out, _ = holdfast("check", run_file, "safety.fractions=[0.5, 0.25, 0.25]")
    assert "  15 certify prompts: none may regress" in out.splitlines()
    _, out, _ = holdfast("check", run_file, "safety.fractions=[0.8, 0.2, 0]")
    assert "  no certify share: this run cannot be certified" in out.splitlines()
