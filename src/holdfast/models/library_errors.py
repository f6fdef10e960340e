"""Errors of the model libraries, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError


@contextmanager
def one_line_errors(ref: str | Path, what: str) -> Iterator[None]:
    """Turn the errors of hub, transformers, PEFT and safetensors into ours, each cut to its first line."""
    from safetensors import SafetensorError

    def first_line(error: Exception) -> str:
        return str(error).strip().split("\n", 1)[0][:200]

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{what} {str(ref)!r} does not fit in memory: {first_line(error)}",
            remedy="load it in bfloat16 or with quantization, or on a larger device",
        ) from error
    except (SafetensorError, UserWarning, RuntimeError) as error:
        raise CheckpointError(
            f"{what} {str(ref)!r} is damaged or does not fit: {first_line(error)}",
            remedy="restore the files, or check that the adapter belongs to this base model",
        ) from error
    except (ConfigError, ResourceError, CheckpointError):
        raise
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"{what} {str(ref)!r} cannot be loaded: {first_line(error)}",
            remedy="check the name, the revision, access rights and the network, or give a local folder",
        ) from error
