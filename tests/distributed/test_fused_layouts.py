"""A fused step on two processes is the one of a single process, and the two passes of both; sharded models keep two."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.defense_cases import largest_difference
from tests.distributed import fused_cases
from tests.distributed.fused_cases import IN_TWO_PASSES, PROBLEMS, SKIPPED, STEPS
from tests.distributed.test_layouts import apart

EXACT = 1e-9  # float64: the processes sum in another order
HEAD = 1e-6  # both paths compute the head in float32, over differently cut batches
KL_HEAD = 1e-5  # its gradient is p - p_0, two numbers that are still nearly equal
ONE_PROCESS = [name for name in PROBLEMS if name != "own tokens"]  # there a process divides by its own tokens


def compare(found, expected, tolerance, *, degradations=1e-9):
    for kind in ("task", "side"):
        gaps = [apart(a, b) for a, b in zip(found[kind], expected[kind], strict=True)]
        assert len(gaps) >= STEPS
        assert max(gaps) <= tolerance, (kind, gaps)
    for a, b in zip(found["degradations"], expected["degradations"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=degradations)
    assert largest_difference(found["weights"], expected["weights"]) <= tolerance
    for a, b in zip(found["log"], expected["log"], strict=True):
        assert a == pytest.approx(b, rel=max(tolerance, 1e-5), abs=1e-6)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_two_processes_take_the_fused_steps_of_one(ddp, one_process_fused, name):
    compare(ddp[0]["fused"][name], one_process_fused[name], EXACT)


@pytest.mark.parametrize("name", IN_TWO_PASSES)
def test_two_processes_fused_are_two_processes_in_two_passes(ddp, name):
    tolerance = KL_HEAD if "kl" in name else HEAD
    fused, two = (ddp[0][step][name] for step in ("fused", "two_pass"))
    assert (fused["joint"], two["joint"]) == (True, False)
    compare(fused, two, tolerance, degradations=2e-6)


@pytest.mark.parametrize("name", PROBLEMS)
def test_ranks_agree_to_the_bit(ddp, name):
    first, second = (rank["fused"][name] for rank in ddp)
    for kind in ("task", "side"):
        for a, b in zip(first[kind], second[kind], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first["degradations"], second["degradations"], strict=True))
    assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])


def test_the_problems_are_what_they_say(one_process_fused):
    """Rows without a slope are where they should be, and the constraint's gradient vanishes where all are flat."""
    found = one_process_fused
    for name, flat in (("first rank and one row flat", 5), ("all flat", 8)):
        for d in found[name]["degradations"]:
            assert bool((d[:flat] < -50).all())
            assert bool((d[flat:].abs() < 50).all())
    for name in PROBLEMS:
        if name != "own tokens":
            moved = any(bool(x.any()) for step in found[name]["side"] for x in step)
            assert moved == (name != "all flat"), name


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process_skipped(tmp_path_factory):
    return fused_cases.skipped(tmp_path_factory.mktemp("skipped"))


@pytest.mark.parametrize("engine", ["skipped", "kept whole"])
@pytest.mark.parametrize("name", SKIPPED)
def test_sharded_ranks_with_and_without_flat_rows_take_the_step_of_one_process(
    fsdp2, one_process_skipped, name, engine
):
    for rank in fsdp2:
        compare(rank["fused"][engine][name], one_process_skipped[name], 1e-6, degradations=2e-6)


def test_rows_left_out_are_rows_without_a_gradient(one_process_skipped, tmp_path):
    with fused_cases.never_flat():
        full = fused_cases.skipped(tmp_path)
    for name, expected in full.items():
        compare(one_process_skipped[name], expected, EXACT)
    assert all(bool((d < -50).all()) for d in full["all flat"]["degradations"])


def test_a_sharded_model_keeps_two_passes(fsdp2):
    for number, rank in enumerate(fsdp2):
        name, code, message = rank["fused"]["refused"]
        assert (name, code) == ("UnsupportedError", 2)
        assert "step: fused is not possible: FSDP shards the model" in message
        joint, lines = rank["fused"]["auto"]
        assert not joint
        assert lines == (["two passes a step instead of one: FSDP shards the model"] if number == 0 else [])
