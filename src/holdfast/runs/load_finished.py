"""A finished run as the evidence sees it: which two models, on which prompts, under which constraint.

The safety data is read and split again, and held against `splits.json`: no prompt may have played another role in
training. Sets that were built by asking are read from `screening/`, of this model, task and settings.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.core.files import write_text
from holdfast.core.hashing import sha256_file, sha256_text
from holdfast.data.examples import searchable_texts, to_rows
from holdfast.data.split_record import load_record, require_same
from holdfast.data.splits import Split, require_unseen
from holdfast.models.content import content_of
from holdfast.models.embedded import cache_root
from holdfast.records.result_values import ResultValues
from holdfast.records.run_record import RESULT_NAME, no_link, set_folder
from holdfast.runs.config import stored_config
from holdfast.runs.config.resolve import ResolvedRun, resolve
from holdfast.runs.pipeline import read_data
from holdfast.runs.stages.prepare import Prepared
from holdfast.runs.stages.run_folder import RunFolder
from holdfast.screening.certify_share import CertifyShare, certify_share
from holdfast.screening.record import FOLDER, RECORD, load_finished
from holdfast.screening.screen import Screening, belongs_to
from holdfast.screening.settings import Keep


@dataclass(frozen=True)
class FinishedSet:
    name: str  # of the safety set; `safety` where there is one
    folder: Path  # where its evidence goes: the run folder, or a folder of its own when there are several sets
    before: str  # the model that training started from, with its `revision`
    revision: str | None
    after: Path  # the adapter that training wrote, or the model
    split: Split
    constraint: ChanceConstraint
    source: str  # where the safety examples came from
    openings: int  # how often the certify share may be opened, as the run file declared
    dtype: str
    template: str
    max_length: int | None  # tokens after which training cut an example
    # of a set that was built by asking, which of the model's replies it holds; None of given pairs
    keep: Keep | None = None


@dataclass(frozen=True)
class FinishedRun:
    """The safety sets of a finished run, and what it found when it asked its model."""

    sets: list[FinishedSet]
    screening: Screening | None = None
    record: Path | None = None  # the file of the screening
    task_sha256: str = ""  # of the task's content, as its ledger of openings knows it

    def share(self, sets: list[FinishedSet]) -> CertifyShare:
        """The certify prompts of sets that were built by asking."""
        assert self.screening is not None
        return certify_share(self.screening, {one.name: one.keep for one in sets if one.keep}, self.task_sha256)


def finished_run(run: Path) -> FinishedRun:
    """A finished run: its safety sets, each with the split that training used."""
    folder = RunFolder(run)
    if not folder.config.is_file():
        remedy = (
            "name the output_dir of a `holdfast train` run, of a study's cell CELL/run; what was trained from Python "
            "is named by its models: --before MODEL --after ADAPTER --prompts FILE"
        )
        raise ConfigError(f"{run} is not a run folder: it has no {folder.config.name}", remedy=remedy)
    if not folder.result.is_file():
        raise ConfigError(f"the run in {run} is not finished", remedy="holdfast train RUN.yaml --resume finishes it")
    result = folder.finished()  # its settings are those it was made with
    assert result is not None, "its result.json is there"
    config = stored_config(folder.config)
    if not config.safety:
        remedy = "compare it with its base: holdfast audit --before BASE --after RUN/adapter --safety FILE"
        raise ConfigError(f"{run} is an alignment run, which has no safety set", remedy=remedy)
    if config.quantization is not None:
        what = f"{run}: trained on a {config.quantization} base, which audits and certificates do not load yet"
        remedy = "use the figures that training wrote (result.json), or train on a bfloat16 base"
        raise UnsupportedError(what, remedy=remedy)
    after = no_link(folder.adapter if config.lora is not None else folder.model)
    if not after.is_dir():
        raise CheckpointError(f"{after} is missing", remedy="restore it from a backup, or train again")
    plan, data = resolve(config, elsewhere=True), read_data(config)
    screening, task = _asked(run, plan, data, result) if config.prompt_sets else (None, "")
    splits = {**data.safety, **({} if screening is None else screening.sets)}
    folders = {name: set_folder(run, name, named=config.named) for name in config.safety}
    sets = [_finished(plan, name, splits[name], run=place, after=after) for name, place in folders.items()]
    return FinishedRun(sets, screening, None if screening is None else run / FOLDER / RECORD, task)


def _asked(run: Path, plan: ResolvedRun, data: Prepared, result: ResultValues) -> tuple[Screening, str]:
    folder, config, settings = no_link(run / FOLDER), plan.config, plan.screening
    assert settings is not None  # it has sets that were asked for
    trusted = result.get("trust_remote_code") is True
    model = content_of(config.model, revision=config.revision, trust_remote_code=trusted)
    now = belongs_to(model.sha256, data.task, settings, config.template)
    task = f"the task ({config.task.data or config.task.name})"
    places = {"model_sha256": f"the model ({config.model})", "task_sha256": task, "task_content_sha256": task}
    screening, made = load_finished(folder, now, places)
    if json.loads(json.dumps(screening.figures())) != result.get("screening"):
        what = f"{folder} is not the screening whose figures {RESULT_NAME} holds"
        raise CheckpointError(what, remedy="restore it from a backup")
    texts = [text for row in screening.kept(data.task) for text in searchable_texts(row)]
    for split in screening.sets.values():
        require_unseen(split.certify, texts)
    return screening, str(made["task_content_sha256"])


def _finished(plan: ResolvedRun, name: str, split: Split, *, run: Path, after: Path) -> FinishedSet:
    load_record(run)  # a missing record is an error here, while `require_same` passes an empty folder
    require_same(split.record, run)
    config, block = plan.config, plan.config.safety[name]
    return FinishedSet(
        name=name, folder=run, before=config.model, revision=config.revision, after=after, split=split,
        constraint=plan.constraints[name], source=block.source if block.role is None else str(_stored(split)),
        openings=block.openings, dtype=config.dtype, template="none" if config.template == "none" else "chat",
        max_length=plan.arguments.max_length, keep=block.keep,
    )  # fmt: skip


def _stored(split: Split) -> Path:
    """The pairs of a run on the protocol's roles, as a file that certificates can name.

    It lies in holdfast's cache, all of whose files share one ledger of openings: runs on these roles share prompts,
    those with other numbers or seeds too. A file that was changed is written again.
    """
    rows = [
        row | ({} if example.category is None else {"category": example.category})
        for examples in split.roles.values()
        for row, example in zip(to_rows(examples), examples, strict=True)
    ]
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    digest = sha256_text(text)
    file = cache_root() / "roles" / digest[:32] / "safety.jsonl"
    if not file.is_file() or sha256_file(file) != digest:
        write_text(file, text, mode=0o600)
    return file
