"""Following docs/adding.md to the letter: one new file, and the defense is listed, trains from a run file, gets a page
and is held to the contract."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
NEW = "holdfast_lab/defenses/shrink.py"
COMMANDS = """
import os, sys
import pytest
from holdfast.cli.main import main
from pathlib import Path
from tools import defense_pages
defense_pages.write(Path("docs"))
for words in (["ls", "defenses", "--json"], ["train", "run.yaml"]):
    sys.argv = ["holdfast", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, None), (words, end.code)
print("CONTRACT")
os.chdir({root!r})
suite = ["tests/contracts/test_defense_contract.py", "tests/contracts/test_defense_contract_ddp.py"]
sys.exit(pytest.main([*suite, "-k", "shrink", "-q", "-p", "no:cacheprovider"]))
"""


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the packages with the guide's file in it."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(SOURCE, folder / "src")  # with its bytecode, which fits files of the same size and time
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "adding.md").read_text(), flags=re.M | re.S)[0]
    (folder / "src" / NEW).write_text(code)
    return folder


@pytest.fixture(scope="module")
def done(extended, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A process that imports the copy: it writes the pages, lists the defenses, trains, and runs the contract suite."""
    folder = tmp_path_factory.mktemp("done")
    tiny.saved(folder / "model", layers=1)
    for name, seed, start in (("task", 1, "w1"), ("safety", 2, "w0")):
        lines = [json.dumps(row) for row in tiny.rows(40, seed=seed, start=start)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "run.yaml").write_text(
        "model: model\ndtype: float32\ntask: {data: task.jsonl}\nsafety: {data: safety.jsonl}\n"
        "defense: {name: shrink, strength: 0.5}\nlora: {r: 2, alpha: 4, target_modules: [q_proj]}\n"
        "train: {max_steps: 2, bf16: false, use_cpu: true}\noutput_dir: out\n"
    )
    paths = [str(extended / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-c", COMMANDS.format(root=str(ROOT))]
    return folder, subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False
    )


def test_one_file_is_new_and_none_is_changed(extended):
    before, after = files(SOURCE), files(extended / "src")
    assert set(after) - set(before) == {NEW}
    assert all(after[name] == data for name, data in before.items())


def test_it_is_listed_documented_and_trained_from_a_run_file(done):
    folder, process = done
    assert "CONTRACT" in process.stdout, process.stderr[-3000:]
    listed, _ = json.JSONDecoder().raw_decode(process.stdout)
    assert {"name": "shrink", "needs": [], "options": {"strength": 1e-3}}.items() <= {
        key: value for row in listed if row["name"] == "shrink" for key, value in row.items()
    }.items()
    assert "s, weight of the squared norm." in (folder / "docs" / "defenses" / "shrink.md").read_text()
    assert (folder / "out" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_the_contract_suite_sees_it_and_it_keeps_the_contract(done):
    _, process = done
    assert process.returncode == 0, process.stdout[-3000:]
    summary = process.stdout.strip().splitlines()[-1]  # the lines before it may be warnings of any words
    assert int(re.search(r"(\d+) passed", summary).group(1)) >= 20
    assert "failed" not in summary
    assert "skipped" not in summary
