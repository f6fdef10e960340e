"""What is kept of a failure: its kind, its message where it is ours, its exit code; never a text from data."""

from __future__ import annotations

import errno
import signal
import sys
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError, ResourceError

INTERRUPTED = 130


def of_exception(error: BaseException, log: Path) -> dict[str, Any]:
    """The record of an exception in a worker; messages of other libraries stay in the log, which is private."""
    error = _shortage(error) or error
    if isinstance(error, HoldfastError):
        what, remedy, code = error.what, error.remedy, error.exit_code
    else:
        what, remedy, code = "an unexpected error, which is a bug", f"see {log}", 1
    return {"error": type(error).__name__, "what": what, "remedy": remedy, "exit_code": code}


def of_exit(code: int, log: Path) -> dict[str, Any]:
    """The record of a worker that ended without saying why; `code` is negative for a signal."""
    killed = -code == signal.SIGKILL
    if killed:
        what, remedy = "its process was killed, most likely for want of memory", "lower `workers`, then --retry-failed"
    else:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        what, remedy = f"its process ended with {how} and no record", f"see {log}"
    exit_code = ResourceError.exit_code if killed else max(code, 1)
    return {"error": "Killed" if killed else "Ended", "what": what, "remedy": remedy, "exit_code": exit_code}


def _shortage(error: BaseException) -> ResourceError | None:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError("no space left on the disk", remedy="free disk space, then --retry-failed")
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return ResourceError("out of memory", remedy="lower `workers` or the batch sizes, then --retry-failed")
    return None
