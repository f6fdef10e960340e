"""Run the cells of some groups, WIDTH at once on one device.

    python -m benchmarks.held_safety.schedule WORK --groups main05 against05 --width 14 --judge JUDGE
    python -m benchmarks.held_safety.schedule WORK --groups main05 --status

Cells with a record in WORK/results that was trained with the plan's arguments are skipped; what was interrupted goes on
from its last checkpoint. A cell that fails is tried once more, after all others. WORK/schedule.log has a line for each
start and end.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.held_safety.cells import Cell, Plan, read_plan
from benchmarks.held_safety.data import read_rows, write_rows

ATTEMPTS = 2
LIMIT_S = 600


class Queue:
    """Cells that wait, and how often each was tried."""

    def __init__(self, names: Sequence[str]) -> None:
        self._waiting = list(names)
        self._tried: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self) -> str | None:
        """The next cell; None when none waits."""
        with self._lock:
            if not self._waiting:
                return None
            name = self._waiting.pop(0)
            self._tried[name] += 1
            return name

    def failed(self, name: str) -> None:
        """Put a cell at the end, unless it was tried often enough."""
        with self._lock:
            if self._tried[name] < ATTEMPTS:
                self._waiting.append(name)


class Room:
    """How many cells of which size run at once: a cell takes the `slots` of its model out of WIDTH.

    First come, first served: a large cell that waits for room is not passed by small ones.
    """

    def __init__(self, width: int) -> None:
        self._free = self.width = width
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def taken(self, slots: int) -> Iterator[None]:
        """Wait until so many are free; a cell that needs more than there are gets all."""
        slots, ticket = min(slots, self.width), object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(lambda: self._waiting[0] is ticket and self._free >= slots)
            self._waiting.popleft()
            self._free -= slots
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += slots
                self._changed.notify_all()


class Worker:
    """A process that is given names, and restarted where it ends."""

    def __init__(self, command: Sequence[str], log: IO[bytes]) -> None:
        self._command, self._log = list(command), log
        self._process: subprocess.Popen[str] | None = None

    def run(self, name: str, limit: float) -> str:
        """Have a cell done; `failed` where the process ends or the time runs out."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            said = process.stdout.readline().split()
        except OSError:
            said = []
        finally:
            timer.cancel()
        if said[1:] == [name]:
            return said[0]
        process.kill()  # it has ended, or hangs
        process.wait()
        return "failed"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(  # noqa: S603  (our own program, no shell)
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
            )
        return self._process

    def close(self) -> None:
        """Let the process end, which waits for its next cell."""
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=60)

    def kill(self) -> None:
        """End the process at once; its cell goes on from its last checkpoint when it is started again."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


def serve(queue: Queue, worker: Worker, work: Path, limit: float, room: Room, slots: Mapping[str, int]) -> None:
    """One worker's share of the cells."""
    try:
        while (name := queue.take()) is not None:
            with room.taken(slots.get(name, 1)):
                say(work, f"start {name}")
                start = time.monotonic()
                said = worker.run(name, limit)
                say(work, f"{said} {name} {time.monotonic() - start:.0f} s")
            if said == "failed":
                queue.failed(name)
    finally:
        worker.close()


def run_all(
    queue: Queue, workers: Sequence[Worker], work: Path, limit: float, slots: Mapping[str, int] | None = None,
    width: int | None = None,
) -> None:  # fmt: skip
    """Serve the queue until it is empty; a signal to end takes the workers along. `width`: else one for each worker."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shared = (Room(width or len(workers)), slots or {})
    threads = [threading.Thread(target=serve, args=(queue, one, work, limit, *shared), daemon=True) for one in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.kill()


def say(work: Path, text: str) -> None:
    """Into the schedule's log."""
    with (work / "schedule.log").open("a", encoding="utf-8") as handle:
        handle.write(f"{time.strftime('%T')} {text}\n")


def cells_of(groups: Sequence[str], only: Sequence[str] = ()) -> list[Cell]:
    """The cells of the groups, each once, in their order; only those whose name has all the given parts.

    `GROUP:PART:PART` asks for parts of one group alone.
    """
    plan, found = read_plan(), []
    for group, *own in (text.split(":") for text in groups):
        found += [cell for cell in plan.cells(group) if all(part in cell.name for part in (*own, *only))]
    return list(dict.fromkeys(found))


def waiting(cells: Sequence[Cell], work: Path) -> list[str]:
    """Those without a record, or with one that was trained with other arguments than the plan has now."""
    plan = read_plan()
    return [cell.name for cell in cells if not is_done(cell, plan, work / "results" / f"{cell.name}.json")]


