"""What each process of the contract on two processes does: train every case and store its gradients and weights."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.distributed.tensor import DTensor

from holdfast.core.ranks import rank, world
from tests import cheaper, tiny
from tests.contracts.defense_cases import CASES, PLAIN, Case, build
from tests.unit.trainers.building import weights

GLOBAL_BATCH = 8


def gradients(folder: Path, case: Case, options: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    """Three SGD steps in float64 over the same eight rows each, whatever the number of processes.

    Returns `.grad` as the defense leaves it at every step, and the weights at the end.
    """
    settings = {**PLAIN, "per_device_train_batch_size": GLOBAL_BATCH // world(), "logging_strategy": "no", **engine}
    trainer = build(folder, case, options, dropout=0.0, model=tiny.model(dtype=torch.float64), **settings)
    seen: list[torch.Tensor] = []
    inner = trainer.defense.on_gradient

    def noted(run: Any) -> None:
        inner(run)
        grads = [p.grad for p in run.model.parameters() if p.requires_grad and p.grad is not None]
        seen.append(torch.cat([whole(g).flatten() for g in grads]))

    trainer.defense.on_gradient = noted
    trainer.train()
    return {"gradients": seen, "weights": {name: whole(value) for name, value in weights(trainer).items()}}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """FSDP2's shards gathered."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def attempt(folder: Path, case: Case) -> dict[str, Any]:
    """The same, or why it failed: one defense's failure must not hide the others."""
    try:
        return gradients(folder / str(case), case)
    except Exception:  # noqa: BLE001  (reported by the case's own test)
        return {"failed": traceback.format_exc()}


def main(folder: Path, wanted: list[str]) -> None:
    PartialState(cpu=True)
    cheaper.same_rows = True
    found = {str(case): attempt(folder / "ddp", case) for case in CASES if str(case) in wanted}
    torch.save(found, folder / f"rank-{rank()}.pt")
