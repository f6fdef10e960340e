"""Eight rows per step make the same step on one process, on two, sharded, and in small pieces."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests import rounding, tiny
from tests.distributed import worker
from tests.distributed.worker import STEPS

TOLERANCE = rounding.FLOAT32
LAYOUTS = [
    ("one_process", "accumulated", "sgd"),
    *[("ddp", name, name) for name in ("sgd", "adam", "full")],
    ("ddp", "accumulated", "sgd"),
    *[("fsdp2", name, name) for name in ("sgd", "adam", "kl", "full")],
    ("fsdp2", "accumulated", "sgd"),
]
DISTRIBUTED = [(engine, name) for engine, name, _ in LAYOUTS if engine != "one_process"]


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """norm(a - b) / norm(b) of gradients given parameter by parameter."""
    flat_a, flat_b = (torch.cat([x.reshape(-1).double() for x in vector]) for vector in (a, b))
    scale = flat_b.norm()
    return float((flat_a - flat_b).norm() / scale) if scale > 0 else float(flat_a.norm())


@pytest.mark.parametrize(("engine", "name", "problem"), LAYOUTS, indirect=["engine"])
def test_every_layout_takes_the_steps_of_one_process(engine, name, problem, one_process):
    expected, ranks = one_process[problem], [rank[name] for rank in engine]
    for step in range(STEPS):
        assert set().union(*(rank["inputs"][step] for rank in ranks)) == expected["inputs"][step]
        assert sum(len(rank["inputs"][step]) for rank in ranks) == len(expected["inputs"][step]) == 8
    found = ranks[0]
    for key in ("g", "value", "multiplier", "loss"):
        for mine, theirs in zip(found["rows"], expected["rows"], strict=True):
            assert mine[key] == pytest.approx(theirs[key], rel=TOLERANCE, abs=TOLERANCE), (key, mine["step"])
    for kind in ("safety", "task"):
        gaps = [apart(a, b) for a, b in zip(found[kind], expected[kind], strict=True)]
        assert len(gaps) == STEPS
        assert max(gaps) <= TOLERANCE, (kind, gaps)
    assert [row["event"] for row in found["rows"]] == [row["event"] for row in expected["rows"]]


@pytest.mark.parametrize("problem", ["sgd", "adam", "kl", "full"])
def test_the_comparison_has_something_to_compare(problem, one_process):
    """The filter acts on several steps, and neither gradient vanishes on all of them."""
    record = one_process[problem]
    active = [row["multiplier"] for row in record["rows"] if row["event"] != "inactive"]
    assert len(active) >= 2, [row["event"] for row in record["rows"]]
    assert min(active) > 100 * TOLERANCE
    for kind in ("safety", "task"):
        assert sum(any(float(x.abs().max()) > 1e-2 for x in step) for step in record[kind]) >= 2


@pytest.mark.parametrize(
    ("engine", "name", "problem"), [case for case in LAYOUTS if case[2] != "adam"], indirect=["engine"]
)
def test_weights_under_sgd(engine, name, problem, one_process):
    expected, found = one_process[problem]["weights"], engine[0][name]["weights"]
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("engine", "name"), DISTRIBUTED, indirect=["engine"])
def test_ranks_agree_to_the_bit(engine, name):
    first, second = (rank[name] for rank in engine)
    assert worker.without_time(first["rows"]) == worker.without_time(second["rows"])
    assert first["metrics"] == second["metrics"]
    for kind in ("safety", "task"):
        for a, b in zip(first[kind], second[kind], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"], indirect=True)
def test_rows_drawn_by_importance_and_verified_steps(engine, one_process):
    """Weights carry the rounding of small terms, so that less agrees than above; another row would be far outside."""
    expected, (first, second) = one_process["drawn"], (rank["drawn"] for rank in engine)
    assert worker.without_time(first["rows"]) == worker.without_time(second["rows"])
    assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])
    assert any(row["pulled"] < 1.0 for row in expected["rows"])
    for mine, theirs in zip(first["rows"], expected["rows"], strict=True):
        for key in ("g", "value", "violation_rate", "pulled"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), (key, mine["step"])
    gaps = [apart(a, b) for a, b in zip(first["safety"], expected["safety"], strict=True)]
    assert max(gaps) <= 1e-4, gaps


@pytest.mark.parametrize(("engine", "name", "problem"), LAYOUTS, indirect=["engine"])
def test_monitor_figures(engine, name, problem, one_process):
    expected, found = one_process[problem]["metrics"], engine[0][name]["metrics"]
    assert found.keys() == expected.keys()
    assert found["eval_safety_violation_rate"] == expected["eval_safety_violation_rate"]
    assert found["eval_safety_cvar"] == pytest.approx(expected["eval_safety_cvar"], rel=1e-5)


def test_fsdp2_shards_and_ddp_does_not(ddp, fsdp2):
    assert all(all(rank[name]["sharded"]) for rank in fsdp2 for name in ("sgd", "adam", "kl", "full", "accumulated"))
    assert not any(any(rank[name]["sharded"]) for rank in ddp for name in ("sgd", "adam", "full"))


def test_bucket_views_were_on(ddp):
    """`.grad` is then a view of DDP's bucket; the accumulated layout above shows that nothing is overwritten."""
    assert all(rank["accumulated"]["bucket_view"] for rank in ddp)
    assert not any(rank["sgd"]["bucket_view"] for rank in ddp)


# Under FSDP2 `sgd` saves with FULL_STATE_DICT, `adam` with SHARDED_STATE_DICT.
@pytest.mark.parametrize(("engine", "name"), [("ddp", "sgd"), ("fsdp2", "sgd"), ("fsdp2", "adam")])
def test_the_saved_adapter_is_an_ordinary_one(engine, name, runs, request):
    expected = request.getfixturevalue(engine)[0][name]["weights"]
    assert_adapter(runs / engine / name / "final", expected)
    assert not (runs / engine / name / "final" / "training_args.bin").exists()


def test_the_checkpoint_of_a_sharded_run_holds_an_ordinary_adapter(fsdp2, runs):
    assert_adapter(runs / "fsdp2" / "resume" / f"checkpoint-{STEPS}", fsdp2[0]["resume"]["resumed"]["weights"])


def assert_adapter(folder, expected):
    loaded = dict(PeftModel.from_pretrained(tiny.model(), folder).named_parameters())
    assert expected
    for key, value in expected.items():
        assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_fully_trained_model_is_saved_whole(engine, runs, request):
    expected = request.getfixturevalue(engine)[0]["full"]["weights"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(runs / engine / "full" / "final").named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
