"""ZeRO-1 and 2 on two processes: the parameters of DDP, an applied step within the barrier, the same bits after a kill.

`make test-deepspeed` runs this file; the suite does not collect it.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import scale
from safetensors.torch import load_file

from holdfast.core.event_log import read
from tests import forkserver
from tests.deepspeed import cells
from tests.distributed import test_traffic as traffic
from tests.distributed.worker import without_time
from tests.sharding.cells import KILLS

pytest.importorskip("deepspeed", reason="make test-deepspeed installs it")
TOLERANCE = 1e-5


def stored(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}{rank}.pt", weights_only=True) for rank in range(2)]


def launched(folder: Path, target: Any) -> list[dict[str, Any]]:
    forkserver.ranks(target, folder, log=folder / "log")
    return stored(folder, "")


@pytest.fixture(scope="session")
def ddp(tmp_path_factory) -> list[dict[str, Any]]:
    return launched(tmp_path_factory.mktemp("ddp"), cells.under_ddp)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="session")
def zero(folder) -> list[dict[str, Any]]:
    return launched(folder, cells.under_zero)


@pytest.mark.parametrize(("name", "kind"), cells.LAYOUTS)
def test_the_parameters_are_those_of_ddp(ddp, zero, name, kind):
    ranks, expected = [rank[f"{name}, {kind}"] for rank in zero], ddp[0][name]
    found = ranks[0]
    assert [row["event"] for row in found["rows"]] == [row["event"] for row in expected["rows"]]
    assert sum(row["active"] for row in found["rows"]) >= 2  # else there is nothing to compare
    largest = max(float((found["weights"][key] - value).abs().max()) for key, value in expected["weights"].items())
    moved = float((found["steps"][-1] - found["steps"][0]).abs().max())
    print(f"{name}, {kind}: largest difference to DDP {largest:.1e}, largest change of a parameter {moved:.1e}")
    assert largest <= TOLERANCE < moved / 100
    assert all(rank["share"] == pytest.approx(0.5, abs=1e-3) for rank in ranks)
    assert expected["share"] == 1.0
    assert without_time(ranks[1]["rows"]) == without_time(found["rows"])
    assert all(torch.equal(ranks[1]["weights"][key], value) for key, value in found["weights"].items())


@pytest.mark.parametrize(("name", "kind"), cells.LAYOUTS[:1])
def test_what_is_measured_and_saved_is_the_trained_model(folder, ddp, zero, name, kind):
    found = zero[0][f"{name}, {kind}"]
    expected = {key: value for key, value in ddp[0][name]["metrics"].items() if "safety" in key}
    assert expected
    assert {key: found["metrics"][key] for key in expected} == pytest.approx(expected, abs=TOLERANCE)
    saved = load_file(folder / f"{name}, {kind}" / "final" / "adapter_model.safetensors")
    assert len(saved) == len(found["weights"])
    for key, value in saved.items():
        assert torch.equal(value, found["weights"][key.replace(".weight", ".default.weight")])


def test_the_model_can_be_asked_while_it_trains(ddp, zero):
    """Every rank holds the whole model."""
    for rank, expected in zip(zero, ddp, strict=True):
        assert rank["behaviour"]["shares"] == expected["behaviour"]["shares"]
        assert len(rank["behaviour"]["shares"]) >= 2
        assert rank["behaviour"]["result"] == expected["behaviour"]["result"]


def test_the_applied_step_satisfies_the_barrier(ddp, zero):
    """h . s <= -gamma v: s from the model's own weights, as its next forward uses them; h and v from DDP's run."""
    measured, found = ddp[0]["batch estimator"], zero[0]["batch estimator, stage 2"]
    steps = zip(found["steps"], found["steps"][1:], strict=False)
    constraints = zip(found["rows"], measured["values"], measured["gradients"], strict=True)
    corrected = 0
    for (row, value, h), (before, after) in zip(constraints, steps, strict=True):
        slope, wanted = float(h.double() @ (after.double() - before.double())), -found["rate"] * value
        print(f"{row['event']}: h.s = {slope:.6f}, -gamma v = {wanted:.6f}")
        assert slope <= wanted + TOLERANCE
        if row["event"] == "active":
            corrected += 1
            assert slope == pytest.approx(wanted, abs=TOLERANCE)
    assert corrected >= 2


@pytest.mark.parametrize(("name", "kind"), cells.COUNTED)
def test_messages_are_those_of_the_planned_table(zero, name, kind):
    plan = traffic.planned("zero1" if kind == "stage 1" else "zero2", name)
    for rank in zero:
        counted = rank["traffic"][f"{name}, {kind}"]
        traffic.compare(plan, counted["messages"])
        assert counted["weights"] == scale.memory(plan).weights + 4 * scale.trained(plan)  # every rank has the model


def test_a_step_that_is_not_finite_is_discarded(ddp, zero):
    found, expected = zero[0]["spoiled"], ddp[0]["spoiled"]
    assert [row["event"] for row in found["rows"]] == [row["event"] for row in expected["rows"]]
    assert found["rows"][2]["event"] == "nonfinite"
    assert torch.equal(found["steps"][2], found["steps"][3])
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0.0, atol=TOLERANCE)


def test_an_inactive_filter_is_bit_identical_to_trl(zero):
    for rank in zero:
        assert {row["event"] for row in rank["slack"]["rows"]} == {"inactive"}
        assert all(torch.equal(rank["slack"]["weights"][key], value) for key, value in rank["trl"]["weights"].items())


@pytest.fixture(scope="session")
def resumed(folder, zero) -> list[dict[str, Any]]:
    for kill in KILLS:
        log = folder / f"{kill}.log"
        codes = forkserver.ended(cells.killed, folder, kill, log=log)
        assert codes[-1] == -signal.SIGKILL, log.read_text()[-6000:]
        assert all(codes)
    forkserver.ranks(cells.resumed, folder, log=folder / "resumed.log")
    return stored(folder, "resumed-")


@pytest.mark.parametrize("kill", KILLS)
def test_a_run_of_which_one_rank_was_killed_goes_on_to_the_same_bits(folder, zero, resumed, kill):
    for rank, again in zip(zero, resumed, strict=True):
        whole, found = rank["whole"], again[kill]
        assert [row["step"] for row in found["rows"]] == [3, 4, 5]
        assert without_time(found["rows"]) == without_time(whole["rows"][2:])
        assert any(row["event"] != "inactive" for row in found["rows"])
        assert all(torch.equal(found["weights"][key], value) for key, value in whole["weights"].items())
    assert [row["step"] for row in read(folder / kill / "events.jsonl")] == [1, 2, 3, 4, 5]


def test_a_checkpoint_of_zero_is_refused_under_ddp(resumed):
    for rank in resumed:
        error, code, message = rank["under DDP"]
        assert (error, code) == ("CheckpointError", 6)
        assert "optimizer_parts: stored" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fused", "step: fused is not possible: DeepSpeed"),
        ("reentrant", "re-entrant gradient checkpointing"),
        ("defense", "defense 'penalty' under DeepSpeed"),
    ],
)
def test_what_is_refused_once_the_trainer_is_there(zero, name, words):
    for rank in zero:
        error, code, message = rank[name]
        assert (error, code) == ("UnsupportedError", 2)
        assert words in message


def test_out_of_memory_ends_a_run_of_one_process(tmp_path):
    """A second try would add to what DeepSpeed's buffers hold of the first."""
    forkserver.ranks(cells.scarce, tmp_path, log=tmp_path / "log", processes=1)
    assert torch.load(tmp_path / "0.pt", weights_only=True) == {"losses": 1}
