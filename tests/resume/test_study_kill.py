"""A study killed five times and run again: the same results, no finished cell begun again, no worker left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED, KILLS = 20264, 5
STEPS, CELLS, ALIGNMENTS, WORKERS = 6, 6, 2, 2
PATIENCE = 300  # only a bound: every write is flushed to disk, which takes its time beside other work


def settings(folder: Path) -> dict:
    """Two alignments and six cells of six steps each, two at a time."""
    entries = ["sft", "holdfast", {"name": "holdfast", "align": "antibody"}]
    return {
        "models": ["embedded"], "tasks": ["sst2", "ag_news"], "defenses": entries, "references": False,
        "workers": WORKERS, "protocol": {"fake": {"steps": STEPS, "pause": 0.02}}, "output_dir": str(folder),
    }  # fmt: skip


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.study.fakes", json.dumps(settings(folder))],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def lines(path: Path) -> list[dict]:
    """Whole lines of a log."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def steps(folder: Path) -> int:
    trace = folder / "trace.jsonl"
    return trace.read_text().count('"step"') if trace.exists() else 0


def alive(pid: int) -> bool:
    """Whether a worker runs as this process: one that is dead and not yet collected does not, nor does a new owner."""
    try:
        return b"holdfast_lab.study.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the latter: collected between opening the file and reading it
        return False


def wait_until(what, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert process is None or process.poll() is None, "the study ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_after(folder: Path, wanted: int) -> set[str]:
    """Run until `wanted` steps were made in all, kill the scheduler; returns the nodes that were finished by then."""
    process = start(folder)
    try:
        wait_until(lambda: steps(folder) >= wanted, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    workers = {row["pid"] for row in lines(folder / "trace.jsonl")}
    wait_until(lambda: not any(alive(pid) for pid in workers))
    return {path.parent.name for path in folder.glob("*/*/outcome.json")}


def results(folder: Path) -> dict[str, dict]:
    """Result files without what may differ: how long it took, and who did it.

    A worker killed inside an atomic write leaves its hidden temporary file behind, which is no result.
    """
    found = {path.name: json.loads(path.read_text()) for path in (folder / "results").glob("*.json")}
    for value in found.values():
        del value["seconds"], value["provenance"]
    return found


def test_a_killed_study_goes_on_and_ends_in_the_same_results(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(PATIENCE) == 0
    total = STEPS * (CELLS + ALIGNMENTS)
    points = sorted(random.Random(SEED).sample(range(2, total - 14), KILLS))
    begun_after = []
    for wanted in points:
        finished = kill_after(killed, wanted)
        begun_after.append((finished, len(lines(killed / "trace.jsonl"))))
    assert start(killed).wait(PATIENCE) == 0

    assert len(results(whole)) == CELLS
    assert results(killed) == results(whole)
    trace = lines(killed / "trace.jsonl")
    assert any(finished for finished, _ in begun_after)  # the kills struck a study with finished cells in it
    for finished, position in begun_after:
        again = {row["node"] for row in trace[position:] if row["event"] == "begin"} & finished
        assert not again
    done: set[str] = set()
    for row in lines(killed / "events.jsonl"):
        assert not (row["event"] == "start" and row["node"] in done)
        done |= {row["node"]} if row["event"] == "finish" else set()
    # A killed cell went on with its own steps. A kill can fall between storing a step and leaving its trace.
    counts = [sum(r["node"] == node and r["event"] == "step" for r in trace) for node in {r["node"] for r in trace}]
    assert max(counts) == STEPS
    assert sum(counts) >= total - WORKERS * KILLS


def test_a_worker_dies_with_its_scheduler_even_while_it_sleeps(tmp_path):
    """The kernel ends it, not the worker's own attention."""
    slow = settings(tmp_path / "out")
    slow["protocol"]["fake"]["pause"] = 120
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.study.fakes", json.dumps(slow)],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    try:
        wait_until(lambda: lines(tmp_path / "out" / "trace.jsonl"), process)
    finally:
        process.kill()
        process.wait()
    (first, *_) = lines(tmp_path / "out" / "trace.jsonl")
    wait_until(lambda: not alive(first["pid"]))
