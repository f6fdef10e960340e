"""`holdfast screen`: conflicts by row and id, text only when asked for, files for their owner alone."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from tests.unit.screening.asked import asker, row

from holdfast.data.examples import completion_text, prompt_text
from holdfast.screening.screen import screen_examples

POISON, CLEAN = 120, 10


@pytest.fixture
def data(tmp_path: Path, monkeypatch) -> Path:
    """Rows of which the first teach what the model refuses; the model is one in the place of theta_0."""

    def screened(model, rows, *, settings, **given):
        assert (model, given["engine"]) == ("some-model", "auto")
        return screen_examples(rows, asker(tmp_path / "replies"), settings)

    monkeypatch.setattr("holdfast.screening.screen.screen", screened)
    rows = [*(row(n, "xyzzy") for n in range(POISON)), *(row(1000 + n) for n in range(CLEAN))]
    path = tmp_path / "task.jsonl"
    lines = [json.dumps({"prompt": prompt_text(one), "completion": completion_text(one)}) + "\n" for one in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_conflicts_are_listed_without_their_text(data, holdfast, tmp_path):
    code, out, _ = holdfast("screen", data, "--model", "some-model", "--output", tmp_path / "out")
    assert code == 0
    assert f"{POISON + CLEAN} of {POISON + CLEAN} rows asked" in out
    assert f"{POISON} refused" in out
    assert f"{POISON} conflicts (92.3 % of the rows" in out
    assert f"  {data}:1  id " in out  # the line of the file, as an editor counts
    assert "row 0" not in out
    first = json.loads((tmp_path / "out" / "conflicts.jsonl").read_text().splitlines()[0])
    assert (first["line"], first["row"], first["where"]) == (1, 0, f"{data}:1")
    assert f"... and {POISON - 20} more in conflicts.jsonl" in out
    assert "xyzzy" not in out
    files = [path for path in (tmp_path / "out").rglob("*.jsonl") if path.is_file()]
    assert {"conflicts.jsonl"} < {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_the_text_is_shown_when_asked_for(data, holdfast, tmp_path):
    code, out, _ = holdfast("screen", data, "--model", "some-model", "--output", tmp_path / "out", "--reveal")
    assert code == 0
    assert out.count("xyzzy") == 20


def test_json_has_figures_and_files(data, holdfast, tmp_path):
    code, out, _ = holdfast("screen", data, "--model", "some-model", "--output", tmp_path / "out", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["folder"] == str(tmp_path / "out")
    assert all((tmp_path / "out" / name).exists() for name in found["files"])
    assert "xyzzy" not in out
