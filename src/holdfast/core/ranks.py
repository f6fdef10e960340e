"""The few collective operations we need, each a plain identity when there is one process."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from holdfast.core.errors import HoldfastError

T = TypeVar("T")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def launched_with(engine: str) -> bool:
    """Whether `accelerate launch` brings this engine, `FSDP` or `DEEPSPEED`; known before anything is set up."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() in {"true", "1"}


def rank() -> int:
    return dist.get_rank() if distributed() else 0


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if distributed() else 1


def barrier() -> None:
    if distributed():
        dist.barrier()


def gather_objects(value: T) -> list[T]:
    """The value of every rank, in rank order, on every rank."""
    if not distributed():
        return [value]
    found: list[T | None] = [None] * world()
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]


def from_first(make: Callable[[], T]) -> T:
    """What the first process makes, on every process; what it refuses every process refuses, so that none waits."""
    try:
        made: T | HoldfastError | None = make() if rank() == 0 else None
    except HoldfastError as error:
        made = error
    made = gather_objects(made)[0]
    if isinstance(made, HoldfastError):
        raise made
    return made  # type: ignore[return-value]


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Concatenate equally long tensors of all ranks in rank order."""
    if not distributed():
        return rows
    found = [torch.empty_like(rows) for _ in range(world())]
    dist.all_gather(found, rows.contiguous())
    return torch.cat(found)


def sum_in_place(tensors: list[torch.Tensor]) -> None:
    """Add up each tensor over the ranks, with one message for all tensors of a dtype."""
    if not distributed():
        return
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # a set's order may differ between ranks
        group = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in group])
        dist.all_reduce(flat)
        for t, piece in zip(group, torch.split(flat, [t.numel() for t in group]), strict=True):
            t.copy_(piece.view_as(t))
