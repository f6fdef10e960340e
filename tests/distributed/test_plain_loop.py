"""`SafetyFilter` in a plain loop of two processes: both filter with the mean of their constraints and stay equal."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from holdfast.constraint.filter import SafetyFilter

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


def work(rank: int, store: str, queue) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    queue.put((rank, [w.tolist() for w in loop(*parts(), rank)]))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_agree_with_each_other_and_with_one_process(tmp_path):
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=work, args=(r, str(tmp_path / "store"), queue)) for r in range(WORLD)]
    for process in processes:
        process.start()
    found = dict(queue.get() for _ in range(WORLD))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert found[0] == found[1]
    expected = torch.stack(loop(*parts(), None))
    assert torch.allclose(torch.tensor(found[0], dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)
    free = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    plain = torch.optim.AdamW([free], lr=0.2)
    for _ in range(STEPS):
        free.grad = torch.stack(parts()[0]).mean(0) - 0.1 * free.detach()
        plain.step()
    assert not torch.allclose(free.detach(), expected[-1])  # the filter was active
