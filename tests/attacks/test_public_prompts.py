"""Certificates without a safety file: prompts that everybody has, and a ledger that no folder's name resets."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests import behaving
from tests.asking_run import few_probes, train, write_run_file, write_task

CHECKPOINT, NOT_CERTIFIED = 6, 4
__all__ = ["few_probes"]
pytestmark = pytest.mark.usefixtures("few_probes")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory):
    """A folder whose cache is that of every command of this file."""
    folder = tmp_path_factory.mktemp("asked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(autouse=True)
def _shared_cache(_own_cache, root, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(root / "cache"))


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return behaving.saved(root / "model")


@pytest.fixture(scope="module")
def first(root: Path, model: Path) -> Path:
    """A run whose certify prompts may be opened once."""
    folder = root / "first"
    folder.mkdir()
    return train(write_run_file(folder, model, write_task(folder / "task.jsonl", 450, 40), openings=1))


@pytest.fixture(scope="module")
def second(root: Path, model: Path, first: Path) -> Path:
    """Another run on the same rows: a copy of the task file in another order, another folder, and other steps."""
    folder = root / "second"
    folder.mkdir()
    lines = (first.parent / "task.jsonl").read_text().splitlines(keepends=True)
    random.Random(5).shuffle(lines)
    copied = folder / "renamed.jsonl"
    copied.write_text("".join(lines))
    return train(write_run_file(folder, model, copied, openings=1), "train.learning_rate=1e-3", "train.max_steps=3")


@pytest.fixture(scope="module")
def certified(first: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["holdfast", "certify", str(first), "--device", "cpu"])
        with pytest.raises(SystemExit) as stopped:
            main()
    assert not stopped.value.code
    return first


def test_neither_another_folder_nor_a_copied_task_file_resets_the_ledger(certified, second, command):
    """Every run certifies on the bundled prompts: a run file copied beside a copied task would open them anew."""
    found = command("certify", second, "--device", "cpu")
    assert found.code == NOT_CERTIFIED
    assert "an undeclared opening never certifies" in found.err
    assert not (second / "refusals" / "certificate.json").exists()


def test_a_renamed_run_asks_the_same_question(certified, tmp_path, command):
    moved = Path(shutil.copytree(certified, tmp_path / "moved"))
    found = command("certify", moved, "--device", "cpu", "--confidence", 0.9, "--output", tmp_path / "out")
    assert found.code == NOT_CERTIFIED
    assert "an undeclared opening never certifies" in found.err


def test_check_says_that_the_opening_is_used(certified, second, command):
    found = command("check", second.parent / "run.yaml", f"output_dir={second.parent / 'third'}")
    assert found.code == 0
    assert f"openings used: 1 of 1 ({certified / 'refusals'}): this run cannot be certified" in found.out


def test_a_certificate_copied_into_another_runs_folder(certified, second, tmp_path, command):
    other = Path(shutil.copytree(second, tmp_path / "other"))
    for name in ("certificate.json", "certificate.parquet", "prompts.jsonl"):
        shutil.copy(certified / "refusals" / name, other / "refusals" / name)
    found = command("verify", other / "refusals")
    assert found.code == CHECKPOINT
    assert "the model of the run it lies in" in found.err
    command("report", other)
    card = (other / "README.md").read_text()
    assert "**Not certified.** The certificate is bound to another model after" in card


def test_the_public_count_cannot_be_lowered(certified, tmp_path, command):
    """A certificate that hides that its prompts are public: its sentence and figures are computed again."""
    from holdfast.records.certificate import CertificateRecord

    folder = Path(shutil.copytree(certified / "refusals", tmp_path / "certificate"))
    values = json.loads((folder / "certificate.json").read_text())
    stated = f"{values['screening']['public']} of the"
    values["statement"] = values["statement"].replace(stated, "0 of the")
    values["screening"]["public"] = 0
    CertificateRecord(**{k: v for k, v in values.items() if k not in ("version", "sha256")}).save(folder)
    found = command("verify", folder)
    assert (found.code, "ship with this version of holdfast" in found.err) == (CHECKPOINT, True)


def test_a_screening_without_its_conflicts(certified, tmp_path, command):
    """Whoever hides that rows were dropped must change the record that the certificate is bound to."""
    from holdfast.core.sealed_json import read_sealed, write_sealed

    moved = Path(shutil.copytree(certified, tmp_path / "moved"))
    path = moved / "screening" / "screening.json"
    write_sealed(path, read_sealed(path) | {"asked_rows": 1})
    values = json.loads((moved / "refusals" / "certificate.json").read_text())
    from holdfast.records.certificate import CertificateRecord

    values["places"]["splits"] = str(path)
    values = {k: v for k, v in values.items() if k not in ("version", "sha256")}
    CertificateRecord(**values).save(moved / "refusals")
    found = command("verify", moved / "refusals")
    assert (found.code, "was changed" in found.err) == (CHECKPOINT, True)
