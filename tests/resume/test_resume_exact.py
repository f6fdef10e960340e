"""A run that died after a save and was resumed by a new trainer is, bit for bit, the run that did not die."""

from __future__ import annotations

import errno
import resource
import shutil
import signal

import pytest
import torch
import transformers
from tests import tiny
from tests.resume.worker import CONSTRAINT, STEPS, build, rows_of, weights
from transformers import EarlyStoppingCallback, TrainerCallback

import holdfast as hf
from holdfast.core.errors import CheckpointError, ResourceError
from holdfast.training import snapshot


class DiedError(RuntimeError):
    """Stands for the end of the process."""


class DieAfterSave(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise DiedError


KL = hf.ChanceConstraint(tau=0.002, beta=500.0, unit="kl_token")
SAVES = {"save_strategy": "steps"}
CHECKPOINTED = {"gradient_checkpointing": True}  # layers run twice: in two of the variants
VARIANTS = {
    "update, Adam metric, ema": {"defense": {"name": "holdfast", "metric": "adam"}, "args": CHECKPOINTED},
    "update, anchored": {
        "defense": {
            "name": "holdfast",
            "metric": "adam_unit",
            "estimator": "table",
            "value_decay": 0.5,
            "reserve": 0.2,
            "anchor": True,
            "every": 2,
            "dual": 0.3,
            "trust_region": 0.3,
        }
    },
    "update, rows drawn by importance": {
        "defense": {
            "name": "holdfast",
            "draw": "importance",
            "anchor": True,
            "reserve": 0.2,
            "dual": 0.3,
            "verify": 6,
            "rest": 2,
        }
    },
    "update, identity, batch, safety rows two by two": {
        "defense": {"name": "holdfast", "metric": "identity", "estimator": "batch"},
        "args": {"safety_micro_batch_size": 2},
    },
    "gradient, batch": {
        "defense": {"name": "holdfast", "space": "gradient", "estimator": "batch"},
        "args": {"optim": "sgd"},
    },
    "gradient, ema": {"defense": {"name": "holdfast", "space": "gradient"}},
    "table": {"defense": {"name": "holdfast", "estimator": "table"}},
    "cvar": {
        "constraint": hf.ChanceConstraint(tau=0.05, majorizer="cvar", allow_infeasible_start=True, unit="nll_token")
    },
    "sft": {"defense": "sft"},
    "all parameters": {"peft_config": None, "constraint": KL, "args": {"learning_rate": 1e-3, **CHECKPOINTED}},
}
TWO = {
    "safety_dataset": {"first": tiny.rows(24, seed=2), "second": tiny.rows(20, seed=3, start="w2")},
    "constraint": {
        "first": CONSTRAINT,
        "second": hf.ChanceConstraint(tau=0.04, beta=25.0, unit="nll_first", first_k=2),
    },
}


def uninterrupted(folder, **changes):
    """Parameters and rows of a run that never saves."""
    trainer = build(folder, **changes)
    trainer.train()
    return weights(trainer), rows_of(folder)


def die_at(folder, step, *, args=None, **changes):
    """Train until the checkpoint of `step` is on disk."""
    trainer = build(folder, args={**(args or {}), **SAVES, "save_steps": step}, **changes)
    trainer.add_callback(DieAfterSave(step))
    with pytest.raises(DiedError):
        trainer.train()


def resumed(folder, checkpoint=True, **changes):
    trainer = build(folder, **changes)
    trainer.train(resume_from_checkpoint=checkpoint)
    return weights(trainer), rows_of(folder)


def assert_same(found, expected):
    for name, tensor in expected[0].items():
        assert torch.equal(tensor, found[0][name]), f"{name} differs by {(tensor - found[0][name]).abs().max()}"
    assert [row["step"] for row in found[1]] == list(range(1, len(expected[1]) + 1))
    assert found[1] == expected[1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run with the defaults of `build`, computed once."""
    return uninterrupted(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints 3 and 6 of a run that died after step 6."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    trainer = build(folder, args={**SAVES, "save_steps": 3})
    trainer.add_callback(DieAfterSave(6))
    with pytest.raises(DiedError):
        trainer.train()
    return folder


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """A folder with the checkpoint of step 5, after which the run died."""
    folder = tmp_path_factory.mktemp("died") / "run"
    die_at(folder, 5)
    return folder


@pytest.fixture
def cut(died, tmp_path):
    """The same, to be resumed."""
    return shutil.copytree(died, tmp_path / "cut")


@pytest.fixture
def copy(saved, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize("changes", [*VARIANTS.values(), TWO], ids=[*VARIANTS, "two constraints"])
def test_a_resumed_run_is_bit_identical(tmp_path, changes):
    expected = uninterrupted(tmp_path / "whole", **changes)
    die_at(tmp_path / "cut", 5, **changes)
    assert_same(resumed(tmp_path / "cut", **changes), expected)


@pytest.mark.parametrize(
    "step", [1, 7, 8], ids=["after the first", "at the end of an epoch", "after the first of an epoch"]
)
def test_wherever_it_stopped(tmp_path, plain, step):
    die_at(tmp_path / "cut", step)
    assert_same(resumed(tmp_path / "cut"), plain)


@pytest.mark.parametrize("steps", [STEPS, 7], ids=["in the middle of an epoch", "at the end of an epoch"])
def test_a_run_that_died_after_its_last_save_takes_no_further_step(tmp_path, steps):
    args = {"max_steps": steps}
    expected = uninterrupted(tmp_path / "whole", args=args)
    die_at(tmp_path / "cut", steps, args=args)
    assert_same(resumed(tmp_path / "cut", args=args), expected)


def test_a_run_that_was_asked_to_stop_goes_on(tmp_path, plain):
    """A signal saves and stops; that request must not be part of the checkpoint."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                control.should_save = control.should_training_stop = True

    trainer = build(tmp_path / "cut")
    trainer.add_callback(Stop())
    trainer.train()
    assert [path.name for path in trainer.store.checkpoints()] == ["checkpoint-4"]
    assert_same(resumed(tmp_path / "cut"), plain)


def test_the_filter_corrected_steps_before_and_after_the_stop(plain):
    """Or the tests above would compare plain fine-tuning."""
    active = [row["step"] for row in plain[1] if row["active"]]
    assert min(active) <= 5 < max(active)


def test_two_runs_are_equal_whatever_the_state_of_the_process(tmp_path, plain):
    torch.manual_seed(987)
    assert_same(uninterrupted(tmp_path / "again"), plain)


def test_the_comparison_can_fail(cut, plain, monkeypatch):
    """A resumed run that forgets the optimizer's moments is another run."""
    monkeypatch.setattr("holdfast.training.snapshot.load_optimizer_state", lambda optimizer, state: None)
    with pytest.raises(AssertionError):
        assert_same(resumed(cut), plain)


def test_dropout_continues_its_stream(cut, plain, monkeypatch):
    """So does one that forgets the random generators: dropout is on, and the resumed process starts elsewhere."""
    monkeypatch.setattr("holdfast.training.checkpointing.restore_rng", lambda state: None)
    with pytest.raises(AssertionError):
        assert_same(resumed(cut), plain)


# Best checkpoint and early stopping

WATCHED = {
    **SAVES, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
    "metric_for_best_model": "safety_cvar", "save_total_limit": 2,
}  # fmt: skip


def watched(folder, died_at=None, resume=None, patience=2):
    stopping = EarlyStoppingCallback(early_stopping_patience=patience)
    trainer = build(folder, args=WATCHED, callbacks=[stopping], defense="sft", model=tiny.model())
    if died_at:
        trainer.add_callback(DieAfterSave(died_at))
        with pytest.raises(DiedError):
            trainer.train()
        return None
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    return {
        "counter": stopping.early_stopping_patience_counter, "steps": state.global_step, "best": state.best_metric,
        "best step": state.best_global_step, "best name": state.best_model_checkpoint.rpartition("/")[2],
        "weights": {name: tensor.tolist() for name, tensor in weights(trainer).items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def stopped_early(tmp_path_factory):
    """Patience -> how the uninterrupted run ended."""
    return {patience: watched(tmp_path_factory.mktemp("whole") / "run", patience=patience) for patience in (2, 3)}


@pytest.mark.parametrize(("patience", "at"), [(2, 4), (2, 6), (3, 6), (3, 8)])
def test_early_stopping_and_the_best_checkpoint_survive(tmp_path, stopped_early, patience, at):
    expected = stopped_early[patience]
    assert expected["best step"] == 2  # safety only falls: every further evaluation spends patience
    assert expected["steps"] == 2 + 2 * patience
    watched(tmp_path / "cut", died_at=at, patience=patience)
    assert watched(tmp_path / "cut", resume=True, patience=patience) == expected


def test_the_best_checkpoint_of_a_moved_run_is_found(tmp_path, stopped_early):
    expected = stopped_early[2]
    watched(tmp_path / "cut", died_at=expected["steps"])
    (tmp_path / "cut").rename(tmp_path / "moved")
    assert watched(tmp_path / "moved", resume=True) == expected


# Damage


def test_one_flipped_byte_in_any_file_is_noticed(saved, tmp_path):
    """Every file in turn, at its first, middle and last byte; the store's tests flip single bits at more places."""
    names = sorted(
        path.relative_to(saved / "checkpoint-6") for path in (saved / "checkpoint-6").rglob("*") if path.is_file()
    )
    kinds = {str(name).split(".", maxsplit=1)[0] for name in names}
    assert {
        "trainable",
        "optimizer",
        "scheduler",
        "defense",
        "rng-0",
        "trainer_state",
        "manifest",
        "adapter_model",
    } <= kinds
    folder = shutil.copytree(saved, tmp_path / "run")
    trainer = build(folder)
    path = folder / "checkpoint-6"
    for name in names:
        original = (path / name).read_bytes()
        for at in {0, len(original) // 2, len(original) - 1}:
            (path / name).write_bytes(original[:at] + bytes([original[at] ^ 0x10]) + original[at + 1 :])
            with pytest.raises(CheckpointError, match=str(name)) as caught:
                trainer.train(resume_from_checkpoint=str(path))
            assert caught.value.exit_code == 6
        (path / name).write_bytes(original)
    assert trainer.state.global_step == 0
    trainer.store.verify(path)


@pytest.mark.parametrize("name", ["trainable.safetensors", "optimizer.safetensors", "rng-0.json", "manifest.json"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(copy, plain, name):
    damaged = copy / "checkpoint-6" / name
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert_same(resumed(copy), plain)
    assert (copy / "quarantine-checkpoint-6-1" / name).read_bytes() == data


def test_a_missing_file_too(copy, plain):
    (copy / "checkpoint-6" / "scheduler.json").unlink()
    assert_same(resumed(copy), plain)
    assert (copy / "quarantine-checkpoint-6-1").is_dir()


def test_an_intact_checkpoint_by_name(copy, plain):
    assert_same(resumed(copy, str(copy / "checkpoint-3")), plain)


def test_without_any_checkpoint_a_resume_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        build(tmp_path / "run").train(resume_from_checkpoint=True)


# Content

PICKLE_MARKS = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
ZIP_MARK = b"PK\x03\x04"


def is_pickle_or_zip(data: bytes) -> bool:
    return data.startswith((*PICKLE_MARKS, ZIP_MARK))


def test_no_file_of_a_checkpoint_is_a_pickle_or_an_archive(saved):
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        assert path.suffix in {".json", ".jsonl", ".safetensors", ".jinja", ".md"}, path.name
        assert not is_pickle_or_zip(path.read_bytes()), path.name


def test_nor_of_the_final_model(tmp_path):
    trainer = build(tmp_path / "run")
    trainer.save_model(str(tmp_path / "adapter"))
    found = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "training_args.json" in found
    assert not {name for name in found if name.endswith((".bin", ".pt", ".pth", ".pkl"))}
    assert not any(is_pickle_or_zip(path.read_bytes()) for path in (tmp_path / "adapter").iterdir())


def test_a_process_that_does_not_save_leaves_what_another_writes(tmp_path, monkeypatch):
    """transformers 5.23 has every process come by while the first one writes."""
    trainer = build(tmp_path / "run")
    written = tmp_path / "adapter" / "training_args.bin"
    written.parent.mkdir()
    written.write_bytes(b"as the first process is about to replace it")
    monkeypatch.setattr(type(trainer.args), "should_save", property(lambda _: False))
    monkeypatch.setattr(transformers.Trainer, "_save", lambda *_: None)
    trainer._save(str(written.parent))
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_the_search_for_pickles_can_fail(tmp_path):
    torch.save({"a": 1}, tmp_path / "a.pt")
    torch.save({"a": 1}, tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    assert is_pickle_or_zip((tmp_path / "a.pt").read_bytes())
    assert is_pickle_or_zip((tmp_path / "b.pt").read_bytes())


# A full disk


def test_a_full_disk_ends_the_run_and_leaves_the_previous_checkpoint(tmp_path, plain, monkeypatch):
    folder = tmp_path / "run"
    trainer = build(folder, args={**SAVES, "save_steps": 3})
    save_file, calls = snapshot.save_file, []  # type: ignore[attr-defined]

    def refused_the_second_time(tensors, path):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"\0" * 100)
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(snapshot, "save_file", refused_the_second_time)
    with pytest.raises(ResourceError, match="checkpoint 6 could not be written") as caught:
        trainer.train()
    assert caught.value.exit_code == 7
    assert [path.name for path in trainer.store.checkpoints()] == ["checkpoint-3"]
    assert not list(folder.glob(".tmp-*"))
    trainer.store.verify(folder / "checkpoint-3")
    assert_same(resumed(folder), plain)


def test_a_file_size_limit_too(tmp_path, plain):
    """The limit is the operating system's, so every writer meets it, safetensors' own included."""
    folder = tmp_path / "run"
    die_at(folder, 3)
    trainer = build(folder, args={**SAVES, "save_steps": 3})
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (8000, limits[1])
    )  # the event log stays below, the optimizer's file does not
    try:
        with pytest.raises(ResourceError, match="checkpoint 6 could not be written"):
            trainer.train(resume_from_checkpoint=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    trainer.store.verify(folder / "checkpoint-3")
    assert [path.name for path in trainer.store.checkpoints()] == ["checkpoint-3"]
    assert_same(resumed(folder), plain)


def test_rows_are_on_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    trainer = build(tmp_path / "run", args={**SAVES, "save_steps": 3, "max_steps": 3})
    order = []
    log, store = trainer.recorder.log_file(), type(trainer.store)
    sync, commit = log.sync, store.commit
    monkeypatch.setattr(log, "sync", lambda: (order.append("rows"), sync())[1])
    monkeypatch.setattr(store, "commit", lambda self, *a, **k: (order.append("checkpoint"), commit(self, *a, **k))[1])
    trainer.train()
    assert order == ["rows", "checkpoint"]
