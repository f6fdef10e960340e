"""A screening is made once, by the first process, before step 1; every later start and every other process reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, HoldfastError
from holdfast.core.ranks import gather_objects, rank
from holdfast.screening.record import is_saved, load, save
from holdfast.screening.screen import Screening


def fixed_screening(
    folder: Path, belongs_to: Mapping[str, Any], make: Callable[[], Screening], *, started: bool
) -> Screening:
    """The screening in `folder`, made there first where there is none.

    Args:
        belongs_to: model, task and settings that the screening must be of.
        make: asks and sorts; called by the first process alone.
        started: training has begun, so that a screening must be there and must fit.

    Raises:
        CheckpointError: training has begun and the screening is missing, damaged, or of another run.
    """
    failed: HoldfastError | None = None
    if rank() == 0:
        try:
            _provide(folder, belongs_to, make, started=started)
        except HoldfastError as error:  # the other processes wait: they must hear of it
            failed = error
    failed = gather_objects(failed)[0]
    if failed is not None:
        raise failed
    return load(folder, belongs_to)


def _provide(folder: Path, belongs_to: Mapping[str, Any], make: Callable[[], Screening], *, started: bool) -> None:
    if started and not is_saved(folder):
        raise CheckpointError(
            f"{folder} is missing, and training has begun: asking again could give other sets",
            remedy="restore the folder from a backup, or train in a new output_dir",
        )
    if is_saved(folder):
        try:
            load(folder, belongs_to)
        except CheckpointError:
            if started:
                raise
        else:
            return
    save(folder, make(), belongs_to)
