"""Watched runs, killed while the monitor asks, and resumed.

`main` runs in a process of its own; each attempt is a fork of it. `report.json` says how the attempts ended and what
the finished runs hold.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.watched import build, prompts

from holdfast.core.event_log import read
from holdfast.core.hashing import sha256_file
from holdfast.training import behaviour

OPTIONS = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "learning_rate": 4e-3, "rollback": True}


class KillWhileAsking:
    """An engine that kills its process at the n-th asking, after the first replies."""

    name = "killing"

    def __init__(self, inner: Any, left: list[int]) -> None:
        self._inner, self._left = inner, left

    def generate(self, examples: Any, *, max_new_tokens: int) -> Any:
        self._left[0] -= 1
        for batch in self._inner.generate(examples, max_new_tokens=max_new_tokens):
            yield batch
            if self._left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def attempt(folder: Path, kill_at: int | None) -> None:
    """One process's life: resume where there is anything, train to the end, write adapter and figures."""
    trainer = build(folder, dropout=0.2, **OPTIONS)
    trainer.watch_behaviour(prompts(40), every=3)
    if kill_at is not None:
        opened, left = behaviour.open_engine, [kill_at]  # type: ignore[attr-defined]
        behaviour.open_engine = lambda *a, **k: KillWhileAsking(opened(*a, **k), left)  # type: ignore[attr-defined]
    found = trainer.store.checkpoints()
    trainer.train(resume_from_checkpoint=True if found else None)
    trainer.save_model(str(folder / "adapter"))
    (folder / "behaviour.json").write_text(json.dumps(trainer.behaviour_result()))


def forked(folder: Path, kill_at: int | None) -> int:
    """How an attempt in a fork of this process ended: its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            log = os.open(folder.parent / "children.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            attempt(folder, kill_at)
            status = 0
        except BaseException:  # noqa: BLE001  (the child must not return into its parent's code)
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finished(folder: Path) -> dict[str, Any]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read(folder / "run" / "events.jsonl")]
    return {
        "sha256": sha256_file(folder / "adapter" / "adapter_model.safetensors"),
        "behaviour": json.loads((folder / "behaviour.json").read_text()),
        "rows": rows,
    }


def campaign(root: Path) -> dict[str, Any]:
    endings = {"whole": [forked(root / "whole", None)]}
    for kill_at in (1, 3, 5):  # askings of a whole run: steps 2, 3, 4, 6, 8
        endings[str(kill_at)] = [forked(root / str(kill_at), kill_at), forked(root / str(kill_at), None)]
    return {"endings": endings, "runs": {name: finished(root / name) for name in endings}}


def main(root: Path) -> None:
    build(root / "warm", dropout=0.2, **OPTIONS)  # what forks share: imports, tokenised rows
    gc.freeze()
    (root / "report.json").write_text(json.dumps(campaign(root)))
