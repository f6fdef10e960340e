"""Processes that begin with everything imported: forks of one server per test process.

Importing torch, transformers, TRL and PEFT takes ten times as long as training the tiny model. A fork shares nothing
else with the others: what a killed one leaves to its successor is on disk. On Linux the server is itself a fork, of the
test process when it has collected its tests and run none; elsewhere it imports everything once more.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
SECONDS = 600
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "holdfast.cli.main", "holdfast.runs.pipeline", "holdfast.training.trainer", "trl.trainer.sft_trainer",
    "transformers.models.llama.modeling_llama",
])  # fmt: skip


def begin() -> None:
    """Start the server now, as a fork of this process."""
    if sys.platform != "linux":
        return
    with mock.patch.object(util, "spawnv_passfds", _forked):
        multiprocessing.forkserver.ensure_running()


def _forked(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Stands in for the new interpreter that would run the server's line of code, the last of the arguments."""
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a fork holds all pipes open, and sees no end
        if os.getppid() == parent:
            exec(arguments[-1], {})
    finally:
        os._exit(0)


def started(
    target: Callable[..., Any],
    *arguments: Any,
    log: Path,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """A process that calls a function of a module; what it prints is appended to `log`."""
    added = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
    process = _CONTEXT.Process(target=_call, args=(target, arguments, log, cwd, {**os.environ, **added}), daemon=True)
    process.start()
    return process


def finished(process: ForkServerProcess) -> int:
    """How it ended: its exit code, negative for a signal."""
    process.join(SECONDS)
    assert process.exitcode is not None, f"the process still runs after {SECONDS} s"
    return process.exitcode


def command(*argv: str) -> None:
    """What `python -m holdfast ARGV` does."""
    from holdfast.cli.main import main

    sys.argv = ["holdfast", *argv]
    main()


def ranks(target: Callable[..., Any], *arguments: Any, log: Path, processes: int = 2, **settings: Any) -> None:
    """Call a function in as many processes as torchrun would start, and wait for all."""
    codes = ended(target, *arguments, log=log, processes=processes, **settings)
    assert codes == [0] * processes, log.read_text()[-6000:]


def ended(
    target: Callable[..., Any],
    *arguments: Any,
    log: Path,
    processes: int = 2,
    environment: Mapping[str, str] | None = None,
) -> list[int | None]:
    """How each rank ended. As under torchrun, the first that fails takes the others down, which would wait for it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    size = str(processes)
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    added = [{**(environment or {}), **shared, **names} for names in own]
    running = [started(target, *arguments, log=log, environment=names) for names in added]
    while left := [process for process in running if process.exitcode is None]:
        assert wait([process.sentinel for process in left], SECONDS), f"the processes still run after {SECONDS} s"
        if any(process.exitcode for process in running):
            for process in left:
                process.kill()
    return [process.exitcode for process in running]


def _call(
    target: Callable[..., Any], arguments: tuple[Any, ...], log: Path, cwd: Path, environment: dict[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch
    from accelerate.state import AcceleratorState, GradientState

    from tests import cheaper

    AcceleratorState._reset_state(reset_partial_state=True)  # of one process, where the server's parent has trained
    GradientState._reset_state()
    torch.set_num_threads(1)
    cheaper.calls()
    cheaper.training()
    gc.freeze()  # every training run collects garbage
    gc.set_threshold(100_000, 20, 100)
    target(*arguments)
