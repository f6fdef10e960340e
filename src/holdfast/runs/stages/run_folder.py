"""The folder of one run: what lies where in it, when a run may use it, and how it is written whole."""

import errno
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import yaml
from safetensors import SafetensorError

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.core.file_lock import LOCK_FILE, RunLock
from holdfast.core.files import fsync_path, read_plain_file, write_text
from holdfast.core.library_types import Tokenizer
from holdfast.core.ranks import barrier, rank
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.data.examples import Example
from holdfast.records.result_values import ResultValues
from holdfast.records.stored_evidence import believed_result
from holdfast.records.yaml_file import parse_stored_yaml
from holdfast.runs.config.load import todays_spelling
from holdfast.runs.stages.estimate import disk_of_rows
from holdfast.training.checkpoint_store import CheckpointStore, fingerprint_differences, step_of

logger = logging.getLogger(__name__)

ALIGNMENT = "alignment.json"  # what an alignment was begun with, and its figures
MAX_LISTED = 20
MUCH_DISK = 2**28  # bytes of task rows from which on they are worth a line
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BEFORE_TRAINING = ("reference.*", "splits.json", "screening.json", "conflicts.jsonl", "held.jsonl", "monitor.jsonl")
"""What a run writes for each safety set, and about its screening, before its first step."""


class RunFolder:
    """Paths of a run folder, and the rules under which it is used: nothing of another run is touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.events = path / "events.jsonl"
        self.checkpoints = path / "checkpoints"
        self.adapter = path / "adapter"
        self.model = path / "model"
        self.result = path / "result.json"

    @contextmanager
    def kept_if_started(self, *, made: bool) -> Iterator[None]:
        """A context that removes what a run wrote into the folder that it `made`, unless training began in it.

        A run refused on the way (bad data, a tau within the noise) then does not stand in the way of the next attempt
        with other settings. Enter it under the lock (`RunLock`), which removes the empty folder at its end: without the
        lock, a run that is refused because another one holds the folder would delete the other's files.
        """
        try:
            yield
        finally:
            if made and not self.started:
                self.config.unlink(missing_ok=True)
                folders = [entry for entry in self.path.iterdir() if entry.is_dir() and not entry.is_symlink()]
                for folder in (*folders, self.path):
                    for path in (entry for name in BEFORE_TRAINING for entry in folder.glob(name)):
                        path.unlink()
                    if folder != self.path:
                        with suppress(OSError):  # not empty: something that no run made
                            folder.rmdir()

    @contextmanager
    def task_rows(self) -> Iterator[Path]:
        """A folder for this process's copies of the task's rows, removed at the end; a killed run's is replaced."""
        rows = self.path / f".rows-{rank()}"
        shutil.rmtree(rows, ignore_errors=True)
        rows.mkdir(mode=0o700, parents=True)
        try:
            yield rows
        finally:
            shutil.rmtree(rows, ignore_errors=True)

    def announce_rows(self, task: Sequence[Example], tokenizer: Tokenizer) -> None:
        """Log the disk that `task_rows` will take, where it is much; a warning where there is not as much."""
        if tokenizer.eos_token is None or not (tokenizer.chat_template or all(isinstance(e.prompt, str) for e in task)):
            return  # the trainer sets what is missing (`train.chat_template_path`), or refuses
        needed, free = disk_of_rows(task, tokenizer), shutil.disk_usage(self.path).free
        said = f"the task's rows take about {needed / 2**30:.1f} GiB of disk in {self.path} while it trains"
        if needed > free:
            logger.warning("%s, and %.1f GiB are free", said, free / 2**30)
        elif needed >= MUCH_DISK:
            logger.info("estimated: %s; %.1f GiB are free", said, free / 2**30)

    @property
    def started(self) -> bool:
        """Whether a training step may have been taken here."""
        return self.events.exists() or self.has_checkpoints()

    def require_free(self, identity: Mapping[str, object], *, resume: bool) -> None:
        """As `require_usable`, for the run that takes the folder: it removes what a killed run left."""
        self.require_usable(identity, resume=resume)
        for leftover in self._unwritten():
            leftover.unlink(missing_ok=True)

    def _unwritten(self) -> set[Path]:
        """Temporary files of a run that was killed while it wrote its settings."""
        return set() if self.config.exists() else set(self.path.glob(f".{self.config.name}.*.tmp"))

    def require_usable(self, identity: Mapping[str, object], *, resume: bool) -> None:
        """Refuse a folder that holds something else, a run with other settings, or, without `resume`, this run."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(f"output_dir {self.path} is a file", remedy="choose another output_dir")
        if not self.config.exists():
            ours = self._unwritten()
            if others := [entry for entry in self.path.iterdir() if entry.name != LOCK_FILE and entry not in ours]:
                what = f"output_dir {self.path} is not empty ({len(others)} entries) and not a run folder"
                raise ConfigError(what, remedy="choose another output_dir")
            return
        self._require_same(identity)
        if resume:
            return
        if self.result.exists():
            what = f"the run in {self.path} is finished"
            raise ConfigError(what, remedy="choose another output_dir; --resume shows its result")
        if self.started:
            what = f"{self.path} holds this run, unfinished"
            raise ConfigError(what, remedy="--resume continues it from its last checkpoint")

    def _require_same(self, identity: Mapping[str, object]) -> None:
        data = read_plain_file(self.config, remedy="choose another output_dir or restore the file")
        before, now = _flat(todays_spelling(parse_stored_yaml(data, self.config))), _flat(identity)
        keys = [key for key in sorted(before | now) if before.get(key) != now.get(key) and key != "output_dir"]
        if keys:
            listed = "; ".join(f"{key}: stored {before.get(key)!r}, now {now.get(key)!r}" for key in keys[:MAX_LISTED])
            what = f"{self.path} holds a run with other settings: {listed}{'; ...' if keys[MAX_LISTED:] else ''}"
            raise CheckpointError(what, remedy="choose another output_dir, or restore these settings")

    def write_config(self, values: Mapping[str, object]) -> None:
        write_text(self.config, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=110))

    def finished(self) -> ResultValues | None:
        """The stored result of a finished run; None when it is not finished."""
        return cast("ResultValues | None", believed_result(self.path))  # its sha256 and figures were checked

    def has_checkpoints(self) -> bool:
        """Whether a checkpoint was ever committed here, be it set aside as damaged or about to be replaced.

        A resume must then look at them: what it finds unusable is an error, never a silent start from step 0.
        """
        return any(not path.name.startswith(".tmp-") for path in self.checkpoints.glob("*checkpoint-*"))


class UnfinishedAlignment(RunFolder):
    """What an alignment to `target` leaves beside it until it is done: its last checkpoint, rows, and `inputs`.

    The same command goes on from there. The output folder is only ever a whole model; once it is, this one is removed.
    """

    def __init__(self, target: Path, inputs: Mapping[str, object]) -> None:
        place = target.absolute()
        super().__init__(place.with_name(f"{place.name}.unfinished"))
        self._record, self._inputs = self.path / ALIGNMENT, dict(inputs)

    @property
    def steps(self) -> int:
        """The steps of the last checkpoint; 0 where there is none."""
        committed = CheckpointStore(self.checkpoints).checkpoints()
        return step_of(committed[-1]) if committed else 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context for one process at a time; refused in a folder of something else, or of other settings.

        Without a checkpoint nothing is left of the folder at its end.
        """
        with RunLock(self.path):
            self._require_own()
            try:
                write_sealed(self._record, {"inputs": self._inputs})
                yield
            finally:
                if not self.has_checkpoints():
                    self.remove()

    def remove(self) -> None:
        """Delete the folder, if it is there and an alignment's."""
        if self._record.is_file():
            shutil.rmtree(self.path, ignore_errors=True)

    def _require_own(self) -> None:
        if not self._record.is_file():
            # Beside the lock there may be what a process left that was killed while it wrote the record.
            if any(e.name != LOCK_FILE and not e.name.startswith(f".{ALIGNMENT}.") for e in self.path.iterdir()):
                what = f"{self.path}, where unfinished steps are kept, is not empty and holds no alignment"
                raise ConfigError(what, remedy="delete it, or name another folder with --output")
            return
        differing = fingerprint_differences(read_sealed(self._record).get("inputs", {}), self._inputs)
        if differing and self.has_checkpoints():
            listed = "; ".join(f"{key}: stored {old}, now {new}" for key, (old, new) in differing.items())
            what = f"{self.path} holds an unfinished alignment with other settings: {listed}"
            remedy = "restore these settings to go on with it, or delete that folder to start anew"
            raise CheckpointError(what, remedy=remedy)


