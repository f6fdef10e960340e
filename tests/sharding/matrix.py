"""{2, 4} processes x {DDP, FSDP2} x {LoRA, all weights, QLoRA} x {two passes, fused}: the steps of one process.

`make test-sharding` runs this file; the suite does not collect it. tests/distributed holds a part of it.
"""

from __future__ import annotations

import pytest
import torch

from holdfast.core.event_log import read
from tests.distributed.worker import without_time
from tests.sharding import cells
from tests.sharding.conftest import DIFFERENCES

TOLERANCE = 1e-6
FLOOR = 1.0  # what is smaller is compared by its absolute difference
COUNTS = (2, 4)
PLACES = [(engine, count) for engine in cells.CELLS for count in COUNTS]
RUNS = [(engine, count, cell) for engine, count in PLACES for cell in cells.CELLS[engine]]
LAYOUTS = [(*run, unit, accumulation) for run in RUNS for unit in cells.UNITS for accumulation in (1, 2)]
SCALARS = {"g": "g", "multiplier": "lambda", "loss": "loss"}

pytest.importorskip("bitsandbytes", reason="the QLoRA cells need the extra `quantized`")


def relative(a: float, b: float) -> float:
    """`abs(a - b) / abs(b)`."""
    return abs(a - b) / max(abs(b), FLOOR)


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """`norm(a - b) / norm(b)` of gradients; one of a KL vanishes at theta_0, and what is left there is rounding."""
    flat_a, flat_b = (torch.cat([x.reshape(-1).double() for x in vector]) for vector in (a, b))
    return float((flat_a - flat_b).norm() / flat_b.norm().clamp(min=FLOOR))


def differences(found, expected) -> dict[str, float]:
    """Over all steps: the largest difference of each scalar, and of both gradients in the norm."""
    rows = list(zip(found["rows"], expected["rows"], strict=True))
    assert len(rows) == cells.STEPS
    largest = {name: max(relative(a[key], b[key]) for a, b in rows) for key, name in SCALARS.items()}
    for kind in ("safety", "task"):
        largest[f"{kind} gradient"] = max(apart(a, b) for a, b in zip(found[kind], expected[kind], strict=True))
    return largest


@pytest.mark.parametrize(("engine", "count", "cell", "unit", "accumulation"), LAYOUTS)
def test_the_steps_are_those_of_one_process(matrix, engine, count, cell, unit, accumulation):
    name = cells.name_of(cell, unit, accumulation)
    expected = matrix.unbroken("ddp", 1)[0]["layouts"][cells.name_of(cell, unit, 1)]
    ranks = [rank["layouts"][name] for rank in matrix.unbroken(engine, count)]
    for step in range(cells.STEPS):
        assert set().union(*(rank["inputs"][step] for rank in ranks)) == expected["inputs"][step]
    largest = differences(ranks[0], expected)
    DIFFERENCES[f"{engine} x{count}, {name}"] = largest
    assert max(largest.values()) <= TOLERANCE, largest
    assert [row["event"] for row in ranks[0]["rows"]] == [row["event"] for row in expected["rows"]]
    assert ranks[0]["fused"] == ("fused" in cell)
    assert all(ranks[0]["sharded"]) == (engine == "fsdp2")
    for other in ranks[1:]:
        assert without_time(other["rows"]) == without_time(ranks[0]["rows"])
        assert all(torch.equal(other["weights"][key], value) for key, value in ranks[0]["weights"].items())


@pytest.mark.parametrize("cell", cells.CELLS["ddp"])
def test_the_comparison_has_something_to_compare(matrix, cell):
    """The filter acts on several steps in kl_token, and neither gradient vanishes on all of them."""
    layouts = matrix.unbroken("ddp", 1)[0]["layouts"]
    acting = [row["multiplier"] for row in layouts[cells.name_of(cell, "kl_token", 1)]["rows"] if row["active"]]
    assert len(acting) >= 2
    assert min(acting) > 100 * TOLERANCE
    for unit in cells.UNITS:
        for kind in ("safety", "task"):
            steps = layouts[cells.name_of(cell, unit, 1)][kind]
            assert sum(any(float(x.abs().max()) > 1e-2 for x in step) for step in steps) >= 2


@pytest.mark.parametrize(("engine", "count"), PLACES)
def test_fused_steps_are_refused_elsewhere(matrix, engine, count):
    reasons = {"full": "all weights are trained", "qlora": "Linear4bit", "fsdp2": "FSDP shards the model"}
    for rank in matrix.unbroken(engine, count):
        assert list(rank["declined"]) == cells.DECLINED[engine]
        for cell, (error, code, message) in rank["declined"].items():
            assert (error, code) == ("UnsupportedError", 2)
            assert "step: fused is not possible" in message
            assert reasons[engine if engine == "fsdp2" else cell.split()[0]] in message


@pytest.mark.parametrize("kill", cells.KILLS)
@pytest.mark.parametrize(("engine", "count", "cell"), RUNS)
def test_a_run_of_which_one_rank_was_killed_goes_on_to_the_same_bits(matrix, engine, count, cell, kill):
    both = zip(matrix.unbroken(engine, count), matrix.continued(engine, count), strict=True)
    for number, (unbroken, continued) in enumerate(both):
        whole, resumed = unbroken["whole"][cell], continued["resumed"][f"{kill} {cell}"]
        assert [row["step"] for row in resumed["rows"]] == [3, 4, 5]
        assert without_time(resumed["rows"]) == without_time(whole["rows"][2:])
        assert any(row["event"] != "inactive" for row in resumed["rows"])
        assert all(torch.equal(resumed["weights"][key], value) for key, value in whole["weights"].items())
        if number == 0:
            log = read(matrix.folder(engine, count) / f"{kill} {cell}" / "events.jsonl")
            assert [row["step"] for row in log] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("engine", "count"), PLACES)
def test_a_checkpoint_of_another_number_of_processes_is_refused(matrix, engine, count):
    for rank in matrix.continued(engine, count):
        assert len(rank["elsewhere"]) == len(cells.CELLS[engine]) * (2 if engine == "ddp" else 1)
        for name, (error, code, message) in rank["elsewhere"].items():
            stored = name.rpartition(" ")[2]
            assert (error, code) != ("nothing", 0)
            assert f"processes: stored {stored}, current {count}" in message
