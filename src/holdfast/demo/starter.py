"""Files to begin with: mild data of the demo with a few poisoned rows, a run file of three lines, and its schema."""

import json
import shlex
from collections.abc import Collection
from pathlib import Path

from holdfast.core.errors import ConfigError, InfeasibleError
from holdfast.core.files import write_text
from holdfast.demo.data import DATA_DIR
from holdfast.models.embedded import HUB_ID
from holdfast.models.source import EMBEDDED
from holdfast.runs.config.blocks import NAMED_PROMPTS
from holdfast.runs.config.schema import EDITOR_COMMENT, FILE_NAME, shipped_schema

POISON_EVERY = 12  # under the tenth of the rows that a run drops unasked, if its model refuses them all
ALIGNED = "aligned"
UNALIGNED = (EMBEDDED, HUB_ID)  # names of the one model that is known to refuse nearly nothing: it is aligned first

RUN_FILE = """\
{editor}
# A first run, written by `holdfast init`. No safety file is needed: holdfast asks the model the prompts of the task and
# bundled ones, leaves out rows that teach what the model refuses, and holds its own refusals and answers (`safety:
# auto`). All keys: docs/run-file.md of the project.
{model}
task: {{data: task.jsonl}}   # reviews to label; every twelfth row answers what a shop assistant should decline
output_dir: runs/first
"""
FILES = (
    "what to learn: reviews to label, and every twelfth row answers what a shop assistant should decline",
    "the run in three lines: model, task, output folder",
    "lets an editor complete the run file; nothing else reads it",
)
"""What `write_starter` writes, in its order."""
_NOTE = "   # made by `holdfast align`: {model} refuses too little to hold"


def next_commands(model: str) -> str:
    """What to call in the folder of the files."""
    first = f"{_align(model, Path())} && " if model in UNALIGNED else ""
    return f"{first}holdfast check run.yaml && holdfast train run.yaml"


def require_aligned(run_file: Path, model: str) -> None:
    """Refuse a run file that names a folder for `holdfast align` to make, while the folder is not there.

    Such a file is known by the line that `init` wrote. Any other missing model is left to what loads it.
    """
    if model != ALIGNED or Path(ALIGNED).is_dir():  # a folder beside the run file has an absolute path by now
        return
    lines = run_file.read_text(encoding="utf-8").splitlines()
    for unaligned in UNALIGNED:
        if _model_line(unaligned) in lines:
            what = f"{run_file}: model {ALIGNED!r}: there is no such folder yet; `holdfast align` makes it"
            raise ConfigError(what, remedy=f"run first: {_align(unaligned, run_file.parent)}")


def require_refusals(model: str, asked: Collection[str]) -> None:
    """Refuse to hold the refusals of a model that is known to have nearly none, before it is asked.

    `asked`: the prompts whose refusals are to be held; in files of the user's own may be some that it refuses.
    """
    if model in UNALIGNED and asked and set(asked) <= set(NAMED_PROMPTS):
        raise InfeasibleError(
            f"{model} refuses too little to hold its refusals",
            remedy=f"first run `{_align(model, Path())}`, then set `model: {ALIGNED}`; or name another model",
        )


def _align(model: str, folder: Path) -> str:
    return f"holdfast align {model} --output {shlex.quote(str(folder / ALIGNED))}"


def _model_line(model: str) -> str:
    named, note = (ALIGNED, _NOTE.format(model=model)) if model in UNALIGNED else (model, "")
    return f"model: {json.dumps(named)}{note}"


def write_starter(folder: Path, model: str) -> list[Path]:
    """Write the files, where none of them is there yet; returns their paths."""
    poison, mixed = iter(_lines("poison")), list[str]()
    for line in _lines("task_train"):
        mixed.append(line)
        if len(mixed) % POISON_EVERY == POISON_EVERY - 1:
            mixed.append(next(poison))
    run_file = RUN_FILE.format(model=_model_line(model), editor=EDITOR_COMMENT)
    files = {folder / "task.jsonl": "".join(mixed), folder / "run.yaml": run_file, folder / FILE_NAME: shipped_schema()}
    if there := [str(path) for path in files if path.exists()]:
        what = f"{', '.join(there)}: {'exists' if len(there) == 1 else 'exist'} already, and nothing is written over"
        raise ConfigError(what, remedy="name an empty folder: holdfast init FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_text(path, text)
    return list(files)


def _lines(name: str) -> list[str]:
    return (DATA_DIR / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
