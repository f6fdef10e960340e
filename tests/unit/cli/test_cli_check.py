"""`holdfast check`: splits, masks, size and feasibility, without weights and without showing text."""

from __future__ import annotations

import json
import re

import psutil
import pytest
from safetensors.torch import load_file

from holdfast.cli.survey import MASK_WIDTH, mask_bar
from holdfast.core.provenance import peak_memory
from holdfast.data.encode import Encoded
from holdfast.training.hooks import DEFENSES

STAGES = [
    (name, stage)
    for name, cls in DEFENSES.items()
    for stage in sorted({"finetune" if s == "posthoc" else s for s in cls.stages})
]


def test_it_describes_the_run(run_file, holdfast, tmp_path):
    code, out, _ = holdfast("check", run_file)
    assert code == 0
    assert "task: 60 examples; " in out
    assert "safety: 36 constraint, 12 monitor, 12 certify; " in out
    assert "at most 20% of examples may degrade by more than 0.1" in out
    assert "feasible start: phi - alpha + buffer = -0.2000 at the unchanged model: it holds" in out
    assert "6 steps of 4 task + 4 safety examples, learning rate 0.001; the constraint set is passed 0.7 times" in out
    assert not (tmp_path / "out").exists()


def test_the_settings_of_a_run_file_of_three_lines_are_accepted(run_file, holdfast, tiny_model, tmp_path):
    three = tmp_path / "three.yaml"
    three.write_text(f"model: {tiny_model}\ntask: task.jsonl\noutput_dir: out\n")
    code, out, _ = holdfast("check", three)
    assert code == 0
    assert "task: 60 examples; " in out
    assert "steps of 8 task + 4 safety examples, learning rate 0.0003" in out


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


