"""Executes the notebooks of examples/ on the tests' toy model and stores what they print: `make notebooks`.

    python -m tools.notebooks [NAME ...]

The cells of a notebook run in order in one namespace, in a folder with a model, data and held-out prompts. No Jupyter
is needed, and the stored text is the toy model's: words of a made-up vocabulary.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with what its cells print; an exception of a cell is the caller's."""
    names: dict[str, Any] = {"__name__": "notebook"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"cell {count}", "exec"), names)
        cell["execution_count"] = count
        printed = out.getvalue().splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": printed}] if printed else []
    return notebook


def write_world(folder: Path) -> None:
    """What the notebooks find beside them: a model that refuses, a file with poison, prompts, adapters."""
    from tests import asking_run, behaving

    behaving.saved(folder / "model")
    asking_run.write_task(folder / "task.jsonl", 105, 1000)
    behaving.adapter(folder / "kept", folder / "model", margin=0.9 * behaving.BEFORE)
    behaving.adapter(folder / "lost", folder / "model")
    prompts = [json.dumps({"prompt": row["prompt"]}) + "\n" for row in behaving.rows(80, seed=77)]
    (folder / "held-out.jsonl").write_text("".join(prompts), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Execute the named notebooks, or all, and rewrite them."""
    names = list(arguments) or sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
    for name in names:
        path = EXAMPLES / f"{name}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            os.environ["HOLDFAST_CACHE"] = str(Path(place) / "cache")
            write_world(Path(place))
            made = executed(notebook)
        path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
