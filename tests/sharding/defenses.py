"""Every defense under FSDP2 on two processes: the gradients and weights of DDP, the same bits after resuming.

`make test-sharding` runs this file; tests/contracts compares DDP with one process.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from holdfast.core.ranks import rank
from holdfast.training.hooks import DEFENSES
from tests import forkserver
from tests.contracts import ddp_worker
from tests.contracts.defense_cases import CASES, HARD, Case, build, largest_difference
from tests.distributed import worker

TOLERANCE = 1e-9  # float64, as in the contract
HELD = [case for case in CASES if case.step == "auto" and case.cls.fsdp]
REFUSED = [case for case in CASES if case.step == "auto" and not case.cls.fsdp]
# A multiplier that begins at 0: its rows get a forward and no backward, after which FSDP2 keeps what it gathered.
LATE = {"start": 0.0, "dual_rate": 1.0, "single_backward": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    ", two micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}
ENGINES = ("ddp", "fsdp2")


def engine_of(name: str, variant: str) -> dict[str, Any]:
    """With two micro-batches FSDP2 also keeps whole layers between forward and backward."""
    return {} if name == "ddp" else worker.fsdp2(reshard_after_forward=not variant)


def saving(folder: Path, case: Case) -> Any:
    """A run with dropout, momentum and a checkpoint after two of its four steps."""
    kept = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no", "per_device_train_batch_size": 2}
    return build(folder, case, **{**HARD, **kept, **worker.fsdp2()})


def resumed(folder: Path, case: Case) -> dict[str, Any]:
    """The weights of an unbroken run, and of one that goes on from its checkpoint."""
    found = {}
    for name, checkpoint in (("whole", None), ("resumed", str(folder / "run" / "checkpoint-2"))):
        trainer = saving(folder, case)
        trainer.train(resume_from_checkpoint=checkpoint)
        found[name] = worker.weights(trainer)
    return found


def train(folder: Path, engine: str) -> None:
    """All cases in one process of two; stored as `ENGINE-RANK.pt`."""
    PartialState(cpu=True)
    worker.let_accelerate_shard_on_the_cpu()
    found: dict[str, Any] = {}
    for variant, settings in VARIANTS.items():
        for case in HELD:
            place = folder / engine / f"{case}{variant}"
            found[f"{case}{variant}"] = ddp_worker.gradients(place, case, **settings, **engine_of(engine, variant))
    late = Case("primal_dual", "finetune")
    found["late"] = ddp_worker.gradients(folder / engine / "late", late, LATE, **engine_of(engine, "gathered"))
    if engine == "fsdp2":
        found["resumed"] = {str(case): resumed(folder / "resumed" / str(case), case) for case in HELD}
        found["refused"] = {
            str(case): worker.refusal(partial(build, folder / "refused", case, **worker.fsdp2())) for case in REFUSED
        }
    torch.save(found, folder / f"{engine}-{rank()}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("defenses")
    for engine in ENGINES:
        forkserver.ranks(train, folder, engine, log=folder / f"{engine}.log", processes=2)
    return {
        engine: [torch.load(folder / f"{engine}-{rank}.pt", weights_only=True) for rank in range(2)]
        for engine in ENGINES
    }


def compare(trained: dict[str, list[dict[str, Any]]], name: str) -> None:
    expected, ranks = trained["ddp"][0][name], [found[name] for found in trained["fsdp2"]]
    for found, one in zip(ranks[0]["gradients"], expected["gradients"], strict=True):
        assert float((found - one).norm()) <= TOLERANCE * float(one.norm())
    assert largest_difference(ranks[0]["weights"], expected["weights"]) <= TOLERANCE
    assert largest_difference(ranks[0]["weights"], ranks[1]["weights"]) == 0.0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", HELD, ids=str)
def test_the_gradients_are_those_of_ddp(trained, case, variant):
    compare(trained, f"{case}{variant}")


@pytest.mark.parametrize("case", [case for case in HELD if case.name != "sft"], ids=str)
def test_the_defense_was_at_work(trained, case):
    """Else plain fine-tuning would have been compared with itself."""
    plain, found = trained["fsdp2"][0][f"sft-{case.stage}"], trained["fsdp2"][0][str(case)]
    assert largest_difference(found["weights"], plain["weights"]) > 1e-6


def test_a_term_that_begins_later(trained):
    compare(trained, "late")
    assert largest_difference(trained["ddp"][0]["late"]["weights"], trained["ddp"][0]["sft-finetune"]["weights"]) > 1e-6


@pytest.mark.parametrize("case", HELD, ids=str)
def test_a_resumed_run_has_the_same_bits(trained, case):
    for found in trained["fsdp2"]:
        assert largest_difference(found["resumed"][str(case)]["whole"], found["resumed"][str(case)]["resumed"]) == 0.0


def test_the_others_are_refused_by_name(trained):
    assert {case.name for case in REFUSED} == {"asft", "safelora", "salora"}
    assert {case.name for case in (*HELD, *REFUSED)} == set(DEFENSES)
    for found in trained["fsdp2"]:
        for case in REFUSED:
            error, code, message = found["refused"][str(case)]
            assert (error, code) == ("UnsupportedError", 2)
            assert f"defense '{case.name}' under FSDP2" in message
