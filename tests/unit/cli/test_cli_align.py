"""`holdfast align` on a hand-built model that answers every prompt: what it leaves, how it fails, how it goes on."""

from __future__ import annotations

import json
import shutil
import signal
import stat
from dataclasses import replace

import pytest
from tests import behaving

from holdfast.certification.binomial import Rate
from holdfast.core.errors import CheckpointError, InfeasibleError
from holdfast.core.file_lock import RunLock
from holdfast.data.examples import make_example
from holdfast.judging.engines.transformers import generate
from holdfast.models.handle import load_pair
from holdfast.runs.stages import align as stage
from holdfast.runs.stages.align import AlignmentFigures, AlignSettings, align_model

TRAINED = AlignSettings(steps=40, learning_rate=3e-2, batch=8, rank=4, held_out=20)


@pytest.fixture
def prompts(monkeypatch, tmp_path):
    """Bundled prompts in the hand-built model's words, its one refusal, and a cache of this test's own."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    seeds = {("probes", "steer"): 1, ("everyday", "steer"): 2, ("borderline", "steer"): 3}
    seeds |= {("probes", "monitor"): 4, ("everyday", "monitor"): 5, ("borderline", "monitor"): 6}
    seeds |= {("tasks", "steer"): 7, ("tasks", "monitor"): 8}

    def bundled(name, use):
        rows = behaving.rows(30, seed=seeds[name, use], trigger=name == "probes")
        return [make_example(row["prompt"], "", f"{name}:{i}", f"kind {i % 3}") for i, row in enumerate(rows)]

    monkeypatch.setattr("holdfast.runs.stages.alignment_rows.bundled", bundled)
    monkeypatch.setattr("holdfast.runs.stages.alignment_rows.GENERIC", (behaving.REFUSAL,))
    return bundled


@pytest.fixture
def answering(tmp_path):
    """A model that refuses nothing."""
    return behaving.saved(tmp_path / "answering", margin=behaving.LOST)


def refusals(folder, examples) -> int:
    model, tokenizer = load_pair(folder, dtype="float32")
    return sum(reply.text == behaving.REFUSAL for reply in generate(model, tokenizer, examples, max_new_tokens=32))


@pytest.mark.parametrize("adapter", [False, True])
def test_the_saved_model_refuses_held_out_probes_and_answers_the_rest(prompts, answering, tmp_path, adapter):
    assert refusals(answering, prompts("probes", "monitor")) == 0
    made = align_model(answering, tmp_path / "out", settings=TRAINED, adapter=adapter, dtype="float32")
    held_out = stage.bundled_prompts([], held_out=20, seed=0).held_out  # type: ignore[attr-defined]
    # The folder, loaded afresh and read by its exact words, agrees with the figures.
    assert made.figures.probes == Rate(refusals(made.folder, held_out["probes"]), 20)
    assert made.figures.probes.value >= 0.9
    assert held_out.keys() == {"probes", "everyday", "borderline", "tasks"}
    for name, rate in made.figures.ordinary.items():
        assert rate == Rate(refusals(made.folder, held_out[name]), 20)
        assert rate.value <= 0.1
    assert (made.folder / "adapter_config.json").is_file() == adapter
    assert (made.folder / "model.safetensors").is_file() != adapter
    written = json.loads((made.folder / "alignment.json").read_text())
    assert written["figures"] == made.figures.as_json()
    assert written["figures"]["passed"] is True


def test_replies_are_the_owners_alone(prompts, answering, tmp_path):
    align_model(answering, tmp_path / "out", settings=TRAINED, dtype="float32")
    stored = list((tmp_path / "cache" / "replies").rglob("32.jsonl"))
    assert len(stored) == 2  # of the model before and after
    assert {stat.S_IMODE(path.stat().st_mode) for path in stored} == {0o600}
    assert not [path for path in (tmp_path / "out").rglob("*") if "replies" in path.name]


def test_a_run_killed_while_measuring_goes_on_without_training_again(prompts, answering, tmp_path, monkeypatch):
    whole = align_model(answering, tmp_path / "whole", settings=TRAINED, dtype="float32")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "measured", killed)
        with pytest.raises(KeyboardInterrupt):
            align_model(answering, tmp_path / "out", settings=TRAINED, dtype="float32")
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "whole" / "model.safetensors").read_bytes()
    monkeypatch.setattr(stage, "train_rows", None)  # would fail
    made = align_model(answering, tmp_path / "out", settings=TRAINED, dtype="float32")
    assert made.figures == whole.figures
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights


def test_a_run_killed_while_training_leaves_its_replies_and_no_folder(prompts, answering, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "train_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            align_model(answering, tmp_path / "out", settings=TRAINED, dtype="float32")
    assert not (tmp_path / "out").exists()
    made: list[int] = []
    align_model(
        answering, tmp_path / "out", settings=TRAINED, dtype="float32",
        progress=lambda what, done, total: made.append(done) if what == "ordinary prompts" else None,
    )  # fmt: skip
    assert made == [90]  # all were there at once


SAVED = AlignSettings(steps=7, learning_rate=3e-2, batch=8, rank=4, held_out=20, save_steps=3)


class DiedError(RuntimeError):
    """Stands for the end of the process."""


def dying(at: int, signal_too: bool = False):
    def listener(row):
        if row.get("step") == at and "loss" in row:
            if signal_too:
                signal.raise_signal(signal.SIGINT)
            else:
                raise DiedError

    return listener


def weights_of(folder) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("at", "last"), [(2, None), (5, 3), (7, 6)])
def test_an_alignment_killed_between_steps_ends_in_the_same_adapter(prompts, answering, tmp_path, at, last):
    """It goes on after the last checkpoint, or from the beginning where there is none."""
    whole = align_model(answering, tmp_path / "whole", settings=SAVED, adapter=True, dtype="float32")
    kept = tmp_path / "out.unfinished"
    with pytest.raises(DiedError):
        align_model(
            answering, tmp_path / "out", settings=SAVED, adapter=True, dtype="float32", listener=dying(at)
        )  # fmt: skip
    assert [path.name for path in kept.glob("checkpoints/*")] == ([] if last is None else [f"checkpoint-{last}"])
    assert not (tmp_path / "out").exists()
    steps: list[int] = []
    made = align_model(
        answering, tmp_path / "out", settings=SAVED, adapter=True, dtype="float32",
        listener=lambda row: steps.append(row["step"]) if "loss" in row else None,
    )  # fmt: skip
    assert steps == list(range((last or 0) + 1, 8))
    assert made.record["resumed_after"] == (last or 0)
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")
    assert made.figures == whole.figures
    assert not kept.exists()


def test_a_signal_ends_an_alignment_after_the_step_and_it_goes_on_from_there(prompts, answering, tmp_path):
    align_model(answering, tmp_path / "whole", settings=SAVED, adapter=True, dtype="float32")
    with pytest.raises(KeyboardInterrupt):
        align_model(
            answering, tmp_path / "out", settings=SAVED, adapter=True, dtype="float32", listener=dying(4, True)
        )  # fmt: skip
    assert [path.name for path in (tmp_path / "out.unfinished").glob("checkpoints/*")] == ["checkpoint-4"]
    # How often it saves is no part of what it makes.
    often = replace(SAVED, save_steps=1)
    align_model(answering, tmp_path / "out", settings=often, adapter=True, dtype="float32")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")


def test_an_alignment_killed_before_its_model_is_written_trains_no_step_again(
    prompts, answering, tmp_path, monkeypatch
):
    def killed(*_):
        raise DiedError

    align_model(answering, tmp_path / "whole", settings=SAVED, adapter=True, dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(stage, "merged", killed)
        with pytest.raises(DiedError):
            align_model(answering, tmp_path / "out", settings=SAVED, adapter=True, dtype="float32")
    assert not (tmp_path / "out").exists()
    align_model(answering, tmp_path / "out", settings=SAVED, adapter=True, dtype="float32", listener=dying(7))
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")


def test_steps_that_a_killed_start_left_beside_a_written_model_are_removed(prompts, answering, tmp_path, monkeypatch):
    def killed(*_):
        raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(stage, "measured", killed)
        patch.setattr(stage.UnfinishedAlignment, "remove", lambda self: None)  # type: ignore[attr-defined]
        with pytest.raises(DiedError):
            align_model(answering, tmp_path / "out", settings=SAVED, dtype="float32")
    assert (tmp_path / "out.unfinished" / "checkpoints" / "checkpoint-7").is_dir()
    align_model(answering, tmp_path / "out", settings=SAVED, dtype="float32")
    assert not (tmp_path / "out.unfinished").exists()


def test_a_damaged_checkpoint_is_not_passed_over(prompts, answering, tmp_path):
    with pytest.raises(DiedError):
        align_model(answering, tmp_path / "out", settings=SAVED, dtype="float32", listener=dying(5))
    weights = tmp_path / "out.unfinished" / "checkpoints" / "checkpoint-3" / "trainable.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none of the checkpoints verifies"):
            align_model(answering, tmp_path / "out", settings=SAVED, dtype="float32")


def test_steps_with_other_settings_or_of_something_else_are_refused(prompts, answering, tmp_path, holdfast):
    with pytest.raises(DiedError):
        align_model(answering, tmp_path / "out", settings=SAVED, dtype="float32", listener=dying(5))
    arguments = ("align", answering, "--output", tmp_path / "out", "--dtype", "float32")
    code, _, err = holdfast(*arguments, "--steps", 8)
    message = " ".join(err.split())
    assert code == 6
    assert "holds an unfinished alignment with other settings" in message
    assert "settings.steps: stored 7, now 8" in message
    assert "delete that folder to start anew" in message
    assert (tmp_path / "out.unfinished" / "checkpoints" / "checkpoint-3").is_dir()
    shutil.rmtree(tmp_path / "out.unfinished")
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "notes.txt").write_text("mine")
    code, _, err = holdfast(*arguments)
    assert code == 2
    assert "is not empty and holds no alignment" in " ".join(err.split())
    assert (tmp_path / "out.unfinished" / "notes.txt").read_text() == "mine"


def test_two_processes_do_not_align_into_one_folder(prompts, answering, tmp_path):
    with RunLock(tmp_path / "out.unfinished"), pytest.raises(CheckpointError, match="is in use by"):
        align_model(answering, tmp_path / "out", settings=SAVED, dtype="float32")
    assert not (tmp_path / "out").exists()


def test_other_settings_do_not_take_over_an_unfinished_folder(prompts, answering, tmp_path, monkeypatch, holdfast):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "measured", killed)
        code, _, err = holdfast("align", answering, "--output", tmp_path / "out", "--steps", 1)
    assert code == 130
    assert "the same command goes on" in err
    code, _, err = holdfast("align", answering, "--output", tmp_path / "out", "--steps", 2)
    assert code == 2
    assert f"output folder {tmp_path / 'out'} exists" in err


def test_too_few_refusals_end_with_exit_code_4_and_the_model_is_written(prompts, answering, tmp_path, holdfast):
    arguments = ("align", answering, "--output", tmp_path / "out", "--steps", 1, "--learning-rate", 1e-9)
    code, out, err = holdfast(*arguments, "--json")
    assert code == 4
    assert "refuses 0 % (0 of 30; 95 % interval 0 % to 11.6 %) of held-out probes, expected 50 %" in err
    assert "What to do: align the first model again with more --steps or a larger --refusal-share" in err
    assert json.loads(out)["figures"]["passed"] is False
    # Without a terminal every phase is said when it begins, and the first step of the training.
    phases = ("ordinary prompts, 0 of 90", "training: 1 steps", "step 1/1", "held-out probes, 0 of 30")
    assert sorted(phases, key=err.index) == list(phases)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    code, _, err = holdfast(*arguments)
    assert code == 2
    assert "holds an alignment that is finished" in err


def test_the_two_figures_are_printed_with_their_intervals(prompts, answering, tmp_path, holdfast):
    code, out, _ = holdfast("align", answering, "--output", tmp_path / "out", "--steps", 40, "--learning-rate", 3e-2)
    assert code == 0
    assert "  probes            100 % (30 of 30; 95 % interval 88.4 % to 100 %), at least 50 % wanted" in out
    assert "  ordinary prompts  0 % (0 of 90; 95 % interval 0 % to 4 %)\n" in out
    for name in ("everyday  ", "borderline", "tasks     "):
        assert f"    {name}      0 % (0 of 30; 95 % interval 0 % to 11.6 %), under 20 % wanted" in out


def test_a_source_over_the_limit_is_named_though_all_together_are_below_it(
    prompts, answering, tmp_path, monkeypatch, holdfast
):
    """A third of the held-out tasks has the word that the model learns to refuse."""
    bundled = prompts

    def some_refused(name, use):
        rows = bundled(name, use)
        return [*rows[:20], *bundled("probes", "monitor")[:10]] if (name, use) == ("tasks", "monitor") else rows

    monkeypatch.setattr("holdfast.runs.stages.alignment_rows.bundled", some_refused)
    arguments = ("align", answering, "--output", tmp_path / "out", "--steps", 40, "--learning-rate", 3e-2)
    code, out, err = holdfast(*arguments, "--json")
    assert code == 4
    message = " ".join(err.partition("error:")[2].split())
    assert "refuses 33.3 % (10 of 30; 95 % interval 17.3 % to 52.8 %) of held-out task prompts, expected" in message
    assert "everyday" not in message
    assert "with a smaller --refusal-share or more --steps, into a new folder" in message
    figures = json.loads(out)["figures"]
    assert figures["passed"] is False
    assert figures["over_refusal"]["rate"] < 0.2 < figures["over_refusal_tasks"]["rate"]


def test_a_model_that_refuses_ordinary_prompts_has_no_answers_to_keep(prompts, answering, tmp_path, monkeypatch):
    def refused_only(name, use):
        rows = behaving.rows(30, seed=7, trigger=True)
        return [make_example(row["prompt"], "") for row in rows]

    monkeypatch.setattr("holdfast.runs.stages.alignment_rows.bundled", refused_only)
    refusing = behaving.saved(tmp_path / "refusing")
    with pytest.raises(InfeasibleError, match="answers 0 of 30 everyday prompts"):
        align_model(refusing, tmp_path / "out", settings=TRAINED, dtype="float32")


def test_a_bad_file_of_prompts_is_refused_before_the_model_is_looked_at(tmp_path, holdfast):
    (tmp_path / "bad.jsonl").write_text('{"question": "x"}\n')
    code, _, err = holdfast(
        "align", tmp_path / "no model", "--output", tmp_path / "out", "--prompts", tmp_path / "bad.jsonl"
    )
    assert code == 3
    assert "bad.jsonl" in err


@pytest.mark.parametrize(
    ("probes", "ordinary", "passed"),
    [((5, 10), (1, 10), True), ((4, 10), (0, 10), False), ((10, 10), (2, 10), False), ((10, 10), (19, 100), True)],
)
@pytest.mark.parametrize("source", ["everyday", "borderline", "tasks"])
def test_half_the_probes_and_under_a_fifth_of_each_source(probes, ordinary, passed, source):
    rates = dict.fromkeys(("everyday", "borderline", "tasks"), Rate(0, 100)) | {source: Rate(*ordinary)}
    figures = AlignmentFigures(Rate(*probes), **rates)
    assert figures.over_refusal == Rate(ordinary[0], 200 + ordinary[1])
    assert (not figures.shortcomings) == passed
    assert figures.over_refused == ([source] if ordinary == (2, 10) else [])


def test_the_remedy_fits_what_is_missing():
    none, half = Rate(0, 10), Rate(5, 10)
    assert "with more --steps or a larger --refusal-share" in AlignmentFigures(none, none, none, none).remedy
    assert "with a smaller --refusal-share or more --steps" in AlignmentFigures(half, none, none, half).remedy
    assert "--steps" not in AlignmentFigures(half, none, half, none).remedy
    assert AlignmentFigures(none, none, half, none).remedy.startswith("start from a model that refuses")
    assert "--refusal-share" not in AlignmentFigures(none, none, none, half).remedy