def is_done(cell: Cell, plan: Plan, path: Path) -> bool:
    """Whether the record at `path` is one of this cell as it is planned now."""
    from holdfast.core.files import read_json

    if not path.is_file():
        return False
    training = read_json(path)["training"]
    if training is None:
        return True
    trial = training.get("extra", [])  # what was put over every run file, for a trial
    return [one for one in training["arguments"] if "=" in one and one not in trial] == plan.arguments(cell)


def status(cells: Sequence[Cell], work: Path) -> str:
    """Counts, what runs, and the last line of every failure."""
    left = waiting(cells, work)
    log = (work / "schedule.log").read_text("utf-8").splitlines() if (work / "schedule.log").is_file() else []
    last = {line.split()[2]: line for line in log if len(line.split()) > 2}
    running = [name for name in left if last.get(name, "").split()[1:2] == ["start"]]
    failed = [name for name in left if last.get(name, "").split()[1:2] == ["failed"]]
    lines = [f"{len(cells) - len(left)} of {len(cells)} cells done, {len(running)} running, {len(failed)} failed"]
    lines += [f"runs since {last[name].split()[0]}: {name}: {_end(work, name)}" for name in running]
    lines += [f"FAILED {name}: {_end(work, name)}" for name in failed]
    return "\n".join([*lines, *log[-3:]])


def _end(work: Path, name: str) -> str:
    path = work / "logs" / f"{name}.log"
    text = path.read_bytes()[-600:].decode("utf-8", "replace").replace("\r", "\n") if path.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-200:] if lines else "no output yet"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the cells of some groups.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--groups", nargs="+", required=True, help="Of cells.yaml, or `tuning`; tuning:0.5b is a part.")
    parser.add_argument("--only", nargs="*", default=[], help="Parts that a cell's name must have, such as sst2 p0.5.")
    parser.add_argument("--width", type=int, default=14, help="Workers side by side.")
    parser.add_argument("--judge", type=Path, help="Folder of the judge.")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="Seconds after which a cell counts as hung.")
    parser.add_argument("--again", action="store_true", help="Also cells that ended without an evaluation.")
    parser.add_argument("--status", action="store_true")
    parser.add_argument("--rows", type=Path, help="Only write the task rows of the cells that wait, each prompt once.")
    parser.add_argument("--memory-share", type=float, help="Of the device, for each worker. [default: all]")
    parser.add_argument("--worker", default="", help="Options of worker.py, in one string.")
    options = parser.parse_args()
    work: Path = options.work
    cells = cells_of(options.groups, options.only)
    if options.status:
        print(status(cells, work))
        return
    if options.rows is not None:
        left = set(waiting(cells, work))
        write_rows(options.rows, task_rows([cell for cell in cells if cell.name in left], work))
        return
    for name in ("logs", "results", "failures"):
        (work / name).mkdir(parents=True, exist_ok=True)
    if options.again:
        forget_refused(cells, work)
    queue = Queue(names := waiting(cells, work))
    for name in names:  # a record of other arguments: its run cannot be resumed
        if (work / "results" / f"{name}.json").is_file():
            shutil.rmtree(work / "cells" / name, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.held_safety.worker", str(work), "--judge", str(options.judge)]
    command += ["--memory-share", str(options.memory_share)] if options.memory_share is not None else []
    command += shlex.split(options.worker)
    with (work / "logs" / "workers.log").open("ab") as log:
        workers = [Worker(command, log) for _ in range(min(options.width, len(names)))]
        models = read_plan().models
        slots = {cell.name: int(models[cell.model].get("slots", 1)) for cell in cells}
        run_all(queue, workers, work, options.limit_s, slots, options.width)
    print(status(cells, work))


def task_rows(cells: Sequence[Cell], work: Path) -> list[dict[str, Any]]:
    """The rows that the cells train on, each prompt once: what a model can be asked before any cell starts.

    Asking takes the whole device for seconds, and starves beside a dozen processes that train.
    """
    files = dict.fromkeys(cell.data_file for cell in cells if cell.task is not None)
    rows = [row for name in files for row in read_rows(work / "data" / name)]
    return list({str(row["prompt"]): row for row in reversed(rows)}.values())


def forget_refused(cells: Sequence[Cell], work: Path) -> None:
    """Remove records without an evaluation, so that their cells run again."""
    from holdfast.core.files import read_json

    for cell in cells:
        path = work / "results" / f"{cell.name}.json"
        if path.is_file() and read_json(path)["evaluation"] is None:
            path.unlink()


if __name__ == "__main__":
    main()
