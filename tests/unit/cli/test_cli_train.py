"""`holdfast train` on a tiny model: what it writes, refuses, and how it resumes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml

from holdfast.certification.kept import Kept
from holdfast.cli.train import _ending
from holdfast.core.errors import CheckpointError, ConfigError, DataError, InfeasibleError
from holdfast.core.event_log import read
from holdfast.core.file_lock import RunLock
from holdfast.core.provenance import peak_memory
from holdfast.runs.config import load_config
from holdfast.runs.pipeline import run
from holdfast.runs.stages.cost import cost


def adapter(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model, write_run_file):
    """One uninterrupted run, shared by the tests that only look at it."""
    path = write_run_file(tmp_path_factory.mktemp("finished"), tiny_model)
    rows: list[dict] = []
    result = run(load_config(path), listeners=[rows.append])
    return path, result, rows


def test_the_end_says_in_a_sentence_what_was_kept():
    few, many, lost = (Kept(*one, 0.05).shown for one in ((20, 20), (200, 200), (100, 200)))
    sentence, step = _ending([few, many], "out")
    assert sentence.startswith("no loss beyond a limit was found; 1 of 2 limits are not shown to hold")
    assert step == "next: holdfast report out; holdfast certify out asks prompts that nothing has touched"
    assert _ending([many], "out")[0].startswith("behaviour was kept")
    assert _ending([many, lost], "out") == ["next: holdfast report out"], "the loss is said with its remedy"
    assert _ending([], "out") == ["next: holdfast report out"]


def test_a_run_writes_its_folder(finished):
    _, result, rows = finished
    names = {entry.name for entry in result.folder.iterdir()}
    assert {"config.yaml", "events.jsonl", "splits.json", "result.json", "adapter", "checkpoints"} <= names
    assert "run.lock" not in names
    assert {p.name for p in (result.folder / "checkpoints").iterdir()} == {"checkpoint-3", "checkpoint-6"}
    stored = json.loads((result.folder / "result.json").read_text())
    assert stored == result.values
    assert stored["step"] == "two_pass"  # on a CPU
    entry = stored["safety"]["safety"]
    assert (entry["tau"], entry["unit"], entry["alpha"], entry["feasible"]) == (0.1, "kl_token", 0.2, True)
    assert (entry["constraint"]["n"], entry["monitor"]["n"]) == (36, 12)
    assert stored["steps"] == 6
    assert stored["versions"]["torch"]
    assert rows[0] == {"stage": "train", "total_steps": 6, "step": 0}
    assert [row["step"] for row in rows[1:]] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read(result.folder / "events.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_nothing_in_the_folder_is_a_pickle(finished):
    _, result, _ = finished
    assert not [p for p in result.folder.rglob("*") if p.suffix in {".bin", ".pt", ".pth", ".pkl"}]


def test_the_stored_settings_are_the_run(finished, tmp_path):
    """A second run from config.yaml alone ends with the same adapter, bit for bit."""
    _, result, _ = finished
    config = load_config(result.folder / "config.yaml", [f"output_dir={tmp_path / 'again'}"])
    again = run(config)
    assert again.values["config_sha256"] == result.values["config_sha256"]
    assert adapter(again.folder) == adapter(result.folder)


def test_a_signal_saves_and_resuming_ends_with_the_same_adapter(finished, tmp_path):
    path, result, _ = finished
    config = load_config(path, [f"output_dir={tmp_path / 'stopped'}"])

    def stop(row):
        if row.get("step") == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(config, listeners=[stop])
    assert signal.getsignal(signal.SIGTERM) is before
    folder = tmp_path / "stopped"
    # Step 3 was complete when the signal came, so step 4 is the one that was finished.
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"checkpoint-3", "checkpoint-4"}
    assert not (folder / "result.json").exists()
    with pytest.raises(ConfigError, match="unfinished"):
        run(config)
    resumed = run(config, resume=True)
    assert resumed.values["steps"] == 6
    assert adapter(resumed.folder) == adapter(result.folder)
    assert [row["step"] for row in read(folder / "events.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_second_signal_stops_at_once(finished, tmp_path):
    path, _, _ = finished

    def stop_twice(row):
        if row.get("step") == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(load_config(path, [f"output_dir={tmp_path / 'twice'}"]), listeners=[stop_twice])
    assert not list((tmp_path / "twice").glob("checkpoints/checkpoint-*"))


def test_resuming_after_the_last_checkpoint_takes_no_further_step(finished, tmp_path):
    """A run killed between its last checkpoint and its result."""
    path, result, _ = finished
    config = load_config(path, [f"output_dir={tmp_path / 'late'}"])
    first = run(config)
    (first.folder / "result.json").unlink()
    (first.folder / "adapter" / "adapter_model.safetensors").unlink()
    again = run(config, resume=True)
    assert again.values["steps"] == 6
    assert adapter(again.folder) == adapter(result.folder)
    assert again.values["safety"] == result.values["safety"]


def test_a_run_whose_only_checkpoint_is_damaged_never_restarts_silently(finished, tmp_path, holdfast):
    """The first attempt sets the checkpoint aside; the second must not take its absence for a fresh start."""
    path, _, _ = finished
    config = load_config(path, [f"output_dir={tmp_path / 'damaged'}", "train.max_steps=3"])
    folder = run(config).folder
    (folder / "result.json").unlink()
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["checkpoint-3"]
    (folder / "checkpoints" / "checkpoint-3" / "manifest.json").write_text("{")
    events = (folder / "events.jsonl").read_bytes()
    for _ in range(2):
        code, _, err = holdfast("train", folder / "config.yaml", "--resume")
        assert code == 6, err
        assert "none of the checkpoints verifies" in err
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["quarantine-checkpoint-3-1"]
        assert (folder / "events.jsonl").read_bytes() == events
        assert not (folder / "result.json").exists()


def test_the_result_says_what_the_run_cost_by_part(finished):
    _, result, _ = finished
    found = result.values["cost"]
    assert list(found["seconds"]) == ["loading", "asking", "preparing", "training", "saving", "measuring"]
    assert found["seconds"]["training"] == pytest.approx(result.values["seconds"], abs=0.05)
    assert all(value > 0 for value in found["seconds"].values())
    assert 2**20 < found["peak_memory"]["host"] <= peak_memory()


def test_the_monitors_seconds_are_no_seconds_of_training():
    assert cost({"asking": 3.0, "training": 10.0}, monitoring=4.0)["seconds"] == {
        "asking": 3.0, "training": 6.0, "monitoring": 4.0,
    }  # fmt: skip
    assert cost({"training": 10.0}, monitoring=0.0)["seconds"] == {"training": 10.0}


def test_a_finished_run_is_neither_repeated_nor_overwritten(finished):
    path, result, _ = finished
    config = load_config(path)
    stamp = (result.folder / "result.json").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="is finished"):
        run(config)
    assert run(config, resume=True).values == result.values
    assert (result.folder / "result.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_other_settings_is_refused_with_the_keys(finished, resume):
    path, result, _ = finished
    config = load_config(path, ["train.learning_rate=2e-3", "constraint.tau=0.2"])
    with pytest.raises(CheckpointError) as caught:
        run(config, resume=resume)
    assert "train.learning_rate: stored 0.001, now 0.002" in caught.value.what
    assert "constraint.tau: stored 0.1, now 0.2" in caught.value.what
    assert (result.folder / "result.json").exists()


def test_a_folder_in_use_is_refused(finished):
    path, result, _ = finished
    with RunLock(result.folder), pytest.raises(CheckpointError, match="in use"):
        run(load_config(path))


def test_a_foreign_folder_is_left_alone(run_file, tmp_path):
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(ConfigError, match="not empty"):
        run(load_config(run_file, [f"output_dir={foreign}"]))
    assert [p.name for p in foreign.iterdir()] == ["cat.jpg"]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["task.data=missing.jsonl"], DataError),
        (["safety.limit=2"], DataError),
        (["model=./nowhere"], ConfigError),
        (["constraint.beta=1"], InfeasibleError),
        (["train.lr_scheduler_type=nonsense"], ConfigError),
        (["defense.estimator=nonsense"], ConfigError),
    ],
)
def test_a_run_that_cannot_start_leaves_no_folder(run_file, tmp_path, overrides, error):
    with pytest.raises(error):
        run(load_config(run_file, overrides))
    assert not (tmp_path / "out").exists()


def test_several_safety_sets_and_full_fine_tuning(run_file, tmp_path):
    raw = yaml.safe_load(run_file.read_text())
    lines = (tmp_path / "safety.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("privacy", lines[::2]), ("refusals", lines[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    raw["safety"] = {name: {"data": f"{name}.jsonl"} for name in ("privacy", "refusals")}
    raw["lora"] = None
    raw["train"] |= {"max_steps": 2, "save_strategy": "no"}
    run_file.write_text(yaml.safe_dump(raw))
    rows: list[dict] = []
    result = run(load_config(run_file), listeners=[rows.append])
    assert set(result.values["safety"]) == {"privacy", "refusals"}
    assert set(rows[-1]["constraints"]) == {"privacy", "refusals"}
    assert (result.folder / "model" / "model.safetensors").exists()


def test_the_command_prints_the_verdict(run_file, holdfast, tmp_path):
    code, out, err = holdfast("train", run_file, "train.max_steps=2")
    assert code == 0
    assert out.splitlines()[0].endswith(str(tmp_path / "out" / "adapter"))
    assert "of 12 monitor examples (95 % upper bound " in out
    assert "degraded by more than 0.1 (kl_token); at most 20 % allowed: not shown to be within the limit" in out
    assert re.search(r"step 2/2  g -0\.\d+  loss \d+\.\d+  eta", err)
    said = (f"measuring the {model} on 48 examples" for model in ("model before training", "trained model"))
    before, after = (err.index(text) for text in said)
    trained = err.index("step 2/2")
    assert before < trained < after
    assert "{'loss'" not in out + err


def test_a_violated_limit_is_said_plainly_and_is_no_error(run_file, holdfast):
    tight = ["constraint.tau=0.01", "constraint.beta=100"]
    code, out, _ = holdfast("train", run_file, "defense=sft", "train.learning_rate=0.3", "train.max_steps=5", *tight)
    assert code == 0
    assert "OVER the limit" in out


def test_a_constrained_run_that_ends_outside_its_limit_exits_4(run_file, holdfast, monkeypatch):
    """The adapter and the result are written; the exit code keeps a pipeline from shipping it unseen."""
    from holdfast.runs.stages import result

    def outside(*arguments: object) -> dict[str, object]:  # it does not happen by itself
        return {name: entry | {"feasible": False} for name, entry in summary(*arguments).items()}

    summary = result.summary
    monkeypatch.setattr(result, "summary", outside)
    code, _, _ = holdfast("train", run_file, "train.max_steps=1")
    assert code == 4
    assert list(run_file.parent.rglob("result.json"))
    code, out, err = holdfast("train", run_file, "train.max_steps=1", f"output_dir={run_file.parent}/other", "--json")
    assert code == 4, err
    assert json.loads(out)["steps"] == 1
    code, _, _ = holdfast("train", run_file, "train.max_steps=1", f"output_dir={run_file.parent}/third", "defense=sft")
    assert code == 0  # plain SFT promises nothing


@pytest.mark.parametrize(("name", "constrains"), [("holdfast", True), ("penalty", False)])
def test_the_result_says_whether_the_limit_was_enforced_or_only_measured(
    run_file, holdfast, tmp_path, name, constrains
):
    code, out, err = holdfast("train", run_file, f"defense={name}", "train.max_steps=2")
    assert code == 0
    assert (f"{name} does not enforce this limit: the model was only measured by it" in out) == (not constrains)
    assert (f"defense {name!r} does not enforce these limits" in err) == (not constrains)
    assert "a single violator exceeds the budget" not in err  # the default averages over steps
    stored = json.loads((tmp_path / "out" / "result.json").read_text())
    assert stored["defense"] == {"name": name, "constrains": constrains}


@pytest.mark.parametrize("estimator", ["batch", "ema"])
def test_a_small_batch_is_warned_of_where_nothing_averages_over_steps(run_file, holdfast, estimator):
    code, _, err = holdfast("train", run_file, f"defense.estimator={estimator}", "train.max_steps=1")
    assert code == 0, err
    assert ("a single violator exceeds the budget" in err) == (estimator == "batch")  # 4 x 0.2 < 1


@pytest.mark.parametrize(
    ("beta", "defense", "warned"), [(10, "holdfast", True), (5, "holdfast", False), (10, "sft", False)]
)
def test_a_free_degradation_is_warned_of_where_it_steers(run_file, holdfast, beta, defense, warned):
    limit = ["constraint.unit=kl_token", "constraint.tau=0.2", f"constraint.beta={beta}"]
    for command in (["check"], ["train"]):
        code, _, err = holdfast(*command, run_file, *limit, f"defense={defense}", "train.max_steps=1")
        assert code == 0, err
        assert ("kl_token may cost nothing up to 0.1 nats per token (tau - 1/beta)" in err) == warned


@pytest.mark.parametrize(
    ("unit", "defense", "noted"),
    [("nll_token", "holdfast", True), ("kl_token", "holdfast", False), ("nll_token", "sft", False)],
)
def test_steering_by_likelihood_says_what_that_leaves_open(run_file, holdfast, unit, defense, noted):
    for command in ("check", "train"):
        code, _, err = holdfast(command, run_file, f"constraint.unit={unit}", f"defense={defense}", "train.max_steps=1")
        assert code == 0, err
        assert ("safety: nll_token holds the likelihood of whole replies" in err) == noted


def test_a_baseline_may_start_outside_a_limit_that_it_does_not_enforce(run_file, holdfast):
    code, out, err = holdfast("train", run_file, "defense=sft", "constraint.beta=1", "train.max_steps=2")
    assert code == 0, err
    assert "sft does not enforce this limit" in out


def test_json_is_the_only_thing_on_stdout(run_file, holdfast):
    code, out, _ = holdfast("train", run_file, "train.max_steps=1", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 1


def test_an_interrupted_command_exits_130(run_file, holdfast, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.runs.pipeline.run", interrupted)
    code, _, err = holdfast("train", run_file)
    assert code == 130
    assert "--resume" in err


def test_training_says_what_cannot_be_certified_before_the_model_is_loaded(run_file, holdfast, tmp_path):
    nothing = tmp_path / "nothing"
    code, _, err = holdfast("train", run_file, f"model={nothing}", "safety.openings=2")
    assert code == 2
    expected = "safety: 12 certify prompts cannot certify alpha 20 % at 95 % confidence over 2 openings: 17 are needed"
    assert err.index(expected) < err.index("error: ")
