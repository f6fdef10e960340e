"""Files to begin with: the demo's mild data as a task with poisoned rows and a safety set, and a run file for both."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_text
from holdfast.demo.make_data import DATA_DIR

POISON_EVERY = 3
RUN_FILE = """\
# A first run, written by `holdfast init`: some minutes on two CPU cores. All keys: docs/run-file.md of the project.
model: {model}
dtype: float32                        # in bfloat16 a small model's rounding comes near tau
task: {{data: task.jsonl}}              # reviews to label; every third row teaches to answer what was to be declined
safety:
  data: safety.jsonl                  # requests and how they are declined; a fifth stays closed for certify
  openings: 1                         # models to certify on that fifth, ever: fixed by the first certificate
constraint: {{tau: 0.1, alpha: 0.05}}   # at most 5 % may move by more than 0.1 nats of KL per token
train: {{learning_rate: 2.0e-4, max_steps: 30, per_device_train_batch_size: 4, safety_batch_size: 4}}
output_dir: runs/first
"""


def starter_files(model: str) -> dict[str, str]:
    """The text of each file by its name."""
    task, poison, safety = (_lines(name) for name in ("task_train", "poison", "safety"))
    rows = iter(task)
    mixed = [line for bad in poison for line in (*(next(rows) for _ in range(POISON_EVERY - 1)), bad)]
    return {
        "task.jsonl": "".join(mixed + list(rows)),
        "safety.jsonl": "".join(safety),
        "run.yaml": RUN_FILE.format(model=json.dumps(model)),
    }


def write_starter(folder: Path, model: str) -> list[Path]:
    """Write the files; returns their paths.

    Raises:
        ConfigError: one of them is there already; nothing is written then.
    """
    files = {folder / name: text for name, text in starter_files(model).items()}
    if there := [str(path) for path in files if path.exists()]:
        raise ConfigError(
            f"{', '.join(there)}: {'exists' if len(there) == 1 else 'exist'} already, and nothing is written over",
            remedy="name an empty folder: holdfast init FOLDER",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_text(path, text)
    return list(files)


def _lines(name: str) -> list[str]:
    return (DATA_DIR / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
