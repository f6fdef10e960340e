"""Which code, packages and hardware produced something, and how much memory that took."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from holdfast.core.version import VERSION

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors")


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide a result."""
    installed = {"python": platform.python_version(), "holdfast": VERSION}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def commit() -> str | None:
    """The git commit of this source tree, with `-dirty` when it has uncommitted changes; None outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            asked = ["git", *arguments]  # a fixed program, no shell, no user input
            done = subprocess.run(asked, cwd=here, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if (head := git("rev-parse", "--short=12", "HEAD")) is None:
        return None
    return f"{head}-dirty" if git("status", "--porcelain", "--untracked-files=no") else head


def hardware() -> str:
    """The machine in words: GPU name where there is one, otherwise processor and core count."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"CPU, {os.cpu_count()} cores ({platform.machine()})"


def peak_memory() -> int:
    """The most bytes that this process has held in memory so far."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10  # in bytes there, elsewhere in KiB
