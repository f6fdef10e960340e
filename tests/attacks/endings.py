"""How an action ends: with a refusal, with a traceback, or not at all."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError

CPU_S = 25  # far above what any refusal takes; processor time, so that a busy machine fails nothing
_REFUSED, _RAISED, _ACCEPTED = 42, 43, 44


def refusal(action: Callable[[], Any]) -> HoldfastError | None:
    """The refusal that an action ends with, None where it is accepted; any other exception is the fault."""
    try:
        action()
    except HoldfastError as error:
        return error
    except Exception as error:
        raise AssertionError(f"a traceback of {type(error).__name__} instead of a refusal") from error
    return None


def ending(action: Callable[[], Any], seconds: int = CPU_S) -> str:
    """refused, accepted, traceback, or did not end: in a forked process, killed at its limit of processor time."""
    child = os.fork()
    if child == 0:
        os._exit(_run(action, seconds))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "did not end"
    return {_REFUSED: "refused", _RAISED: "traceback", _ACCEPTED: "accepted"}[os.WEXITSTATUS(status)]


def _run(action: Callable[[], Any], seconds: int) -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31, resource.RLIM_INFINITY))
    signal.alarm(20 * seconds)
    try:
        action()
    except HoldfastError:
        return _REFUSED
    except BaseException:  # noqa: BLE001  (the parent's test must not go on in this process)
        return _RAISED
    return _ACCEPTED
