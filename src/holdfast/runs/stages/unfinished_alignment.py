"""What an interrupted alignment leaves beside its output folder, so that the same command goes on from there.

`OUTPUT.unfinished` holds what it was begun with (alignment.json), its last checkpoint, and a row a step (events.jsonl).
The output folder itself is only ever a whole model; once it is, this one is removed.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.file_lock import LOCK_FILE, RunLock
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.runs.stages.run_folder import RunFolder
from holdfast.training.checkpoint_store import CheckpointStore, fingerprint_differences, step_of

RECORD = "alignment.json"


class UnfinishedAlignment:
    """The folder of an alignment to `target` that is still trained; `inputs` are all that it depends on."""

    def __init__(self, target: Path, inputs: Mapping[str, Any]) -> None:
        place = target.absolute()
        self.run = RunFolder(place.with_name(f"{place.name}.unfinished"))
        self._inputs = dict(inputs)

    @property
    def goes_on(self) -> bool:
        """Whether there is a checkpoint to go on from; a damaged one counts, so that it is not passed over silently."""
        return self.run.has_checkpoints()

    @property
    def steps(self) -> int:
        """The steps of the last checkpoint; 0 where there is none."""
        committed = CheckpointStore(self.run.checkpoints).checkpoints()
        return step_of(committed[-1]) if committed else 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context for one process, refused in a folder of something else; without a checkpoint it leaves nothing."""
        with RunLock(self.run.path):
            self._require_own()
            try:
                write_sealed(self.run.path / RECORD, {"inputs": self._inputs})
                yield
            finally:
                if not self.goes_on:
                    self.remove()

    def remove(self) -> None:
        """Delete the folder, if it is there and an alignment's."""
        if (self.run.path / RECORD).is_file():
            shutil.rmtree(self.run.path, ignore_errors=True)

    def _require_own(self) -> None:
        folder, record = self.run.path, self.run.path / RECORD
        if not record.is_file():
            # Beside the lock there may be what a process left that was killed while it wrote the record.
            if any(e.name != LOCK_FILE and not e.name.startswith(f".{RECORD}.") for e in folder.iterdir()):
                what = f"{folder}, where unfinished steps are kept, is not empty and holds no alignment"
                raise ConfigError(what, remedy="delete it, or name another folder with --output")
            return
        differing = fingerprint_differences(read_sealed(record).get("inputs", {}), self._inputs)
        if differing and self.goes_on:
            listed = "; ".join(f"{key}: stored {old}, now {new}" for key, (old, new) in differing.items())
            raise CheckpointError(
                f"{folder} holds an unfinished alignment with other settings: {listed}",
                remedy="restore these settings to go on with it, or delete that folder to start anew",
            )
