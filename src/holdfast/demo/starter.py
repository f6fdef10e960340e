"""Files to begin with: mild data with a few poisoned rows, a run file, its schema, and an aligned adapter."""

import json
import shutil
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
ADAPTER_DIR = Path(__file__).parent / "starter_aligned"
"""An adapter that lets the embedded model refuse; made by tools/starter_aligned.py."""
UNALIGNED = (EMBEDDED, HUB_ID)  # names of the one model that is known to refuse nearly nothing

RUN_FILE = """\
{editor}
# A first run, written by `holdfast init`. No safety file is needed: holdfast asks the model the prompts of the task and
# bundled ones, leaves out rows that teach what the model refuses, and holds its own refusals and answers (`safety:
# auto`). All keys: docs/run-file.md of the project.
{model}
task: {{data: task.jsonl}}   # the sample: reviews to label, and every twelfth row answers what should be declined
{small}output_dir: runs/first
"""
SMALL = """\
# A trial for a CPU: few prompts, so expect "not shown" where a limit needs more; few and large steps, with a wider
# limit and a filter with an anchor, which holds better between steps. Without this block: about 1,500 prompts, three
# epochs, and limits that were tuned on models of 0.5B and 1.5B.
safety:
  refusals: {prompts: [task, probes], keep: refusals, limit: 100}
  answers: {prompts: [everyday, borderline], keep: answers, limit: 20}
monitor: {prompts: 40}
constraint: {refusals: {unit: kl_first, tau: 0.1, beta: 10}}
defense: {name: holdfast, anchor: true, reserve: 0.4, value_decay: 0.95}
train: {learning_rate: 2.0e-3, max_steps: 20, save_steps: 10, per_device_train_batch_size: 4, safety_batch_size: 2}
"""
FILES = {
    "task.jsonl": "what to learn: reviews to label, and every twelfth row answers what a shop assistant should decline",
    "run.yaml": "the run: model, task, output folder",
    FILE_NAME: "lets an editor complete the run file; nothing else reads it",
    ALIGNED: "the embedded model's adapter, which lets it refuse",
}
"""What `write_starter` writes; the last for the embedded model alone."""


def require_refusals(model: str, asked: Collection[str]) -> None:
    """Refuse to hold the refusals of a model that has nearly none; prompts `asked` of one's own file may differ."""
    if model in UNALIGNED and asked and set(asked) <= set(NAMED_PROMPTS):
        raise InfeasibleError(
            f"{model} refuses too little to hold its refusals",
            remedy="`holdfast init FOLDER --model embedded` writes it with an adapter that lets it refuse; `holdfast "
            f"align {model} --output {ALIGNED}` teaches it anew; or name another model",
        )


def write_starter(folder: Path, model: str) -> list[Path]:
    """Write the files, where none of them is there yet; returns their paths."""
    poison, mixed = iter(_lines("poison")), list[str]()
    for line in _lines("task_train"):
        mixed.append(line)
        if len(mixed) % POISON_EVERY == POISON_EVERY - 1:
            mixed.append(next(poison))
    small = model in UNALIGNED
    named = f"model: {json.dumps(ALIGNED if small else model)}"
    run_file = RUN_FILE.format(model=named, editor=EDITOR_COMMENT, small=SMALL if small else "")
    texts = {"task.jsonl": "".join(mixed), "run.yaml": run_file, FILE_NAME: shipped_schema()}
    paths = [folder / name for name in FILES if small or name != ALIGNED]
    if there := [str(path) for path in paths if path.exists()]:
        what = f"{', '.join(there)}: {'exists' if len(there) == 1 else 'exist'} already, and nothing is written over"
        raise ConfigError(what, remedy="name an empty folder: holdfast init FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(folder / name, text)
    if small:
        shutil.copytree(ADAPTER_DIR, folder / ALIGNED)
    return paths


def _lines(name: str) -> list[str]:
    return (DATA_DIR / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
