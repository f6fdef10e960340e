"""`holdfast screen`: conflicts by row and id, text only when asked for, files for their owner alone."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serving import Server, answer
from tests.unit.screening.asked import Refusing, asker, row

from holdfast.data.examples import completion_text, prompt_text
from holdfast.screening.screen import screen_examples

POISON, CLEAN = 120, 10


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A file whose first rows teach what the model refuses."""
    rows = [*(row(n, "xyzzy") for n in range(POISON)), *(row(1000 + n) for n in range(CLEAN))]
    path = tmp_path / "task.jsonl"
    lines = [json.dumps({"prompt": prompt_text(one), "completion": completion_text(one)}) + "\n" for one in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def data(task: Path, tmp_path: Path, monkeypatch) -> Path:
    """The task's file, with a model in the place of theta_0."""

    def screened(model, rows, *, settings, **given):
        assert (model, given["engine"]) == ("some-model", "auto")
        return screen_examples(rows, asker(tmp_path / "replies"), settings)

    monkeypatch.setattr("holdfast.screening.screen.screen", screened)
    return task


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


@pytest.fixture
def server() -> Iterator[Server]:
    """The model in the place of theta_0, behind a server."""
    made = Server()
    made.script = lambda _, body: (200, answer(Refusing.reply(body["messages"][-1]["content"], 32)), {})
    yield made
    made.close()


def test_a_model_behind_a_server_is_asked_there(task, server, holdfast, tmp_path):
    there = [f"base_url={server.url}", "model_name=m", "workers=2"]
    options = ["--engine", "endpoint", *(word for one in there for word in ("--engine-option", one))]
    code, out, err = holdfast("screen", task, "--model", "some-model", "--output", tmp_path / "out", *options)
    assert code == 0, err
    listed = [json.loads(line)["row"] for line in (tmp_path / "out" / "conflicts.jsonl").read_text().splitlines()]
    assert listed == list(range(POISON))
    assert f"{CLEAN} answered, {POISON} refused" in out
    assert {body["model"] for _, body, _ in server.seen} == {"m"}
