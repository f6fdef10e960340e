"""`SafetyFilter` in a plain loop of two processes: both filter with the mean of their constraints and stay equal."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.constraint.filter import SafetyFilter
from tests import forkserver

STEPS, WORLD = 6, 2


def loop(pull: list[torch.Tensor], limits: list[torch.Tensor], rank: int | None) -> list[torch.Tensor]:
    """The weights after each step; one process (rank None) sees the mean of both ranks' parts."""
    weights = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weights], lr=0.2)
    filt = SafetyFilter(optimizer, rate=0.5)
    seen = []
    for _ in range(STEPS):
        weights.grad = torch.stack(pull).mean(0) - 0.1 * weights.detach()  # as DDP would have reduced it
        chosen = limits if rank is None else [limits[rank]]
        filt.step(sum((weights * limit).sum() for limit in chosen) / len(chosen) - 0.3)
        seen.append(weights.detach().clone())
    return seen


def parts() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    pull = [-torch.rand(3, generator=draw, dtype=torch.float64) for _ in range(WORLD)]
    return pull, [torch.rand(3, generator=draw, dtype=torch.float64) for _ in range(WORLD)]


def work(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.save([w.tolist() for w in loop(*parts(), dist.get_rank())], folder / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_agree_with_each_other_and_with_one_process(tmp_path):
    forkserver.ranks(work, tmp_path, log=tmp_path / "log", processes=WORLD)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    assert found[0] == found[1]
    expected = torch.stack(loop(*parts(), None))
    assert torch.allclose(torch.tensor(found[0], dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)
    free = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    plain = torch.optim.AdamW([free], lr=0.2)
    for _ in range(STEPS):
        free.grad = torch.stack(parts()[0]).mean(0) - 0.1 * free.detach()
        plain.step()
    assert not torch.allclose(free.detach(), expected[-1])  # the filter was active
