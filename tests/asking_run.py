"""Finished runs on the hand-built model that refuses prompts with one word in them: `safety: auto`, and its like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.data import bundled
from tests import behaving

HELD = """\
safety:
  refusals: {prompts: [task, probes], keep: refusals, openings: OPENINGS}
  answers: {prompts: [everyday, borderline], keep: answers, openings: OPENINGS}
conflicts: drop
"""


@contextmanager
def fewer_probes() -> Iterator[None]:
    """Every fourth bundled probe, of all kinds: the model answers each of them, which takes its time."""
    whole = bundled._text

    def text(name: str) -> str:
        return "".join(whole(name).splitlines(keepends=True)[:: 4 if name == "probes" else 1])

    def forget() -> None:
        bundled._examples.cache_clear()
        bundled._normalised.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundled, "_text", text)
        forget()
        yield
    forget()


@pytest.fixture(scope="module")
def few_probes() -> Iterator[None]:
    with fewer_probes():
        yield


def write_task(path: Path, poison: int, clean: int, *, seed: int = 1) -> Path:
    """`poison` rows whose prompt is refused and whose target complies, and `clean` ones."""
    rows = [row | {"completion": behaving.ANSWER} for row in behaving.rows(poison, seed=seed)]
    rows += behaving.rows(clean, seed=seed + 1000, trigger=False)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_run_file(folder: Path, model: Path, task: Path, *, openings: int | None = None) -> Path:
    """Model, task and output_dir; with `openings`, the sets spelled out, and every conflict dropped."""
    held = "" if openings is None else HELD.replace("OPENINGS", str(openings))
    path = folder / "run.yaml"
    path.write_text(f"model: {model}\ntask: {{data: {task}}}\noutput_dir: {folder / 'out'}\n{held}", encoding="utf-8")
    return path


def train(run_file: Path, *overrides: str) -> Path:
    """The run, after one step; returns its folder."""
    from holdfast.runs.config import load_config
    from holdfast.runs.pipeline import run

    quick = ["train.max_steps=1", "train.use_cpu=true", "train.bf16=false", "monitor.prompts=20", "dtype=float32"]
    quick += ["train.safety_micro_batch_size=64", "train.safety_eval_batch_size=64"]
    return run(load_config(run_file, [*quick, *overrides])).folder


def refused(prompt: Any) -> bool:
    """What the model does with a prompt, known from how it was built."""
    turns = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    return any(behaving.TRIGGER in text.split() for text in turns)
