"""Errors of the model libraries in one line, and work in batches that are halved until they fit in memory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from holdfast.core.errors import CheckpointError, ConfigError, HoldfastError, ResourceError

Result = TypeVar("Result")


@contextmanager
def one_line_errors(ref: str | Path, what: str) -> Iterator[None]:
    """Turn the errors of hub, transformers, PEFT and safetensors into ours, each cut to its first line.

    Foreign files raise any exception there is in these libraries; one of a type that is not listed is damage, too.
    """
    from safetensors import SafetensorError

    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        bad_value = isinstance(error, ValueError) and not isinstance(error, SafetensorError | UserWarning)
        kind: type[HoldfastError] = CheckpointError
        fault = "is damaged or does not fit"
        remedy = "restore the files, or check that the adapter is for this base model"
        if out_of_memory(error):
            kind, fault = ResourceError, "does not fit in memory"
            remedy = "load it in bfloat16 or with quantization, or on a larger device"
        elif isinstance(error, OSError | ImportError) or bad_value:
            kind, fault = ConfigError, "cannot be loaded"
            remedy = "check the name, the revision, access rights and the network, or give a local folder"
        raise kind(f"{what} {str(ref)!r} {fault}: {first_line(error)}", remedy=remedy) from error


def first_line(error: Exception) -> str:
    """The first line of an error, without control characters; the type stands before a bare key or nothing."""
    text = str(error).strip().split("\n", 1)[0][:200]
    shown = "".join(letter for letter in text if letter.isprintable())
    return f"{type(error).__name__} {shown}".strip() if not shown or isinstance(error, LookupError) else shown


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on a device or on the host."""
    torch = sys.modules.get("torch")  # not imported for this: hashing a folder needs no torch
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    on_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or on_device or on_host


def held_by_others() -> tuple[float, float] | None:
    """GiB of the current GPU that other processes hold, and GiB in all; None without a GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved()) / 2**30, total / 2**30


def fitting_batches(
    places: list[int], size: int, run: Callable[[list[int]], Result], too_large: Callable[[int], Exception] | None
) -> Iterator[tuple[list[int], Result]]:
    """`run` over all places, at most `size` at a time and in order: each batch with its result.

    `too_large` makes the error where a single place does not fit; None raises what `run` raised.
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