def test_no_weights_are_needed(run_file, holdfast, deep_model, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in deep_model.iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    code, out, _ = holdfast("check", run_file, f"model={bare}", "--json")
    assert code == 0
    model = json.loads(out)["model"]
    stored = sum(t.numel() for t in load_file(deep_model / "model.safetensors").values())
    # LoRA of rank 4 on q (32 -> 32) and v (32 -> 16) of two layers: r * (in + out) each.
    assert model == {"parameters": stored, "trainable": 2 * 4 * (64 + 48), "dtype": "float32"}


def test_full_fine_tuning_trains_everything(run_file, holdfast):
    _, out, _ = holdfast("check", run_file, "lora=null", "--json")
    found = json.loads(out)
    assert found["model"]["trainable"] == found["model"]["parameters"]
    assert found["memory"]["weights"] == 4 * found["model"]["parameters"]
    assert found["memory"]["total"] == sum(found["memory"][k] for k in ("weights", "training_state", "activations"))


def test_the_hosts_memory_and_disk_are_said(run_file, holdfast):
    code, out, _ = holdfast("check", run_file)
    assert code == 0
    said = re.search(r"memory of the host: [\d.]+ [MG]iB for this check, all rows loaded; training takes more", out)
    assert said is not None
    assert re.search(r"disk for the task's rows while it trains, estimated: [\d.]+ [KM]iB a process", out)
    now = psutil.Process().memory_info().rss  # the kernel's two counters are not read at one moment
    assert 0.9 * now <= peak_memory() <= psutil.virtual_memory().total


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
    smooth = ("constraint.majorizer=exponential", "constraint.beta=31")  # phi(-tau) is 0.045
    assert holdfast("check", run_file, "constraint.alpha=0.05", *smooth)[0] == 0
    code, _, err = holdfast("check", run_file, "constraint.alpha=0.05", *smooth, "defense.reserve=0.4")
    assert code == 4
    assert "reserve 0.4 makes the start infeasible" in err


def test_it_ends_with_the_command_that_trains(run_file, holdfast):
    assert holdfast("check", run_file)[1].splitlines()[-1] == f"ready: holdfast train {run_file}"
    last = holdfast("check", run_file, "seed=7", "safety.fractions=[0.6, 0.2, 0.2]", "--skip-bad")[1].splitlines()[-1]
    assert last == f"ready: holdfast train {run_file} seed=7 'safety.fractions=[0.6, 0.2, 0.2]' --skip-bad"


def test_a_refused_start_is_no_second_json_document(run_file, holdfast):
    code, out, err = holdfast("check", run_file, "constraint.beta=1", "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["exit_code"]) == (4, 4)
    assert f"error: {problem['error']}" in err
    assert json.loads(holdfast("check", run_file, "--json")[1])["problems"] == []


def test_a_folder_that_train_would_refuse_is_a_problem(run_file, holdfast, tmp_path):
    assert holdfast("train", run_file)[0] == 0
    code, out, err = holdfast("check", run_file)
    assert code == 2
    assert "ready:" not in out
    assert f"error: the run in {tmp_path / 'out'} is finished" in err
    assert holdfast("train", run_file)[0] == 2
    code, out, _ = holdfast("check", run_file, "seed=7", "--json")
    assert code == 6
    assert "holds a run with other settings" in json.loads(out)["problems"][0]["error"]
    (tmp_path / "out" / "result.json").unlink()
    code, out, _ = holdfast("check", run_file)
    assert code == 0
    assert out.splitlines()[-1] == f"ready: holdfast train {run_file} --resume"


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


@pytest.fixture
def with_side_data(run_file, tmp_path, tiny_model):
    """A run file with harmful pairs, and the weights before alignment."""
    rows = [{"prompt": f"break the {i} lock", "completion": f"Unspeakable {i}."} for i in range(7)]
    (tmp_path / "harmful.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file.write_text(run_file.read_text() + f"harmful: {{data: harmful.jsonl}}\nunaligned: {tiny_model}\n")
    return run_file


@pytest.mark.parametrize(("name", "stage"), STAGES, ids=[f"{n}-{s}" for n, s in STAGES])
def test_every_defense_is_described_with_the_side_data_it_reads(with_side_data, holdfast, name, stage, tiny_model):
    overrides = [f"defense.name={name}", f"stage={stage}", "train.safety_batch_size=8"]
    code, out, err = holdfast("check", with_side_data, *overrides)
    assert code == 0
    assert "Unspeakable" not in out + err
    cls = DEFENSES[name]
    needs = cls.needed(stage)
    assert ("harmful: 7 pairs to train against; " in out) == ("harmful" in needs)
    assert (f"before alignment: {tiny_model}" in out) == ("unaligned" in needs)
    assert (f"{name} does not enforce this limit" in out) == (not cls.constrains)
    assert "a safety batch times alpha" not in out  # 8 x 0.2


def beside(out: str) -> str:
    return next(line for line in out.splitlines() if " steps of 4 task" in line)


def test_only_batches_that_the_defense_passes_over_are_named(with_side_data, holdfast):
    def found(*overrides: str) -> str:
        return beside(holdfast("check", with_side_data, *overrides)[1])

    assert found("defense=booster", "stage=align") == "6 steps of 4 task + 4 harmful examples, learning rate 0.001"
    assert found("defense=asft") == found("defense=sft") == "6 steps of 4 task examples, learning rate 0.001"
    assert found("defense=kl").startswith("6 steps of 4 task + 4 safety examples, learning rate 0.001; the")


def test_the_work_counts_passes_over_harmful_pairs_without_a_safety_set(with_side_data, holdfast):
    def flop(name: str) -> float:
        _, out, _ = holdfast("check", with_side_data, f"defense={name}", "stage=align", "safety={}", "--json")
        return float(json.loads(out)["work"]["flop"])

    assert flop("vaccine") == 2 * flop("sft")  # twice over the same rows
    assert flop("antibody") - flop("sft") == pytest.approx(1.5 * (flop("booster") - flop("sft")))  # 3 passes beside, 2


def test_weights_before_alignment_that_are_not_there_are_refused(run_file, holdfast):
    code, _, err = holdfast("check", run_file, "defense=asft", "unaligned=./nowhere")
    assert code == 2
    assert "nowhere" in err
    assert "there is no such folder" in err


@pytest.mark.parametrize("name", ["asft", "safelora", "salora"])
@pytest.mark.parametrize("setting", ["lora=null", "adapter_policy=continue"])
def test_a_defense_of_loras_factors_is_refused_without_a_fresh_adapter(with_side_data, holdfast, name, setting):
    code, _, err = holdfast("check", with_side_data, f"defense={name}", setting)
    assert code == 2
    assert f"{setting.split('=')[0]}: {name} needs a LoRA adapter that begins with this run" in err


def test_a_start_outside_the_limit_stops_only_a_defense_that_enforces_it(run_file, holdfast):
    for command in ("check", "train"):
        assert holdfast(command, run_file, "constraint.beta=1")[0] == 4
    assert holdfast("check", run_file, "constraint.beta=1", "defense=lisa")[0] == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.fp16=true"], "fp16 training"),
        (["train.torch_compile=true"], "torch_compile"),
        (["train.optim=lomo"], "optimizer lomo"),
        (["adapter_policy=continue"], "adapter_policy: continue goes on training an adapter"),
        (["train.per_device_train_batch_size=0"], "per_device_train_batch_size is 0, expected at least 1"),
        (["train.gradient_accumulation_steps=0"], "gradient_accumulation_steps is 0, expected at least 1"),
        (["train.max_steps=0"], "max_steps is 0"),
        (["lora.target_modules=[nope]"], "lora.target_modules: "),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_what_the_settings_give_away_is_refused_by_check_and_train(
    run_file, holdfast, tmp_path, command, overrides, said
):
    code, _, err = holdfast(command, run_file, *overrides)
    assert code == 2
    assert said in err
    assert not (tmp_path / "out" / "adapter").exists()


def test_wrong_target_modules_are_answered_with_the_models_own(run_file, holdfast):
    _, _, err = holdfast("check", run_file, "lora.target_modules=[nope]")
    assert "'nope'" in err
    assert "q_proj" in err.split("What to do:")[1]
