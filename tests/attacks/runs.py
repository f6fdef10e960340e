"""Trained runs and certificates of the tiny model, made once for a file of attacks; each attack gets a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.auditing.certifying import STRONG, Scene, scene
from tests.unit.cli.conftest import _write_run_file, tiny_model

__all__ = ["audited", "certified", "other_run", "pair", "run", "tiny_model", "trained"]


def _train(folder: Path, model: Path, *overrides: str) -> Path:
    from holdfast.runs.config import load_config
    from holdfast.runs.pipeline import run

    return run(
        load_config(_write_run_file(folder, model), ["train.max_steps=1", "train.warmup_steps=0", *overrides])
    ).folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A finished run."""
    return _train(tmp_path_factory.mktemp("trained"), tiny_model)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The same run in a folder that a test may change; its data stays where it was."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def other_run(run: Path) -> Path:
    """A run whose adapter is another one than the certificates of `certified` speak of, without an audit."""
    for name in ("audit.json", "audit.parquet"):
        (run / name).unlink()
    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A model, an adapter that hardly changes it, and a safety file."""
    return scene(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def certified(pair: Scene, tmp_path: Path, command) -> Scene:
    """A certificate in `output`; models and safety file are the test's own copies."""
    base = Path(shutil.copytree(pair.base, tmp_path / "base"))
    adapter = Path(shutil.copytree(pair.adapter, tmp_path / "adapter"))
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace(str(pair.base), str(base)))
    safety = Path(shutil.copy(pair.safety, tmp_path / "safety.jsonl"))
    made = Scene(base, adapter, safety, tmp_path / "certificate")
    assert certify(command, made).code == 0
    return made


def certify(command, made: Scene, *options: object):
    return command(
        "certify", "--before", made.base, "--after", made.adapter, "--prompts", made.safety, "--by", "likelihood",
        "--tau", 0.05, "--alpha", 0.2, "--output", made.output, "--device", "cpu", *options,
    )  # fmt: skip


@pytest.fixture
def audited(tmp_path: Path, command):
    """Run the audit of a pair that is over its limit: `audited()` gives (outcome, folder), again each time."""
    made = scene(tmp_path, size=STRONG)

    def audit():
        outcome = command(
            "audit", "--before", made.base, "--after", made.adapter, "--safety", made.safety, "--tau", 0.05,
            "--output", made.output, "--device", "cpu",
        )  # fmt: skip
        return outcome, made.output

    return audit
