"""The folder of one run: what lies where in it, and when a run may use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.files import read_plain_file, write_text
from holdfast.records.run_record import write_result
from holdfast.records.stored_evidence import believed_result
from holdfast.records.yaml_file import parse_stored_yaml
from holdfast.trainers.run_lock import LOCK_FILE

MAX_LISTED = 20
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
        """A context that removes what a run wrote into its new folder, unless training began in it.

        A run refused on the way (bad data, a tau within the noise) then does not stand in the way of the next
        attempt with other settings. Enter it under the lock (`RunLock`), which removes the empty folder at its end:
        without the lock, a run that is refused because another one holds the folder would delete the other's files.

        Args:
            made: whether this process made the folder; nothing is removed from one that was there.
        """
        try:
            yield
        finally:
            if made and not self.started:
                self._remove_own()

    def _remove_own(self) -> None:
        """Delete the files that a run writes before its first step, in its folder and in those of its safety sets."""
        self.config.unlink(missing_ok=True)
        folders = [entry for entry in self.path.iterdir() if entry.is_dir() and not entry.is_symlink()]
        for folder in (*folders, self.path):
            for path in (entry for name in BEFORE_TRAINING for entry in folder.glob(name)):
                path.unlink()
            if folder != self.path:
                with suppress(OSError):  # not empty: something that no run made
                    folder.rmdir()

    @property
    def started(self) -> bool:
        """Whether a training step may have been taken here."""
        return self.events.exists() or self.has_checkpoints()

    def require_free(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Refuse a folder that holds something else, another run, or, without `resume`, this run already.

        Args:
            identity: the resolved settings that make a run this run.
            resume: whether the user asked to continue.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ConfigError(f"output_dir {self.path} is a file", remedy="choose another output_dir")
        if not self.config.exists():
            if others := [entry for entry in self.path.iterdir() if entry.name != LOCK_FILE]:
                raise ConfigError(
                    f"output_dir {self.path} is not empty ({len(others)} entries) and not a run folder",
                    remedy="choose another output_dir",
                )
            return
        self._require_same(identity)
        if resume:
            return
        if self.result.exists():
            raise ConfigError(
                f"the run in {self.path} is finished",
                remedy="choose another output_dir; --resume shows its result",
            )
        if self.started:
            raise ConfigError(
                f"{self.path} holds this run, unfinished",
                remedy="--resume continues it from its last checkpoint",
            )

    def _require_same(self, identity: Mapping[str, Any]) -> None:
        data = read_plain_file(self.config, remedy="choose another output_dir or restore the file")
        stored = parse_stored_yaml(data, self.config)
        before, now = _flat(stored), _flat(identity)
        keys = [key for key in sorted(before | now) if before.get(key) != now.get(key) and key != "output_dir"]
        if keys:
            listed = "; ".join(f"{key}: stored {before.get(key)!r}, now {now.get(key)!r}" for key in keys[:MAX_LISTED])
            more = "; ..." if len(keys) > MAX_LISTED else ""
            raise CheckpointError(
                f"{self.path} holds a run with other settings: {listed}{more}",
                remedy="choose another output_dir, or restore these settings",
            )

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Store the resolved settings."""
        text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=110)
        write_text(self.config, text)

    def write_result(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Store the result, whose presence says that the run is finished; returns it with its checksums."""
        return write_result(self.path, values)

    def finished(self) -> dict[str, Any] | None:
        """The stored result of a finished run; None when it is not finished."""
        return believed_result(self.path)

    def has_checkpoints(self) -> bool:
        """Whether a checkpoint was ever committed here, be it set aside as damaged or about to be replaced.

        A resume must then look at them: what it finds unusable is an error, never a silent start from step 0.
        """
        found = self.checkpoints.glob("*checkpoint-*")
        return any(not path.name.startswith(".tmp-") for path in found)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, Mapping) or not values:
        return {prefix: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
