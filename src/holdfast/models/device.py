"""The device that was asked for, refused where this machine does not have it."""

from __future__ import annotations

import torch

from holdfast.core.errors import ConfigError, ResourceError


def require_device(device: str | torch.device) -> torch.device:
    """The device by name.

    Raises:
        ConfigError: torch knows no such device.
        ResourceError: it is not on this machine, or this torch was built without it.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown", remedy="use cpu, cuda or cuda:0, ...") from error
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= there:
        visible = f"{there} CUDA devices" if there else "no CUDA device"
        raise ResourceError(
            f"device {str(device)!r}: torch sees {visible} here",
            remedy="use --device cpu, or install a torch built for your GPU and its driver",
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ResourceError(f"device {str(device)!r}: torch sees no such device here", remedy="use --device cpu")
    return found
