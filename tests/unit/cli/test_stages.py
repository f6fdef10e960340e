"""The stages below the command line: run folders, signals, estimates, preparation."""

from __future__ import annotations

import json
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from holdfast.cli.train import describe_entry
from holdfast.core.errors import CheckpointError, ConfigError, DataError
from holdfast.core.file_lock import RunLock
from holdfast.data.examples import as_chat, make_example
from holdfast.models.handle import load_tokenizer
from holdfast.runs.config import config_from_dict
from holdfast.runs.pipeline import read_data, run
from holdfast.runs.stages.certifiable import certify_note
from holdfast.runs.stages.estimate import SidePasses, Size, Steps, disk_of_rows, memory, passes_beside, steps, work
from holdfast.runs.stages.finetune import Interruption, build_trainer
from holdfast.runs.stages.prepare import prepare
from holdfast.runs.stages.run_folder import RunFolder

WORDS = ("amber", "birch", "cedar", "daisy", "ebony", "fern", "grape", "hazel", "ivory", "jade", "kelp", "lemon")
SETTINGS = {"seed": 1, "train": {"learning_rate": 0.1}, "output_dir": "a"}


# -- run folders


def test_a_new_folder_is_free(tmp_path):
    RunFolder(tmp_path / "new").require_free(SETTINGS, resume=False)
    RunFolder(tmp_path).require_free(SETTINGS, resume=True)


