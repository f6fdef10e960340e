"""Work that stands in for training: it counts steps in a file, so that it can be killed and go on, and leaves a trace.

What it does is steered by `protocol["fake"]`: `steps` and `pause` (seconds), `fail` (word in the node's id -> how).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.files import write_text
from holdfast.core.hashing import sha256_json

CALLS = {name: f"tests.unit.study.fakes:{name}" for name in ("load_protocol", "run_alignment", "run_cell", "check")}
SECRET = "a text that must stay out of records"
KNOWN = (["sft", "holdfast", "antibody"], ["sst2", "ag_news", "gsm8k"])


class Protocol(dict):
    def model_dump(self) -> dict[str, Any]:
        return dict(self)


def load_protocol(preset: str, overrides: Mapping[str, Any]) -> Protocol:
    return Protocol({"preset": preset, **overrides})


def trace(node: Mapping[str, Any]) -> Path:
    return Path(node["shared"]).parent / "trace.jsonl"


def leave(node: Mapping[str, Any], event: str) -> None:
    line = json.dumps({"event": event, "node": node["id"], "pid": os.getpid(), "time": time.time()}).encode() + b"\n"
    descriptor = os.open(trace(node), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line)
    os.close(descriptor)


def work(node: Mapping[str, Any], folder: Path) -> None:
    leave(node, "begin")
    fake = node["protocol"].get("fake", {})
    for word, how in fake.get("fail", {}).items():
        if word in node["id"]:
            fail(how)
    steps = folder / "steps.txt"
    done = int(steps.read_text()) if steps.exists() else 0
    for step in range(done, fake.get("steps", 1)):
        time.sleep(fake.get("pause", 0))
        write_text(steps, str(step + 1))
        leave(node, "step")
    leave(node, "end")


def fail(how: str) -> None:
    if how == "data":
        raise DataError("row 3 is empty", remedy="remove it")
    if how == "bug":
        raise RuntimeError(SECRET)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(17)
    if how == "interrupted":
        raise KeyboardInterrupt
    raise AssertionError(how)


def run_alignment(node: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    work(node, folder)
    return {"adapter": "x", "model": node["model"]["ref"], "align": node["align"]}


def run_cell(node: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A result of the shape that tables read; its figure depends on the cell."""
    started = time.monotonic()
    if node["aligned"] is not None:
        assert (Path(node["aligned"]) / "outcome.json").is_file(), "the alignment comes first"
    work(node, folder)
    cell = node["cell"]
    value = int(sha256_json(cell["task"] + cell["defense"]["name"])[:6], 16) / 16**6
    return {
        "version": 1,
        "model": cell["model"]["name"], "model_ref": cell["model"]["ref"], "task": cell["task"],
        "defense": cell["defense"]["name"], "label": cell["defense"]["label"], "setting": cell["defense"]["setting"],
        "align": cell["align"], "poison_ratio": cell["poison_ratio"], "seed": cell["seed"],
        "protocol_sha256": "0" * 64, "protocol": node["protocol"],
        "metrics": {"HS": {"value": value, "low": None, "high": None, "n": 700}},
        "seconds": {"train": time.monotonic() - started}, "provenance": {"pid": os.getpid()},
    }  # fmt: skip


def check(protocol: Mapping[str, Any], cells: list[Any], *, data: bool) -> None:
    if protocol.get("fake", {}).get("refuse"):
        raise DataError("no judge", remedy="train one")


def nothing_is_a_mapping(node: Mapping[str, Any], folder: Path) -> Any:
    return None


def run_study_in_this_process(argument: str) -> None:
    """`python -m tests.unit.study.fakes STUDY_AS_JSON`: a scheduler that a test can kill."""
    from holdfast_lab.study.config import StudyConfig
    from holdfast_lab.study.schedule import Calls, make_plan, run_study

    study = StudyConfig.model_validate(json.loads(argument))
    run_study(make_plan(study, calls=Calls(*CALLS.values()), names=lambda: KNOWN))


if __name__ == "__main__":
    import sys

    run_study_in_this_process(sys.argv[1])
