"""Which examples a step draws, as a pure function of the step: resuming needs no sampler state."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from holdfast.core.errors import ConfigError
from holdfast.core.seeding import generator

T = TypeVar("T")


@lru_cache(maxsize=8)
def _permutation(size: int, seed: int, name: str, epoch: int) -> tuple[int, ...]:
    """The order of one pass; cached because consecutive steps share it."""
    return tuple(generator(seed, name, epoch).permutation(size).tolist())


@dataclass(frozen=True, slots=True)
class StepStream:
    """Batches without replacement inside a pass, drawn from a private generator.

    Global draw k belongs to pass k // size, position k % size; step t makes draws
    t * batch_size ... (t + 1) * batch_size - 1. A batch larger than the set wraps into the next pass.
    """

    size: int  # number of examples
    batch_size: int  # draws a step, over all ranks
    seed: int  # the run's seed
    name: str  # streams with different names are independent

    def __post_init__(self) -> None:
        if min(self.size, self.batch_size) < 1:
            what = f"stream {self.name!r}: size is {self.size}, batch_size {self.batch_size}; expected at least 1"
            raise ConfigError(what, remedy="give at least one example and a positive batch size")

    def indices(self, step: int) -> list[int]:
        """Row numbers drawn at `step` (from 0), in order, for all ranks together."""
        draws = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [_permutation(self.size, self.seed, self.name, k // self.size)[k % self.size] for k in draws]


def shard(indices: Sequence[T], rank: int, world: int) -> list[T]:
    """The contiguous slice of rank `rank` of `world`; all slices are equally long."""
    each, rest = divmod(len(indices), world)
    if rest or not each:
        raise ConfigError(
            f"safety_batch_size {len(indices)} cannot be shared equally by {world} processes",
            remedy=f"set safety_batch_size to a multiple of {world}, such as {max(each, 1) * world}",
        )
    return list(indices[rank * each : (rank + 1) * each])
