"""Train one cell with the command a user would type, and keep the figures of its run.

The command runs inside this process (`holdfast.cli.main`), so that a worker starts once for many cells; its output goes
to the cell's log. Figures are counts, rates and hashes: no text, no place.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.held_safety.cells import SAFETY_FILE, SAFETY_SETS, Cell, Plan, run_file
from benchmarks.held_safety.data import examples_of

from holdfast.core.errors import HoldfastError
from holdfast.core.files import read_json, write_text
from holdfast.core.hashing import sha256_file
from holdfast.records.audit import Audit

RESULT = (
    "steps", "seconds", "step", "step_declined", "data", "safety", "behaviour", "screening", "conflicts", "spikes",
    "rollback", "barrier", "defense", "config_sha256",
)  # fmt: skip
UNIT = "kl_token"


def prepare(cell: Cell, plan: Plan, work: Path) -> Path:
    """The cell's folder with its run file and data."""
    folder = work / "cells" / cell.name
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "run.yaml", run_file(cell, plan.models[cell.model]["folder"]))
    copied = {"task.jsonl": work / "data" / cell.data_file}
    if cell.method in SAFETY_SETS:
        copied[SAFETY_FILE] = safety_file(cell.method, cell.model, work)
    for name, source in copied.items():
        if not (folder / name).is_file():
            shutil.copy(source, folder / name)
    return folder


def safety_file(method: str, model: str, work: Path) -> Path:
    """Where a method's own safety data lie; the own refusals of a model are made by ask.py."""
    kind = SAFETY_SETS[method]
    return work / "sets" / f"{kind}.{model}.jsonl" if kind == "advbench" else work / "data" / f"{kind}.jsonl"


def train(cell: Cell, plan: Plan, work: Path, log: Path, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Run the cell's command, from its last checkpoint where there is one."""
    folder = prepare(cell, plan, work)
    arguments = ["train", "run.yaml", *plan.arguments(cell), *extra, "--json"]
    if (folder / "run").exists():
        arguments.append("--resume")
    start = time.monotonic()
    code = holdfast(arguments, folder, log)
    adapter = folder / "run" / "adapter"
    return {
        "run_file": (folder / "run.yaml").read_text("utf-8"),
        "arguments": arguments[2:], "extra": list(extra), "exit_code": code, "adapter": adapter.is_dir(),
        "message": "" if code == 0 else last_lines(log, work),
        "seconds": round(time.monotonic() - start, 1),
        "result": run_figures(folder / "run"),
        "screening": screening_figures(folder),
        "task_sha256": sha256_file(folder / "task.jsonl"),
        "safety_sha256": sha256_file(folder / SAFETY_FILE) if (folder / SAFETY_FILE).is_file() else None,
    }  # fmt: skip


def holdfast(arguments: Sequence[str], folder: Path, log: Path) -> int:
    """Run `holdfast ARGUMENTS` in a folder; returns its exit code."""
    from holdfast.cli.main import main

    before, here = sys.argv, Path.cwd()
    with output_to(log):
        try:
            sys.argv = ["holdfast", *arguments]
            os.chdir(folder)
            main()
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception:  # noqa: BLE001  (a bug of ours: it belongs into the log, and the next cell goes on)
            traceback.print_exc()
            return 1
        finally:
            sys.argv = before
            os.chdir(here)
    return 0


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Both outputs of this process into a file, those of libraries too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    _flush()
    saved = os.dup(1), os.dup(2)
    try:
        with log.open("a", encoding="utf-8", buffering=1) as handle:
            os.dup2(handle.fileno(), 1)
            os.dup2(handle.fileno(), 2)
            with redirect_stdout(handle), redirect_stderr(handle):
                yield
    finally:
        _flush()
        for number, kept in zip((1, 2), saved, strict=True):
            os.dup2(kept, number)
            os.close(kept)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def last_lines(log: Path, work: Path, n: int = 4) -> str:
    """The end of a log without places."""
    text = log.read_text("utf-8", errors="replace").replace("\r", "\n").replace(f"{work.resolve()}/", "")
    return "\n".join([line for line in text.splitlines() if line.strip()][-n:])[-600:]


def run_figures(run: Path) -> dict[str, Any] | None:
    """What result.json, the audits and the events say; None where the run did not finish."""
    if not (run / "result.json").is_file():
        return None
    values = read_json(run / "result.json")
    return {name: values[name] for name in RESULT if name in values} | {
        "mean_kl": mean_kl(run, values.get("safety", {})), "events": event_figures(run / "events.jsonl"),
    }  # fmt: skip


def mean_kl(run: Path, sets: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Mean KL per token from the shipped model, by safety set and role."""
    found: dict[str, dict[str, float]] = {}
    for name in sets:
        folder = run / name if (run / name / "audit.json").is_file() else run
        try:
            audit = Audit.load(folder)
            by_role = {role: audit.degradations(UNIT, role=role) for role in ("constraint", "monitor")}
        except HoldfastError:
            continue
        found[name] = {role: float(values.mean()) for role, values in by_role.items() if len(values)}
    return found


def event_figures(path: Path) -> dict[str, Any]:
    """How often each kind of step occurred, and the last and largest g of every constraint."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    steps = [row for row in map(json.loads, lines) if "loss" in row]  # the monitor has rows of its own
    values: dict[str, list[float]] = {}
    for row in steps:
        for name, one in row.get("constraints", {"g": row}).items():
            if isinstance(one.get("g"), int | float):
                values.setdefault(name, []).append(one["g"])
    return {
        "kinds": dict(Counter(str(row.get("event")) for row in steps)),
        "g": {name: {"last": v[-1], "largest": max(v)} for name, v in values.items()},
        "last_loss": _mean([row["loss"] for row in steps[-50:] if isinstance(row["loss"], int | float)]),
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def screening_figures(folder: Path) -> dict[str, Any] | None:
    """How many poison and how many clean rows were in conflict; None where nothing was screened."""
    path = folder / "run" / "screening" / "conflicts.jsonl"
    if not path.is_file():
        return None
    conflicts = {json.loads(line)["id"] for line in path.read_text("utf-8").splitlines()}
    flags = read_json(folder.parents[1] / "data" / "data.json")["files"]
    digest = sha256_file(folder / "task.jsonl")
    poison = next((one["poison"] for one in flags.values() if one["sha256"] == digest and "poison" in one), None)
    return None if poison is None else conflict_counts(folder / "task.jsonl", poison, conflicts)


def conflict_counts(task: Path, poison: str, conflicts: set[str]) -> dict[str, int]:
    """Rows of either kind, and how many of them are in conflict."""
    ids = [example.id for example in examples_of(task)]
    found = [example_id in conflicts for example_id in ids]
    return {
        "poison": poison.count("1"), "poison_found": sum(f for f, p in zip(found, poison, strict=True) if p == "1"),
        "clean": poison.count("0"), "clean_found": sum(f for f, p in zip(found, poison, strict=True) if p == "0"),
    }  # fmt: skip
