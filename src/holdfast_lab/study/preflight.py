"""What can be checked before any model is trained: that the study could be measured in the end.

Looked at are settings, the judge's folder and the size of the data; no weights are loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.data.poison import poison_count
from holdfast.data.tasks import TASKS
from holdfast.judging.judge import open_judge
from holdfast.runs.config import config_from_dict
from holdfast_lab.evaluation.evaluate import held_out
from holdfast_lab.protocol.roles import RoleSettings, draw_roles
from holdfast_lab.study.cell import kept_file
from holdfast_lab.study.cells import Cell
from holdfast_lab.study.protocol import Protocol, align_settings, finetune_settings

SOMEWHERE = Path("study")  # stands for folders that a run file has to name, and that are not made here
ALIGNED = "aligned/adapter"  # stands for the adapter that a cell starts from, which does not exist yet


def require_ready(protocol: Mapping[str, Any], cells: Sequence[Cell], *, data: bool = True) -> None:
    """Refuse cells that would fail after hours of training; `protocol` holds the fields of a `Protocol`.

    With `data` the roles are drawn and the tasks' held-out splits read too, which may be downloaded for it.
    """
    settings = Protocol.model_validate(protocol)
    _require_judge(settings)
    for place in dict.fromkeys(Path(cell.model.ref) for cell in cells):
        if place.is_absolute() and not place.is_dir():  # a hub id is asked for when it is loaded
            raise ConfigError(
                f"models: there is no folder {place}",
                remedy="correct the path (in a study, folders are relative to its file), or name a hub id",
            )
    for alignment in dict.fromkeys(cell.alignment for cell in cells if cell.alignment is not None):
        run = align_settings(settings, model="embedded", revision=None, defense=alignment.name, output_dir=SOMEWHERE)
        config_from_dict(run, where=f"alignment {alignment.id}", complete=True)
    for cell in (cell for cell in cells if cell.kind == "defense"):
        _require_run(settings, cell)
    if data and cells:
        draw_roles(RoleSettings(**settings.roles.model_dump()))
    for task in dict.fromkeys(cell.task for cell in cells if data):
        held_out(TASKS[task].test(settings.template), settings.evaluation.task_examples, settings.roles.seed)


def _require_judge(settings: Protocol) -> None:
    spec = settings.judge()
    judge = open_judge(spec)
    if judge.name == "trained":
        from holdfast.judging.judges.trained import read_description
        from holdfast.models.source import resolve

        options = {"folder": spec} if isinstance(spec, str) else dict(spec)
        _ = judge.revision  # hashes the folder's files, so that a damaged one is found
        described = read_description(Path(options.get("folder") or options["name"]))
        if described["kind"] == "lora":  # one trained in full needs no base
            stored = described["base"]
            given = options.get("base")
            resolve(given or stored["ref"], None if given else stored["revision"], False)


def _require_run(settings: Protocol, cell: Cell) -> None:
    assert cell.poison_ratio is not None  # every cell with a defense has one
    kept = kept_file(SOMEWHERE) if settings.keep == "replies" else None
    run = finetune_settings(settings, asdict(cell), model=ALIGNED, output_dir=SOMEWHERE, kept=kept)
    config_from_dict(run, where=f"cell {cell.id}", complete=True)
    poison = poison_count(cell.poison_ratio, settings.size)
    if poison > settings.roles.poison:
        raise ConfigError(
            f"cell {cell.id}: {poison} of {settings.size} rows are to be poison, the poison role has "
            f"{settings.roles.poison}",
            remedy="raise protocol.roles.poison, or lower protocol.size",
        )
