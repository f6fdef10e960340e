"""`holdfast init`: the files of a first run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.terminal import say, say_json

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def init(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")] = Path(),
    model: Annotated[
        str, typer.Option("--model", help="Hub id, folder, or `embedded` (the same model from a package).")
    ] = MODEL,
    json: Annotated[bool, typer.Option("--json", help="Print the paths as JSON.")] = False,
) -> None:
    """Write task.jsonl, safety.jsonl and run.yaml to start from: mild data of our own, a third of the task poisoned.

    \b
    Example:
      holdfast init first && cd first && holdfast check run.yaml && holdfast train run.yaml
    """
    from holdfast.demo.starter import write_starter

    paths = write_starter(folder, model)
    if json:
        say_json({"files": [str(path) for path in paths]})
        return
    for path in paths:
        say(str(path))
    inside = "" if folder == Path() else f"cd {folder} && "
    say(f"next: {inside}holdfast check run.yaml && holdfast train run.yaml && holdfast certify runs/first --by kl")
