"""Looks at certify prompts that the ledger of openings must see: A6, A8, A11 and A12."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.certification.ledger_state import Claim
from holdfast.certification.openings import Ledger, default_ledger
from holdfast.core.errors import ConfigError, HoldfastError, InfeasibleError
from tests import tiny
from tests.unit.auditing.certifying import CONSTRAINT, STRONG, Scene, scene, write_safety
from tests.unit.auditing.making import write_adapter
from tests.unit.cli.conftest import tiny_model, write_run_file  # noqa: F401  (fixtures)

DATA = 3
PREFIX = " ".join(f"w{i % 57}" for i in range(3, 43))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene(tmp_path_factory.mktemp("made"))


@pytest.fixture
def opened(made: Scene, tmp_path: Path) -> Scene:
    """A safety file whose one opening is used, and another model to certify."""
    first = made._replace(safety=write_safety(tmp_path / "safety.jsonl", tiny.rows(20, seed=3)), output=tmp_path / "a")
    assert first.certify().openings["this"] == 1
    other = write_adapter(tmp_path / "other", made.base, size=STRONG, seed=9)
    return first._replace(adapter=other, output=tmp_path / "b")


def test_the_ledger_never_moves_to_the_cache_in_silence(made, tmp_path, monkeypatch):
    """A6: where the data folder cannot be written, the ledger moved to the user's cache: one more "opening 1 of 1"."""
    folder = tmp_path / "data"
    folder.mkdir()
    safety, may = write_safety(folder / "safety.jsonl", tiny.rows(20, seed=3)), os.access

    def read_only(path: object, mode: int, **options: object) -> bool:
        return not (mode & os.W_OK and Path(str(path)) == folder) and may(path, mode, **options)

    monkeypatch.setattr(os, "access", read_only)
    with pytest.raises(HoldfastError) as refusal:
        made._replace(safety=safety, output=tmp_path / "out").certify()
    assert isinstance(refusal.value, ConfigError)
    assert "--ledger" in refusal.value.remedy
    assert not list(tmp_path.rglob("*.openings.json"))
    named = tmp_path / "named.json"
    assert made._replace(safety=safety, output=tmp_path / "out").certify(ledger=named).openings["this"] == 1


@pytest.mark.parametrize(
    "changed",
    [lambda text: f"w1 {text}", lambda text: f"{text} w1 w2", lambda text: f"{PREFIX} {text}"],
    ids=["word before", "words after", "long prefix"],
)
def test_a_constant_word_makes_no_fresh_prompts(opened, changed):
    """A8: one constant word before every prompt was a fresh set for the ledger."""
    rows = [row | {"prompt": changed(row["prompt"])} for row in tiny.rows(20, seed=3)]
    write_safety(opened.safety, rows)
    with pytest.raises(InfeasibleError) as refusal:
        opened.certify()
    assert "undeclared" in refusal.value.what


def test_an_introduction_that_is_dropped_makes_no_fresh_prompts(made, tmp_path):
    """A8, the other way round: opened with a word before every prompt, then without it."""
    rows = tiny.rows(20, seed=3)
    before = [row | {"prompt": f"w7 w8 {row['prompt']}"} for row in rows]
    first = made._replace(safety=write_safety(tmp_path / "safety.jsonl", before), output=tmp_path / "a")
    first.certify()
    write_safety(first.safety, rows)
    with pytest.raises(InfeasibleError) as refusal:
        first._replace(output=tmp_path / "b").certify(constraint=CONSTRAINT)
    assert "undeclared" in refusal.value.what


@pytest.fixture(scope="module")
def run_file(tmp_path_factory, tiny_model, write_run_file) -> Path:  # noqa: F811
    """A run file whose run is finished, in the folder `out` beside it."""
    from holdfast.runs.config import load_config
    from holdfast.runs.pipeline import run

    folder = tmp_path_factory.mktemp("run")
    path = write_run_file(folder, tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CACHE", str(folder / "cache"))
        run(load_config(path, ["train.max_steps=2", "train.save_steps=2"]))
    return path


def test_an_audit_does_not_spend_the_closed_share(command, run_file, tiny_model, tmp_path):  # noqa: F811
    """A11: an audit of a run's own safety file spent the share that is closed for its certificate."""
    run, safety = run_file.parent / "out", run_file.parent / "safety.jsonl"
    pair = ("--before", tiny_model, "--after", run / "adapter", "--safety", safety)
    found = command("audit", *pair, "--output", tmp_path / "audit")
    assert found.code == DATA
    assert f"12 of 60 examples are closed for certification of {run}" in found.err
    assert f"holdfast audit {run}" in found.err
    assert "--open" in found.err
    assert not (tmp_path / "audit").exists()
    assert json.loads(default_ledger(str(safety)).read_text())["looks"] == []
    prefixed = [row | {"prompt": f"please {row['prompt']}"} for row in map(json.loads, safety.open())]
    copy = write_safety(tmp_path / "copy.jsonl", prefixed)
    beside = ("--ledger", default_ledger(str(safety)))
    found = command("audit", *pair[:-1], copy, *beside, "--output", tmp_path / "audit")
    assert (found.code, "12 of 60 examples are closed" in found.err) == (DATA, True)
    assert command("audit", *pair, "--open", "--output", tmp_path / "audit").code in (0, 4)
    assert len(json.loads(default_ledger(str(safety)).read_text())["looks"]) == 1


@pytest.fixture
def spent(run_file) -> Path:
    """The run's certify share, opened once."""
    safety = run_file.parent / "safety.jsonl"
    ids = json.loads((run_file.parent / "out" / "splits.json").read_text())["ids"]["certify"]
    claim = Claim("b" * 64, "a" * 64, "nll_token", 0.1, 0.05, 8, 0.95, "fixed", {"template": "chat"})
    default_ledger(str(safety)).unlink(missing_ok=True)
    from holdfast.runs import pipeline
    from holdfast.runs.config import load_config

    config = load_config(run_file)
    if hasattr(pipeline, "close_shares"):  # what the start of the run entered
        pipeline.close_shares(config, pipeline.read_data(config))
    Ledger(default_ledger(str(safety))).open(claim, ids, declared=1)
    return run_file


def test_check_and_train_say_that_the_opening_is_used(command, spent, tmp_path, monkeypatch):
    """A12: a second run on the same safety file can never be certified, and nothing said so before training."""
    said = f"openings used: 1 of 1 ({spent.parent / 'out'})"
    second = f"output_dir={tmp_path / 'second'}"
    found = command("check", spent, second)
    assert (found.code, said in found.out) == (0, True)
    assert "openings: 2" in found.out

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.runs.pipeline.load_start", stop)
    found = command("train", spent, second)
    assert (found.code, said in found.err) == (130, True)


def test_init_writes_how_often_the_share_may_be_opened(command, tmp_path):
    """A12: the number of openings is fixed by the first one, and what `init` wrote did not show it."""
    assert command("init", tmp_path / "first").code == 0
    written = (tmp_path / "first" / "run.yaml").read_text().splitlines()
    settings = [line for line in written if not line.startswith("#")]
    # Without a safety file of its own, a run certifies on public prompts, whose openings `check` counts.
    assert any("openings: 1" in line for line in settings) or not any("safety" in line for line in settings)