def _flat(values: object, prefix: str = "") -> dict[str, object]:
    """The values of nested mappings by their paths, `block.key`."""
    if not isinstance(values, Mapping) or not values:
        return {prefix: values}
    inner = (_flat(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items())
    return {path: value for found in inner for path, value in found.items()}


@contextmanager
def disk_errors(what: str, checkpoints: Path) -> Iterator[None]:
    """Turn a refused write into a `ResourceError` that names the checkpoint with which the run goes on.

    safetensors reports a full disk as its own error type, which is not an `OSError`.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in DISK:
            raise
        committed = CheckpointStore(checkpoints).checkpoints()
        kept = f"{committed[-1]} is kept" if committed else "no checkpoint was saved (train.save_strategy)"
        goes_on = "then --resume goes on from there" if committed else "then run it again"
        problem = f"{what} could not be written: {error}; {kept}"
        raise ResourceError(problem, remedy=f"free disk space, {goes_on}") from error


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name `final` once it is complete; every process must enter.

    A reader sees the former folder, or none, or the new one, never a part of it. Where writing fails nothing is left.
    """
    staged = final.with_name(f".tmp-{final.name}")
    if rank() == 0:
        shutil.rmtree(staged, ignore_errors=True)
    barrier()
    try:
        yield staged
    except BaseException:
        if rank() == 0:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    barrier()
    if rank() == 0:
        for path in (*staged.rglob("*"), staged):
            fsync_path(path)
        if final.is_symlink():
            final.unlink()
        elif final.exists():
            shutil.rmtree(final)
        staged.rename(final)
        fsync_path(final.parent)
    barrier()
