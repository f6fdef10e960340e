"""Faults around training: a filter that is off, a folder of another process, a foreign file, a full disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import holdfast as hf
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.event_log import EventLog
from tests import tiny
from tests.attacks.shim import Outcome
from tests.unit.cli.conftest import _write_run_file

TRACEBACK = 1


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return _write_run_file(folder, tiny.saved(folder / "model", layers=1))


def ended(command: Callable[..., Outcome], *arguments: object) -> Outcome:
    """As `command`; an exception that reaches the interpreter ends a process with a traceback and exit code 1."""
    try:
        return command(*arguments, usage=True)
    except Exception as error:  # noqa: BLE001
        return Outcome(TRACEBACK, "", f"{type(error).__name__}: {error}")


# -- B13: constraints that switch the filter off


def filtered() -> tuple[torch.nn.Parameter, hf.SafetyFilter]:
    p = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    p.grad = torch.ones(2)
    return p, hf.SafetyFilter(torch.optim.SGD([p], lr=0.1), rate=1.0)


def test_a_detached_constraint_does_not_switch_the_filter_off():
    """B13: a detached g below zero was taken for a constraint that holds: `inactive`, and the step went unfiltered."""
    p, filt = filtered()
    with pytest.raises(ConfigError, match="no graph"):
        filt.step((p.sum() - 5.0).detach())
    assert torch.equal(p.detach(), torch.ones(2))


def test_a_constraint_computed_without_gradients_does_not_switch_the_filter_off():
    """B13: the same by a slip: g computed under `no_grad`."""
    p, filt = filtered()
    with torch.no_grad():
        g = p.sum() - 5.0
    with pytest.raises(ConfigError, match="no graph"):
        filt.step(g)


def test_a_constraint_of_another_model_does_not_switch_the_filter_off():
    """B13: a g that no trained parameter reaches has no gradient either."""
    _, filt = filtered()
    other = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="none of the optimizer's parameters"):
        filt.step(other.sum() - 5.0)


@pytest.mark.parametrize("make", [lambda p: p.sum().item() - 5.0, lambda p: p - 5.0], ids=["float", "vector"])
def test_what_is_no_scalar_tensor_is_refused_in_our_words(make):
    """B13: a float and a vector ended in raw torch errors."""
    p, filt = filtered()
    try:
        filt.step(make(p))
        refusal: Exception | None = None
    except Exception as error:  # noqa: BLE001
        refusal = error
    assert isinstance(refusal, ConfigError), type(refusal)


# -- B1: two starts in one new folder


def test_a_refused_start_leaves_the_folder_of_the_run_that_holds_it(command, run_file, tmp_path, monkeypatch):
    """B1: the process that lost the race for a new folder deleted it, with the holder's lock and files in it."""
    from holdfast.runs import pipeline

    folder, lock = tmp_path / "out", pipeline.RunLock  # type: ignore[attr-defined]
    holder = lock(folder)

    def after_the_holder(path: Path) -> object:
        """The other process starts here: after this one looked for the folder, before it asks for the lock."""
        holder.__enter__()
        (folder / "config.yaml").write_text("model: another\n")
        return lock(path)

    monkeypatch.setattr(pipeline, "RunLock", after_the_holder)
    try:
        result = command("train", run_file, f"output_dir={folder}")
        assert result.code == CheckpointError.exit_code
        assert "in use by process" in result.err
        assert (folder / "config.yaml").exists()
        assert (folder / "run.lock").exists()
    finally:
        holder.__exit__(None, None, None)


# -- B2: what an event log opens


def test_an_event_log_does_not_follow_a_link(tmp_path):
    """B2: `events.jsonl` as a link: the file it leads to was cut to nothing and written to."""
    victim = tmp_path / "notes.txt"
    victim.write_text("a line without its newline")
    (tmp_path / "events.jsonl").symlink_to(victim)
    with pytest.raises(CheckpointError, match="symbolic link"):
        EventLog(tmp_path / "events.jsonl")
    assert victim.read_text() == "a line without its newline"


@pytest.mark.parametrize("content", ["a line without its newline", "title\nand a last line without its newline"])
def test_an_event_log_does_not_cut_a_file_that_is_none(tmp_path, content):
    """B2: a file without a newline at its end was truncated."""
    path = tmp_path / "events.jsonl"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="expected an event log"):
        EventLog(path)
    assert path.read_text() == content


# -- B7: the disk is full when the result is written


def test_a_full_disk_at_the_end_names_the_checkpoint_and_loses_nothing(command, run_file, tmp_path, monkeypatch):
    """B7: the final save of the adapter ended in a traceback (exit 1), with a part of the adapter left in place."""
    import peft.peft_model

    folder, save = tmp_path / "out", peft.peft_model.safe_save_file

    def full(tensors: object, path: str, *arguments: object, **more: object) -> None:
        if "checkpoints" in Path(path).parts:
            save(tensors, path, *arguments, **more)
            return
        Path(path).write_bytes(b"a part of it")
        raise SafetensorError('Error while serializing: I/O error: Os { code: 28, message: "No space left on device" }')

    with monkeypatch.context() as patch:
        patch.setattr(peft.peft_model, "safe_save_file", full)
        result = ended(command, "train", run_file, f"output_dir={folder}")
    assert result.code == 7, result.err
    assert str(folder / "checkpoints" / "checkpoint-6") in result.err
    assert "--resume" in result.err
    assert not (folder / "adapter").exists()
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []
    resumed = command("train", run_file, f"output_dir={folder}", "--resume")
    assert resumed.code == 0, resumed.err
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size > 100


@pytest.mark.parametrize("setting", ["train.activation_offloading=true", "train.optim=adamw_bnb_8bit"])
def test_a_setting_for_a_gpu_is_refused_without_one(command, run_file, tmp_path, setting):
    """B7: settings that need a GPU, or a package for one, ended in a traceback on a machine without."""
    if torch.cuda.is_available() or importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("this machine has a GPU, or the package for one")
    folder = tmp_path / "out"
    result = ended(command, "train", run_file, f"output_dir={folder}", setting)
    assert result.code in (2, 7), result.err
    assert "What to do" in result.err
    assert not folder.exists()
