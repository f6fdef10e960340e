"""An audit on several processes: each measures its share of every window, and the first one stores all of them.

Process r of w takes the examples r, r + w, r + 2w, ... of a window. Each holds the models whole, so nothing but results
travels: a few numbers an example. numpy and torch are imported where something does.
"""

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError

T = TypeVar("T")
PATIENCE = timedelta(hours=2)  # for what the first process does alone


@dataclass(frozen=True)
class Sharing:
    """Which process this is, and of how many."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process stores the results."""
        return self.rank == 0

    def own(self, items: Sequence[T], start: int = 0) -> list[T]:
        """This process's share of the items of a window that begin at its position `start`."""
        return list(items[(self.rank - start) % self.world :: self.world])

    def first(self, make: Callable[[], T]) -> T:
        """What the first process makes; what it refuses, all refuse."""
        if self.world == 1:
            return make()
        from holdfast.core.ranks import from_first

        return from_first(make)

    def together(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a window from everyone's share of them, on every process."""
        if self.world == 1:
            return dict(columns)
        import numpy as np

        from holdfast.core.ranks import gather_objects

        shares, found = gather_objects(dict(columns)), {}
        for name, first in shares[0].items():
            each = [share.get(name, ()) for share in shares]
            found[name] = np.empty(sum(map(len, each)), dtype=np.asarray(first).dtype)
            for number, share in enumerate(each):
                found[name][number :: self.world] = share
        return found

    def require_same(self, what: str, sha256: str) -> None:
        """Refuse processes on machines whose files or libraries differ."""
        if self.first(lambda: sha256) != sha256:
            remedy = "give every machine the same files and versions"
            raise CheckpointError(f"the {self.world} processes see other {what}", remedy=remedy)


ALONE = Sharing()


@contextmanager
def joined(device: str | None) -> Iterator[tuple[Sharing, str | None]]:
    """The processes that `accelerate launch` or torchrun started, and this one's device; alone without a launch."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE, device
        return
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device {device} for each of {size} processes", remedy="leave out --device")
    import torch
    from accelerate import PartialState

    from holdfast.core.ranks import distributed, launched_with, rank, world
    from holdfast.models.handle import require_device

    for engine in ("FSDP", "DEEPSPEED"):
        if launched_with(engine):
            raise UnsupportedError(
                f"an audit under {engine}: every process holds the models whole, nothing is sharded",
                remedy="launch it without --config_file, with as many processes as the models fit into memory",
            )
    if device == "cuda":
        require_device(device)
    alone = not distributed()
    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), timeout=PATIENCE)
    if alone:  # a script's own group is its own; ours stays for the next audit, which could not join the same address
        atexit.register(state.destroy_process_group)
    yield Sharing(rank(), world()), str(state.device)
