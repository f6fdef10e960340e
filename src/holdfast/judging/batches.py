"""Work in batches that fit in memory: a batch that does not is halved."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.models.library_errors import out_of_memory

Result = TypeVar("Result")


def fitting_batches(
    places: list[int], size: int, run: Callable[[list[int]], Result], too_large: Callable[[int], Exception] | None
) -> Iterator[tuple[list[int], Result]]:
    """`run` over all places, at most `size` at a time and in order: each batch with its result.

    Args:
        too_large: the error where a single place does not fit; None raises what `run` raised.
    """
    while places:
        chosen = places[:size]
        try:
            result = run(chosen)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or (len(chosen) == 1 and too_large is None):
                raise
        else:
            places = places[len(chosen) :]
            yield chosen, result
            continue
        if len(chosen) == 1 and too_large is not None:
            raise too_large(chosen[0])
        size = len(chosen) // 2
        free_memory()


def free_memory() -> None:
    """Hand unused GPU memory back, so that a smaller batch finds it in one piece."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
