"""`accelerate launch -m holdfast audit` on two processes: the audit of one process, stored by the first."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from holdfast.auditing import windows
from holdfast.auditing.audit import audit
from holdfast.auditing.results import FOLDER, PartialResults
from holdfast.auditing.sharing import Sharing, joined
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, ConfigError, ResourceError, UnsupportedError
from holdfast.records.audit import Audit
from tests import forkserver, tiny
from tests.unit.auditing.making import write_adapter, write_rows

LIMIT = ChanceConstraint(tau=0.05, alpha=0.3, first_k=2, unit="nll_token")
N = 13
WINDOW = 4  # windows of 4, 4, 3 and 2: the shares of the two processes differ in size
SMALL = 2  # the last window has one example, and the second process none of it
LOSSES = ("nll_before", "nll_after", "first_before", "first_after", "nll_token", "nll_first")
SAME = ("id", "role", "category", "tokens", "first_tokens", "truncated", "violated")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.saved(folder / "base", layers=1)
    tiny.saved(folder / "other", layers=1, seed=1)
    write_adapter(folder / "adapter", folder / "base")
    write_rows(folder / "safety.jsonl", N)
    return folder


def command(folder: Path, output: Path) -> None:
    """As a user starts it; the model after is an adapter, so that both sides and KL come in one pass."""
    windows.WINDOW = WINDOW
    words = ["--before", folder / "base", "--after", folder / "adapter", "--safety", folder / "safety.jsonl"]
    words += ["--output", output, "--device", "cpu", "--alpha", "0.9", "--tau", "0.05", "--unit", "nll_token"]
    forkserver.command("audit", *map(str, words))


def dying(folder: Path, output: Path) -> None:
    """By Python, of two models, a pass each; the first process ends when it has stored two windows of the second."""
    windows.WINDOW, write = SMALL, PartialResults.write

    def until_the_second(self, name, k, *rest):
        write(self, name, k, *rest)
        if (name, k) == ("after", 1):
            os._exit(3)

    PartialResults.write = until_the_second
    data, both = folder / "safety.jsonl", (folder / "base", folder / "other")
    for _ in range(2):  # each audit joins the processes anew
        with joined("cpu") as (sharing, device):
            assert sharing.world == 2
    with joined("cpu") as (sharing, device):
        audit(*both, data, LIMIT, output=output, sharing=sharing, device=device)


def alone(folder: Path, after: str, output: Path | None = None) -> Audit:
    limit = LIMIT if after == "other" else ChanceConstraint(tau=0.05, alpha=0.9, unit="nll_token")
    return audit(folder / "base", folder / after, folder / "safety.jsonl", limit, output=output, device="cpu")


def require_equal(found: Audit, expected: Audit, losses=LOSSES) -> None:
    for name in losses:
        ours, theirs = (np.array(one.table.column(name).to_pylist()) for one in (found, expected))
        np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-6, err_msg=name)
    for name in SAME:
        assert found.table.column(name).to_pylist() == expected.table.column(name).to_pylist(), name
    for name in ("n", "violations", "violation_rate", "within", "truncated", "unit", "mode", "dtype"):
        assert getattr(found, name) == getattr(expected, name)
    assert 0 < found.violations < N
    assert found.noise_floor is not None


def test_the_command_gives_the_audit_of_one_process(models, tmp_path):
    log = tmp_path / "log"
    forkserver.ranks(command, models, tmp_path / "out", log=log)
    require_equal(Audit.load(tmp_path / "out"), alone(models, "adapter"), (*LOSSES, "kl_token", "kl_first"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.json", "audit.parquet"]
    assert log.read_text().count("written to") == 1
    assert f"audit {2 * N}/{2 * N} forward passes" in log.read_text()


def test_what_two_processes_began_one_finishes(models, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert forkserver.ended(dying, models, out, log=tmp_path / "log")[0] == 3
    stored = {name: len(list((out / FOLDER).glob(f"{name}-*.part"))) for name in ("before", "after")}
    assert stored == {"before": 7, "after": 2}
    monkeypatch.setattr(windows, "WINDOW", SMALL)
    require_equal(alone(models, "other", out), alone(models, "other"))


def test_shares_come_together_in_order(monkeypatch):
    shares = [Sharing(rank, 3) for rank in range(3)]
    items = list(range(10, 17))
    assert [share.own(items) for share in shares] == [[10, 13, 16], [11, 14], [12, 15]]
    assert [share.own(items[:2]) + share.own(items[2:], start=2) for share in shares] == [s.own(items) for s in shares]
    gathered = [{"x": np.array(share.own(items))} for share in shares]
    monkeypatch.setattr("holdfast.core.ranks.gather_objects", lambda _: gathered)
    assert shares[0].together(gathered[0])["x"].tolist() == items
    gathered[1:] = [{"x": np.array([11])}, {}]
    gathered[0] = {"x": np.array([10])}
    assert shares[0].together(gathered[0])["x"].tolist() == [10, 11]


def test_other_files_on_another_machine_are_refused(monkeypatch):
    monkeypatch.setattr("holdfast.core.ranks.gather_objects", lambda value: ["a", "b"])
    Sharing(0, 2).require_same("models", "a")
    with pytest.raises(CheckpointError, match="the 2 processes see other models"):
        Sharing(1, 2).require_same("models", "b")


@pytest.mark.parametrize(
    ("variables", "device", "error", "told"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, None, UnsupportedError, "an audit under FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, None, UnsupportedError, "an audit under DEEPSPEED"),
        ({}, "cuda:1", ConfigError, "device cuda:1 for each of 2 processes"),
        ({}, "cuda", ResourceError, "torch sees no CUDA device"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(monkeypatch, variables, device, error, told):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=told), joined(device):
        pass


def test_a_judge_is_refused_on_several_processes(models):
    with pytest.raises(UnsupportedError, match="a judge in an audit on 2 processes"):
        audit(
            models / "base", models / "other", models / "safety.jsonl", LIMIT, judge="refusal", device="cpu",
            sharing=Sharing(0, 2),
        )  # fmt: skip
