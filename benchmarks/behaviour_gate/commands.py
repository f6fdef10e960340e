"""The commands of the experiment, all in one place, and how one is run and recorded.

Paths are relative to the folder of the data, in which every command runs, so that records name no machine.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import SEEDS

from holdfast.core.provenance import commit, hardware, versions

MODEL = "models/qwen2.5-coder-0.5b-instruct"
MODEL_NAME = "Qwen2.5-Coder-0.5B-Instruct"
GGUF_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
"""Of the publisher's Q4_K_M file, from which the model's folder was converted (bfloat16)."""

RUNS = ("sft", "holdfast")
WAYS = ("behaviour", "likelihood")
ALPHA = "0.05"
PROMPTS = {"behaviour": "evaluation.jsonl", "likelihood": "evaluation_pairs.jsonl"}
DTYPE = {"behaviour": "float32", "likelihood": "float32"}
"""Models were trained in bfloat16. Replies in bfloat16 change with the batch they are made in, so they are compared in
float32; likelihoods are too, for one table."""

OPENINGS = len(RUNS) * len(SEEDS) * len(WAYS)
LEDGER = "openings.json"
"""All certificates are about the same 700 prompts, so they share one ledger, which declares them all: each gets an
equal part of the allowed error, and all statements hold together with 95 % confidence."""


def train_command(run: str, seed: int) -> list[str]:
    """Fine-tune: plain SFT, or holdfast on the model's own refusals."""
    return [
        "train", "run.yaml", f"defense={run}", f"seed={seed}", f"task.data=task.s{seed}.jsonl",
        f"safety.data=safety.s{seed}.jsonl", f"output_dir=runs/{run}.s{seed}", "--json",
    ]  # fmt: skip


def certify_command(run: str, seed: int, by: str) -> list[str]:
    """The gate: the model as shipped against the fine-tuned one."""
    return [
        "certify", "--before", MODEL, "--after", f"runs/{run}.s{seed}/adapter", "--prompts", PROMPTS[by],
        "--by", by, "--alpha", ALPHA, "--openings", str(OPENINGS), "--ledger", LEDGER,
        "--train-data", f"task.s{seed}.jsonl", "--train-data", f"safety.s{seed}.jsonl",
        "--dtype", DTYPE[by], "--output", f"certificates/{run}.s{seed}.{by}", "--json",
    ]  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A command that ended.

    Attributes:
        command: as one would type it.
        exit_code: its exit code.
        seconds: wall-clock time.
        out: standard output.
        message: the last lines of standard error where it did not print a result.
    """

    command: str
    exit_code: int
    seconds: float
    out: str
    message: str

    def record(self) -> dict[str, Any]:
        """What every record of the experiment holds."""
        return {
            "command": self.command, "exit_code": self.exit_code, "seconds": round(self.seconds, 1),
            "model": {"name": MODEL_NAME, "gguf_sha256": GGUF_SHA256},
            "provenance": {
                "commit": commit() or os.environ.get("HOLDFAST_COMMIT"), "hardware": hardware(), "versions": versions(),
            },
        }  # fmt: skip


def run_command(arguments: list[str], work: Path, name: str) -> Done:
    """Run `holdfast ARGUMENTS` in the folder `work`; what it says while it runs goes to WORK/logs/NAME.log."""
    log = work / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as handle:
        done = subprocess.run(  # noqa: S603  (our own program, no shell)
            [sys.executable, "-m", "holdfast", *arguments],
            cwd=work, stdout=subprocess.PIPE, stderr=handle, text=True, check=False,
        )  # fmt: skip
    seconds = time.monotonic() - started
    lines = [line for line in log.read_text("utf-8").splitlines() if line.strip()]
    message = "" if done.stdout.strip() else "\n".join(lines[-4:])
    return Done(shlex.join(["holdfast", *arguments]), done.returncode, seconds, done.stdout, message)
