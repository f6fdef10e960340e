"""The demonstration's shipped data, cut to its size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.core.seeding import generator
from holdfast.data.examples import Example, as_chat, prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.data.sources import read_examples
from holdfast.demo.settings import DemoSettings

DATA_DIR = Path(__file__).parent / "data"
"""Written by tools/demo_data.py."""
PROBES, ORDINARY = str(DATA_DIR / "probes.jsonl"), str(DATA_DIR / "ordinary.jsonl")
"""Prompts that screening asks beside the task's."""


@dataclass(frozen=True)
class DemoData:
    """What is trained on, and what is only asked.

    Attributes:
        task: the user's file: reviews to label, with poison mixed in.
        poison: places of the poison in it.
    """

    task: list[Example]
    poison: frozenset[int]
    test_task: list[Example]
    test_probes: list[Example]
    test_ordinary: list[Example]


def load_data(settings: DemoSettings) -> DemoData:
    """Read the shipped files; poison is mixed into the task in a fixed order."""
    clean = _read("task_train", settings.task_rows)
    rows = [as_chat(e) for e in [*clean, *_read("poison", settings.poison_rows)]]
    order = generator(settings.seed, "demo mixture").permutation(len(rows)).tolist()
    return DemoData(
        task=[rows[i] for i in order],
        poison=frozenset(place for place, i in enumerate(order) if i >= len(clean)),
        test_task=_apart("test_task")[: settings.test_task],
        test_probes=_apart("test_probes")[: settings.test_probes],
        test_ordinary=_apart("test_ordinary")[: settings.test_ordinary],
    )


def _read(name: str, limit: int | None = None) -> list[Example]:
    return read_examples(str(DATA_DIR / f"{name}.jsonl"), limit=limit)


def _apart(name: str) -> list[Example]:
    """The prompts of a test file that are no near-duplicates of what is trained on or asked by screening."""
    others = [prompt_text(e) for other in ("align", "probes", "ordinary", "poison", "task_train") for e in _read(other)]
    examples = _read(name)
    near = {place for place, _ in matches([prompt_text(e) for e in examples], others)}
    return [example for place, example in enumerate(examples) if place not in near]