def test_the_folders_place_is_no_setting(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config(SETTINGS)
    folder.require_free({**SETTINGS, "output_dir": "moved"}, resume=False)


@pytest.mark.parametrize("made", ["events.jsonl", "checkpoints/checkpoint-1"])
def test_a_started_run_needs_resume(tmp_path, made):
    folder = RunFolder(tmp_path)
    folder.write_config(SETTINGS)
    (tmp_path / made).mkdir(parents=True)
    with pytest.raises(ConfigError, match="unfinished") as caught:
        folder.require_free(SETTINGS, resume=False)
    assert "--resume" in caught.value.remedy
    folder.require_free(SETTINGS, resume=True)


@pytest.mark.parametrize(
    ("name", "committed"),
    [
        ("checkpoint-3", True),
        ("quarantine-checkpoint-3-1", True),
        (".old-checkpoint-3", True),
        (".tmp-checkpoint-3", False),
        (".tmp-delete-checkpoint-3", False),
    ],
)
def test_every_committed_checkpoint_counts(tmp_path, name, committed):
    folder = RunFolder(tmp_path)
    (folder.checkpoints / name).mkdir(parents=True)
    assert folder.has_checkpoints() is committed


def test_other_settings_are_listed_however_deep(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config(SETTINGS)
    with pytest.raises(CheckpointError) as caught:
        folder.require_free({"seed": 1, "train": {}, "lora": {"r": 3}}, resume=True)
    assert "lora.r: stored None, now 3" in caught.value.what
    assert "train.learning_rate: stored 0.1, now None" in caught.value.what
    assert "seed" not in caught.value.what


def test_damaged_settings_are_a_checkpoint_error(tmp_path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("a: [")
    with pytest.raises(CheckpointError, match="cannot be read"):
        folder.require_free(SETTINGS, resume=False)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "file").require_free(SETTINGS, resume=False)


def test_only_a_new_folder_without_a_step_is_removed(tmp_path):
    new, begun, old = RunFolder(tmp_path / "new"), RunFolder(tmp_path / "begun"), RunFolder(tmp_path / "old")
    old.path.mkdir()
    for folder in (new, begun, old):
        with RunLock(folder.path) as lock, folder.kept_if_started(made=lock.made):
            folder.write_config(SETTINGS)
            (folder.path / "refusals").mkdir()
            for name in ("splits.json", "refusals/reference.json", "refusals/reference.safetensors"):
                (folder.path / name).touch()
            if folder is begun:
                folder.events.touch()
    assert [folder.config.exists() for folder in (new, begun, old)] == [False, True, True]
    assert not new.path.exists()


def test_what_no_run_made_stays_in_a_folder_that_is_given_up(tmp_path):
    folder = RunFolder(tmp_path / "new")
    with RunLock(folder.path) as lock, folder.kept_if_started(made=lock.made):
        folder.write_config(SETTINGS)
        (folder.path / "pictures").mkdir()
        (folder.path / "pictures" / "cat.jpg").touch()
        (folder.path / "note.txt").touch()
    assert {p.name for p in folder.path.rglob("*")} == {"pictures", "cat.jpg", "note.txt"}


# -- signals


def control() -> SimpleNamespace:
    return SimpleNamespace(should_save=False, should_training_stop=False)


def test_the_first_signal_asks_and_the_second_stops():
    asked = control()
    with Interruption() as interruption:
        interruption.on_train_begin(None, None, None)
        interruption.on_step_end(None, SimpleNamespace(global_step=1), asked)
        assert (asked.should_save, asked.should_training_stop) == (False, False)
        signal.raise_signal(signal.SIGINT)
        interruption.on_step_end(None, SimpleNamespace(global_step=2), asked)
        assert (asked.should_save, asked.should_training_stop) == (True, True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_outside_training_the_first_signal_stops():
    with Interruption() as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        interruption.on_train_begin(None, None, None)
        interruption.on_train_end(None, None, None)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_thread_may_run_without_handlers():
    failed: list[BaseException] = []

    def work():
        try:
            with Interruption():
                pass
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []


def test_a_signal_at_one_process_stops_all(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        asked = control()
        with Interruption() as interruption:
            interruption.on_train_begin(None, None, None)
            signal.raise_signal(signal.SIGTERM)
            where = SimpleNamespace(device=torch.device("cpu"))
            interruption.on_step_end(where, SimpleNamespace(global_step=2), asked)
        assert asked.should_training_stop
    finally:
        torch.distributed.destroy_process_group()


# -- estimates


def test_memory_by_hand():
    shape = LlamaConfig(hidden_size=10, num_attention_heads=1, num_hidden_layers=3, vocab_size=100)
    found = memory(Size(1000, 10), shape, dtype="bfloat16", full=False, rows=2, length=5, checkpointing=True)
    assert found.weights == 2000
    assert found.training_state == 10 * 4 * 7  # weights, gradient, two moments, snapshot, grad g, its average
    assert found.activations == 10 * ((3 * 10 + 17 * 10) * 2 + 100 * 8)
    assert found.total == found.weights + found.training_state + found.activations


@pytest.mark.parametrize(
    ("rows", "epochs", "limit", "expected"),
    [(60, 1, -1, 8), (60, 2, -1, 16), (61, 1, -1, 8), (1, 3, -1, 3), (60, 1, 5, 5), (64, 0.5, -1, 4)],
)
def test_steps_by_hand(rows, epochs, limit, expected):
    arguments = SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        max_steps=limit,
        safety_batch_size=None,
    )
    found = steps(arguments, task_rows=rows, constraint_rows=16)
    assert (found.steps, found.task_batch, found.safety_batch) == (expected, 8, 8)
    assert found.safety_epochs == expected * 8 / 16


def test_the_disk_of_rows_is_what_they_take(tiny_model, tmp_path, monkeypatch, caplog):
    """Measured while a run has its rows on disk; a sample stands for all of them."""
    taken: list[int] = []

    def built(*, rows, **given):
        trainer = build_trainer(rows=rows, **given)
        taken.append(sum(file.stat().st_size for file in rows.iterdir()))
        return trainer

    monkeypatch.setattr("holdfast.runs.stages.estimate.SAMPLE", 50)
    monkeypatch.setattr("holdfast.runs.stages.run_folder.MUCH_DISK", 1)
    monkeypatch.setattr("holdfast.runs.pipeline.build_trainer", built)
    write(tmp_path / "task.jsonl", [{"prompt": f"find the lamp {n} " * 9, "completion": "yes"} for n in range(400)])
    settings = {
        "model": str(tiny_model), "task": str(tmp_path / "task.jsonl"), "output_dir": str(tmp_path / "out"),
        "defense": "sft", "stage": "align", "dtype": "float32", "lora": {"target_modules": ["q_proj"]},
        "train": {"max_steps": 1, "use_cpu": True, "bf16": False, "dataloader_pin_memory": False},
    }  # fmt: skip
    config = config_from_dict(settings)
    with caplog.at_level("INFO", "holdfast.runs"):
        run(config)
    tokenizer = load_tokenizer(str(tiny_model))
    expected = disk_of_rows(read_data(config).task, tokenizer)
    assert expected == pytest.approx(taken[0], rel=0.05)
    (said,) = [message for message in caplog.messages if "the task's rows take about" in message]
    assert said.startswith("estimated: ")
    assert disk_of_rows([], tokenizer) == 0


def test_rows_that_do_not_fit_on_the_disk_are_a_warning(tiny_model, tmp_path, monkeypatch, caplog):
    from shutil import disk_usage

    real = disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: real._replace(free=100))
    task = [as_chat(make_example("find the lamp", "yes", "row 1"))]
    RunFolder(tmp_path).announce_rows(task, load_tokenizer(str(tiny_model)))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"of disk in {tmp_path} while it trains, and 0.0 GiB are free" in record.getMessage()


@pytest.mark.parametrize("lacking", ["chat_template", "eos_token"])
def test_a_tokenizer_that_the_trainer_completes_is_no_obstacle(tiny_model, tmp_path, monkeypatch, caplog, lacking):
    monkeypatch.setattr("holdfast.runs.stages.run_folder.MUCH_DISK", 1)
    chat, plain = as_chat(make_example("find the lamp", "yes", "row 1")), make_example("find the lamp", "yes", "row 1")
    tokenizer = load_tokenizer(str(tiny_model))
    caplog.set_level("INFO", "holdfast.runs")
    RunFolder(tmp_path).announce_rows([chat], tokenizer)
    assert len(caplog.records) == 1
    setattr(tokenizer, lacking, None)
    RunFolder(tmp_path).announce_rows([chat], tokenizer)
    assert len(caplog.records) == 1
    RunFolder(tmp_path).announce_rows([plain], tokenizer)
    assert len(caplog.records) == (2 if lacking == "chat_template" else 1)


# -- preparation


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(verb: str, n: int = 12) -> list[dict[str, str]]:
    return [{"prompt": f"{verb} {w} {w[::-1]} {w * 2}", "completion": f"no {w}"} for w in WORDS[:n]]


def test_prepare_reads_splits_and_makes_conversations(tmp_path):
    task = {"data": write(tmp_path / "task.jsonl", pairs("find"))}
    safety = {
        "data": write(tmp_path / "safety.jsonl", pairs("take")),
        "fractions": (0.5, 0.25, 0.25),
        "on_leak": "error",
    }
    found = prepare(task, {"safety": safety}, template="chat", seed=1)
    assert {example.kind for example in found.task} == {"chat"}
    split = found.safety["safety"]
    assert (len(split.constraint), len(split.monitor), len(split.certify)) == (6, 3, 3)
    plain = prepare(task, {"safety": safety}, template="none", seed=1)
    assert {example.kind for example in plain.task} == {"plain"}
    assert plain.safety["safety"].record.ids == split.record.ids


def test_a_leak_is_refused_or_moved(tmp_path):
    rows = pairs("take")
    task = {"data": write(tmp_path / "task.jsonl", rows[:6])}
    safety = {"data": write(tmp_path / "safety.jsonl", rows), "fractions": (0.4, 0.2, 0.4), "on_leak": "error"}
    with pytest.raises(DataError) as caught:
        prepare(task, {"safety": safety}, template="chat", seed=3)
    assert "on_leak" in caught.value.remedy
    moved = prepare(task, {"safety": {**safety, "on_leak": "move"}}, template="chat", seed=3)
    assert moved.safety["safety"].record.moved_from_certify > 0


def asked(*contents: str) -> dict[str, list[dict[str, str]]]:
    """A conversation with a reply after each user turn; the first content is the system prompt, if any."""
    system, *users = contents
    turns = [{"role": "system", "content": system}] if system else []
    for user in users:
        turns += [{"role": "user", "content": user}, {"role": "assistant", "content": "yes"}]
    return {"messages": turns}


HOUSE = "You are the assistant of a hardware shop in Leeds; answer politely, briefly, and without prices."
INSIDE = {
    "system prompt": lambda leak: asked(HOUSE, leak),
    "second turn": lambda leak: asked("", "Where do you keep the oak boards these days?", leak),
    "text row": lambda leak: {"text": f"### Question: {leak} ### Answer: take the left one of the two and go home"},
}


@pytest.mark.parametrize("form", INSIDE)
def test_a_leak_inside_a_longer_row_is_refused_or_moved(tmp_path, form):
    rows = [{**row, "prompt": f"{row['prompt']} from the shed"} for row in pairs("take")]
    safety = {"data": write(tmp_path / "safety.jsonl", rows), "fractions": (0.4, 0.2, 0.4), "on_leak": "error"}
    chat = form != "text row"
    harmless = {"data": write(tmp_path / "other.jsonl", [INSIDE[form]("find the blue paint for me")])}
    certify = (
        prepare(harmless, {"safety": safety}, template="chat" if chat else "none", seed=3).safety["safety"].certify
    )
    leak = next(row["prompt"] for row in rows if row["prompt"] in str(certify[0].prompt))
    task = {"data": write(tmp_path / "task.jsonl", [INSIDE[form](leak)])}
    with pytest.raises(DataError, match=f"1 of {len(certify)} certify prompts"):
        prepare(task, {"safety": safety}, template="chat" if chat else "none", seed=3)
    moved = prepare(
        task, {"safety": {**safety, "on_leak": "move"}}, template="chat" if chat else "none", seed=3
    ).safety["safety"]
    assert {e.id for e in moved.certify} == {e.id for e in certify[1:]}


def test_one_set_may_not_steer_by_what_another_watches(tmp_path):
    task = {"data": write(tmp_path / "task.jsonl", pairs("find"))}
    blocks = {"fractions": (0.5, 0.25, 0.25), "on_leak": "error"}
    first = {"data": write(tmp_path / "a.jsonl", pairs("take")), **blocks}
    apart = {"data": write(tmp_path / "b.jsonl", pairs("hide")), **blocks}
    # Other rows of the same prompts fall into other roles.
    same = {"data": write(tmp_path / "c.jsonl", pairs("take", 9)), **blocks}
    assert set(prepare(task, {"a": first, "b": apart}, template="chat", seed=1).safety) == {"a", "b"}
    with pytest.raises(DataError, match=r"prompts of safety set '[ac]' are constraint prompts of '[ac]'"):
        prepare(task, {"a": first, "c": same}, template="chat", seed=1)


def test_text_rows_need_the_plain_template(tmp_path):
    task = {"data": write(tmp_path / "task.jsonl", [{"text": "once upon a time"}])}
    safety = {
        "data": write(tmp_path / "safety.jsonl", pairs("take")),
        "fractions": (0.5, 0.25, 0.25),
        "on_leak": "error",
    }
    with pytest.raises(DataError) as caught:
        prepare(task, {"safety": safety}, template="chat", seed=1)
    assert "template: none" in caught.value.remedy
    assert len(prepare(task, {"safety": safety}, template="none", seed=1).task) == 1


def test_work_counts_forward_backward_and_trained_parameters():
    """One step of 2 task and 3 side rows of 10 tokens; 100 parameters, 4 trained: 50 tokens x (4 x 100 + 2 x 4)."""
    count = Steps(steps=1, task_batch=2, safety_batch=3, safety_epochs=0.1)

    def flop(trained: int, looked: int, checkpointing: bool = False) -> float:
        side = SidePasses(trained, looked, batch=3, tokens=10)
        return work(Size(100, 4), count, task_tokens=10, checkpointing=checkpointing, side=side)

    assert flop(1, 0) == 50 * 408
    assert flop(0, 0, checkpointing=True) == 20 * 608
    assert flop(2, 0) == 80 * 408
    assert flop(1, 2) == 50 * 408 + 60 * 200


@pytest.mark.parametrize(
    ("passes", "stage", "expected"),
    [
        ("1 forward + backward", "finetune", (0, 0)),
        ("3 forward + backward", "align", (2, 0)),
        ("2 forward + backward, 1 forward", "finetune", (1, 1)),
        ("2 forward + 1 backward", "finetune", (1, 0)),
        ("align: 4 forward + backward; finetune: 1 forward + backward, 2 forward", "align", (3, 0)),
        ("align: 4 forward + backward; finetune: 1 forward + backward, 2 forward", "finetune", (0, 2)),
        ("it depends", "finetune", (0, 0)),
    ],
)
def test_passes_are_read_from_a_defenses_words(passes, stage, expected):
    assert passes_beside(passes, stage) == expected


def test_a_run_over_the_limit_on_either_split_is_not_called_within_it():
    rates = {
        "constraint": {"violation_rate": 0.2, "violation_upper": 0.51, "n": 10.0},
        "monitor": {"violation_rate": 0.0, "violation_upper": 0.45, "n": 5.0},
    }
    line = describe_entry({**rates, "tau": 0.1, "unit": "nll_token", "alpha": 0.05, "feasible": False})
    assert line.startswith("20 % of 10 constraint examples (95 % upper bound 51 %) and 0 % of 5 monitor examples")
    assert "OVER the limit" in line


# -- whether the certify share can certify


def certify_share(n: int, *, examples: int | None = None, fractions=(0.6, 0.2, 0.2)) -> SimpleNamespace:
    counts = {"certify": n if examples is None else examples}
    return SimpleNamespace(clusters={"certify": n}, counts=counts, fractions=fractions)


@pytest.mark.parametrize(
    ("share", "openings", "expected"),
    [
        (
            certify_share(4),
            1,
            "4 certify prompts cannot certify alpha 5 % at 95 % confidence: 59 are needed"
            " (about 295 safety prompts at these fractions)",
        ),
        (
            certify_share(58, fractions=None),
            1,
            "58 certify prompts cannot certify alpha 5 % at 95 % confidence: 59 are needed",
        ),
        (
            certify_share(59, examples=70),
            2,
            "59 certify prompts (near-duplicates count once) cannot certify alpha 5 % at 95 % confidence over 2"
            " openings: 72 are needed (about 360 safety prompts at these fractions)",
        ),
        (certify_share(59), 1, "59 certify prompts: none may regress"),
        (certify_share(92), 1, "92 certify prompts: none may regress"),
        (certify_share(93), 1, None),
        (certify_share(0, fractions=(0.8, 0.2, 0.0)), 1, "no certify share: this run cannot be certified"),
    ],
)
def test_a_certify_share_says_what_it_can_certify(share, openings, expected):
    assert certify_note(share, alpha=0.05, openings=openings) == expected


def test_an_alpha_that_nothing_can_certify_is_said_and_no_error():
    found = certify_note(certify_share(4), alpha=1e-20, openings=1)
    assert "cannot certify alpha" in found
    assert "needs more than 1e+15 prompts" in found


def test_a_run_killed_while_it_wrote_its_settings_can_be_started_again(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    leftover = folder.path / ".config.yaml.0123.tmp"
    leftover.write_text("model: ")
    folder.require_usable({}, resume=True)
    assert leftover.exists(), "`check` changes nothing: another process may be writing"
    folder.require_free({}, resume=True)
    assert not leftover.exists()
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        folder.require_free({}, resume=True)
