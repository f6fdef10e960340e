"""The notebooks of examples/: stored as they were executed, and the cheap one executed again."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from tools.notebooks import EXAMPLES, executed, write_world

import holdfast as hf

NOTEBOOKS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(EXAMPLES.glob("*.ipynb"))}


def code(notebook) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_readme_lists_every_notebook():
    listed = re.findall(r"\]\((\w+)\.ipynb\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(NOTEBOOKS)
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_was_executed_whole_and_in_order(name):
    cells = code(NOTEBOOKS[name])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "make notebooks"
    printed = "".join(line for cell in cells for out in cell["outputs"] for line in out["text"])
    assert printed
    assert not re.search(r"(^|[\s'\"(])/\w", printed)  # no place on a machine
    used = set(re.findall(r"\bhf\.(\w+)", "".join(line for cell in cells for line in cell["source"])))
    assert used <= set(hf.__all__)


def test_the_gate_prints_what_is_stored(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    write_world(tmp_path)
    stored = NOTEBOOKS["gate_in_ci"]
    assert executed(copy.deepcopy(stored)) == stored
