"""Runs of Axolotl, each in a process of its own: its plugins and patches last as long as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import behaving

AXOLOTL = {
    "sequence_len": 64, "adapter": "lora", "lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.3,
    "lora_target_modules": ["v_proj", "o_proj"], "micro_batch_size": 2, "gradient_accumulation_steps": 1,
    "num_epochs": 1, "max_steps": 6, "learning_rate": 0.005, "optimizer": "adamw_torch", "lr_scheduler": "constant",
    "warmup_steps": 0, "val_set_size": 0, "bf16": False, "tf32": False, "gradient_checkpointing": False,
    "save_strategy": "no", "logging_steps": 1, "seed": 42, "dataset_num_proc": 1,
}  # fmt: skip
PLUGIN = ["holdfast.integrations.axolotl.HoldfastPlugin"]
DRIVEN = [sys.executable, str(Path(__file__).with_name("driven.py"))]
COMMAND = [str(Path(sys.executable).with_name("axolotl")), "train", "--launcher", "python"]


class Folder:
    """A model that refuses one word, task files, and what Axolotl makes of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        behaving.saved(path / "model")
        self.poison = [row | {"completion": behaving.ANSWER} for row in behaving.rows(600, seed=1)]
        self.clean = behaving.rows(40, seed=2, trigger=False)
        self.write("pairs", behaving.rows(600, seed=77))

    def write(self, name: str, rows: list[dict[str, str]]) -> str:
        file = self.path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    def chat(self, name: str, rows: list[dict[str, str]]) -> list[dict[str, str]]:
        """Rows as Axolotl's `chat_template` type reads them; its `datasets:` block."""
        turns = [[("user", row["prompt"]), ("assistant", row["completion"])] for row in rows]
        written: Any = [{"messages": [{"role": r, "content": c} for r, c in one]} for one in turns]
        return [{"path": self.write(name, written), "type": "chat_template"}]

    def train(
        self, name: str, datasets: Any, command: list[str], *, kill: str = "", **changes: Any
    ) -> tuple[Path, int, str]:
        """One run: its output folder, exit code and what it printed; `kill`: the file in it that ends the process."""
        values = {
            **AXOLOTL, "base_model": str(self.path / "model"), "datasets": datasets,
            "output_dir": str(self.path / name), "dataset_prepared_path": str(self.path / f"prepared-{name}"),
        }  # fmt: skip
        values = {key: value for key, value in {**values, **changes}.items() if value is not None}
        file = self.path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1", "HOLDFAST_CACHE": str(self.path / "cache"), "HF_HOME": str(self.path / "hub"),
        }  # fmt: skip
        place, last = 2 if command is COMMAND else len(command), [str(self.path / name / kill)] if kill else []
        done = subprocess.run(
            [*command[:place], str(file), *command[place:], *last], capture_output=True, text=True, timeout=900,
            check=False, env=environment, cwd=self.path,
        )  # fmt: skip
        return self.path / name, done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Folder:
    return Folder(tmp_path_factory.mktemp("axolotl"))
