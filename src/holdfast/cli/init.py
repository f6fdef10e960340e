"""`holdfast init`: the files of a first run."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.options import Json, Opt
from holdfast.cli.terminal import say, say_json

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


def init(
    folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")] = Path(),
    model: Annotated[
        str, Opt(help="Hub id or folder of a chat model that refuses, or `embedded` (small, no hub).")
    ] = MODEL,
    json: Json = False,
) -> None:
    """Write task.jsonl and a run.yaml of three lines to start from: mild data of our own, a twelfth of it poisoned.

    The embedded model does not refuse by itself: its run file names a folder that `holdfast align` makes first.

    \b
    Example:
      holdfast init first && cd first && holdfast check run.yaml && holdfast train run.yaml
    """
    from holdfast.demo.starter import next_commands, write_starter

    paths = write_starter(folder, model)
    inside = "" if folder == Path() else f"cd {folder} && "
    following = f"{inside}{next_commands(model)}"
    if json:
        say_json({"files": [str(path) for path in paths], "next": following})
        return
    for path in paths:
        say(str(path))
    say(f"next: {following}")
