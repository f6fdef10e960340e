"""The trial of a built package refuses a demo whose constraints did not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.try_package import require_held


def events(folder: Path, *rows: dict[str, float | None]) -> Path:
    """A log with these values of the constraints, one row a step, and a row of another kind at its end."""
    lines = [
        {"step": step, "loss": 1.0, "g": None, "constraints": {name: {"g": g} for name, g in row.items()}}
        for step, row in enumerate(rows, start=1)
    ]
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": len(rows), "behaviour": {}}]))
    return path


HELD = {"refusals": -0.01, "answers": 0.0}


def test_a_demo_that_held_passes(tmp_path):
    assert require_held(events(tmp_path, *[HELD] * 6)) == "g above 0 in 0 of 6 steps of the demo"
    assert require_held(events(tmp_path, *[HELD] * 19, {**HELD, "answers": 0.1})).startswith("g above 0 in 1 of 20")


@pytest.mark.parametrize("g", [1e-6, None])
def test_more_than_a_twentieth_over_a_limit_is_refused(tmp_path, g):
    """Of whichever constraint; what was not finite did not hold."""
    with pytest.raises(SystemExit, match=r"g above 0 in 1 of 6 steps of the demo \(\[6\]\), expected at most 5%"):
        require_held(events(tmp_path, *[HELD] * 5, {**HELD, "answers": g}))


def test_a_log_without_steps_shows_nothing(tmp_path):
    with pytest.raises(SystemExit, match="0 of 0 steps"):
        require_held(events(tmp_path))
