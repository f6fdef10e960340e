"""Training runs to be interrupted: a small one to build anywhere, and a process that kills its own forks.

`main` runs in a process of its own and forks one child per attempt, since importing takes ten times as long as
training. A child resumes from the newest checkpoint, if any, and is killed; `report.json` says where each one died and
what the finished runs hold.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tests import tiny
from transformers import TrainerCallback

import holdfast as hf
from holdfast.core.event_log import read
from holdfast.core.hashing import sha256_file

STEPS = 9
# 26 rows in micro-batches of 2, two to a step: seven steps an epoch, the last of them with a single micro-batch.
COMMON = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "gradient_checkpointing": False,
    "learning_rate": 2e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
    "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "max_length": 32, "disable_tqdm": True,
    "logging_steps": 1, "safety_batch_size": 6, "safety_micro_batch_size": 6,
}  # fmt: skip
CONSTRAINT = hf.ChanceConstraint(tau=0.05, beta=20.0, unit="nll_token")


def task_rows() -> list[dict[str, str]]:
    return tiny.rows(26, seed=1, start="w1")


def safety_rows() -> list[dict[str, str]]:
    return tiny.rows(24, seed=2)


def build(folder: Path, *, args: dict[str, Any] | None = None, **changes: Any) -> hf.SafeSFTTrainer:
    """A trainer with its own model and data in `folder`; `changes` replace its arguments, `start` makes its model."""
    start = changes.pop("start", lambda: tiny.model(layers=1))
    given: dict[str, Any] = {
        "model": changes.pop("model", None) or start(),
        "processing_class": tiny.tokenizer(),
        "train_dataset": tiny.Dataset.from_list(task_rows()),
        "peft_config": tiny.lora(0.2),
        "safety_dataset": tiny.Dataset.from_list(safety_rows()),
        "constraint": CONSTRAINT,
        "defense": "holdfast",
        **changes,
    }
    cache = folder.parents[1] / "references"  # one for all tests: they start from the same model
    config = hf.SafeSFTConfig(str(folder), reference_cache=str(cache), **{**COMMON, **(args or {})})
    torch.manual_seed(random.SystemRandom().getrandbits(32))  # a new process starts from any state
    return hf.SafeSFTTrainer(args=config, **given)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The event log without the clock."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read(folder / "events.jsonl")]


# Killing

STARTING, TRAINING, SAVING, DONE = b"starting", b"training", b"saving  ", b"done    "
FILE_EVENTS = frozenset({"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.listdir"})
STEP_EVENTS = (
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_save",
)
PLAN = ("save", "step", "save", "clock") * 5


@dataclass(frozen=True)
class Kill:
    """When a child dies.

    Attributes:
        kind: `save` (before its `count`-th file operation inside saves), `step` (at the `count`-th `event` of training)
            or `clock` (`seconds` after its start, by the parent).
    """

    kind: str
    count: int = 0
    event: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Death:
    """How a child ended: the kill that struck, what it was doing, where it had resumed, what it left half-done."""

    kill: Kill
    doing: str
    resumed_from: int
    left_staging: bool


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillInSave:
    """Audit hook that kills before the n-th file operation of a save; a file about to be written is left torn."""

    def __init__(self, count: int, mark: mmap.mmap) -> None:
        self.left, self.mark = count, mark

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS or self.mark[:8] != SAVING:
            return
        self.left -= 1
        if self.left == 0:
            if event == "open" and "w" in str(arguments[1]):
                Path(arguments[0]).write_bytes(b'{"torn')
            die()


class KillInStep(TrainerCallback):
    """Kills at the n-th occurrence of one event of the training loop."""

    def __init__(self, event: str, count: int) -> None:
        self.left = count
        setattr(self, event, self.strike)

    def strike(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            die()


def attempt(folder: Path, kill: Kill | None, mark: mmap.mmap) -> None:
    """One process's life: resume if there is anything to resume from, train to the end, write the adapter."""
    trainer = build(folder, args={"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3})
    save = trainer._save_checkpoint

    def marked_save(*args: Any) -> None:
        mark[:8] = SAVING
        save(*args)
        mark[:8] = TRAINING

    trainer._save_checkpoint = marked_save  # type: ignore[assignment]
    if kill and kill.kind == "save":
        sys.addaudithook(KillInSave(kill.count, mark))
    if kill and kill.kind == "step":
        trainer.add_callback(KillInStep(kill.event, kill.count))
    found = trainer.store.checkpoints()
    mark[8:16] = (int(found[-1].name.rpartition("-")[2]) if found else 0).to_bytes(8, "little")
    mark[:8] = TRAINING
    trainer.train(resume_from_checkpoint=True if found else None)
    trainer.save_model(str(folder / "adapter"))
    mark[:8] = DONE


def forked(folder: Path, kill: Kill | None) -> Death | None:
    """Run an attempt in a fork of this process; None when it finished."""
    mark = mmap.mmap(-1, 16)
    mark[:8] = STARTING
    log = folder.parent / "children.log"
    child = os.fork()
    if child == 0:
        status = 70
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            attempt(folder, kill, mark)
            status = 0
        except BaseException:  # noqa: BLE001  (the child must not return into its parent's code)
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    if kill and kill.kind == "clock":
        time.sleep(kill.seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return None
    if status != -signal.SIGKILL or kill is None:
        raise RuntimeError(f"a child ended with {status}:\n{log.read_text()[-3000:]}")
    staging = any(folder.glob(".tmp-checkpoint-*"))
    return Death(kill, bytes(mark[:8]).decode().strip(), int.from_bytes(mark[8:16], "little"), staging)


def draw_kill(kind: str, draw: random.Random, seconds: float) -> Kill:
    """A random moment of this kind; `seconds` is how long a whole run takes."""
    if kind == "save":  # one save takes about 85 file operations
        return Kill(kind, count=draw.randint(1, 170))
    if kind == "step":
        return Kill(kind, count=draw.randint(1, 6), event=draw.choice(STEP_EVENTS))
    return Kill(kind, seconds=draw.uniform(0.0, seconds))


def finished(folder: Path) -> dict[str, Any]:
    return {
        "sha256": sha256_file(folder / "adapter" / "adapter_model.safetensors"),
        "rows": rows_of(folder),
        "quarantined": len(list(folder.glob("quarantine-*"))),
        "leftovers": len(list(folder.glob(".tmp-*"))),
    }


def campaign(root: Path, seed: int, kills: int) -> dict[str, Any]:
    """Kill `kills` children at random moments, restarting each; a run that gets through makes room for the next."""
    start = time.monotonic()
    if forked(root / "whole", None) is not None:
        raise RuntimeError("the uninterrupted run was interrupted")
    seconds = time.monotonic() - start
    draw, deaths, runs = random.Random(seed), [], []
    while len(deaths) < kills:
        folder = root / f"run-{len(runs)}"
        death = forked(folder, draw_kill(PLAN[len(deaths) % len(PLAN)], draw, seconds))
        if death is None:
            runs.append(finished(folder))
        else:
            deaths.append(death)
    folder = root / f"run-{len(runs)}"
    forked(folder, None)
    runs.append(finished(folder))
    return {"expected": finished(root / "whole"), "runs": runs, "deaths": [asdict(death) for death in deaths]}


def main(root: Path, seed: int, kills: int) -> None:
    build(root / "warm" / "run")  # what forks share: imports, tokenised rows
    gc.freeze()
    (root / "report.json").write_text(json.dumps(campaign(root, seed, kills)))
