"""The measured windows of an unfinished audit, on disk: what a killed audit continues from.

A part is written whole or not at all, and belongs to one binding: models, data, settings and versions.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import CheckpointError
from holdfast.core.files import read_json, write_bytes, write_json
from holdfast.core.hashing import sha256_json

logger = logging.getLogger(__name__)

FOLDER = ".audit-parts"
_STRINGS = ("id", "role", "category")


class Parts:
    """Parts of one audit, by pass (`both`, `before`, `after`) and window."""

    def __init__(self, output: Path, binding: Mapping[str, Any]) -> None:
        self.folder = output / FOLDER
        manifest = self.folder / "manifest.json"
        self.sha256 = sha256_json(dict(binding))
        if manifest.exists() and _binding(manifest) != self.sha256:
            logger.warning("the unfinished audit in %s is of other models, data or settings: starting anew", output)
            shutil.rmtree(self.folder)
        if not manifest.exists():
            write_json(manifest, {"sha256": self.sha256, "binding": dict(binding)})

    def has(self, name: str, window: int) -> bool:
        """Whether this window has been measured in this pass."""
        return self._path(name, window).exists()

    def done(self, name: str, windows: int) -> int:
        """How many of the first `windows` windows this pass has."""
        return sum(self.has(name, window) for window in range(windows))

    def write(self, name: str, window: int, columns: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Store a window's columns, and facts about how they were measured."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        typed = {
            key: pa.array(values, pa.string()) if key in _STRINGS else pa.array(values)
            for key, values in columns.items()
        }
        metadata = {str(key): str(value) for key, value in facts.items()}
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(typed).replace_schema_metadata(metadata), sink)
        write_bytes(self._path(name, window), sink.getvalue().to_pybytes())

    def read(self, name: str, window: int) -> dict[str, Any]:
        """A window's columns: lists of text, and arrays."""
        import pyarrow.parquet as pq

        table = self._read(pq.read_table, name, window)
        return {
            key: table.column(key).to_pylist() if key in _STRINGS else np.asarray(table.column(key).to_numpy())
            for key in table.column_names
        }

    def facts(self, name: str, window: int) -> dict[str, str]:
        """What was stored beside a window's columns."""
        import pyarrow.parquet as pq

        metadata = self._read(pq.read_schema, name, window).metadata or {}
        return {key.decode(): value.decode() for key, value in metadata.items()}

    def noise(self) -> float | None:
        """The stored noise floor."""
        path = self.folder / "noise.json"
        return float(read_json(path)["noise_floor"]) if path.exists() else None

    def write_noise(self, value: float) -> None:
        """Store the noise floor."""
        write_json(self.folder / "noise.json", {"noise_floor": value})

    def remove(self) -> None:
        """Delete all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, reader: Callable[[Path], Any], name: str, window: int) -> Any:
        import pyarrow as pa

        path = self._path(name, window)
        try:
            return reader(path)
        except (OSError, pa.ArrowException) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__})", remedy=f"delete {self.folder} and audit again"
            ) from None

    def _path(self, name: str, window: int) -> Path:
        return self.folder / f"{name}-{window:06d}.parquet"


def _binding(manifest: Path) -> str | None:
    try:
        found = read_json(manifest)
    except CheckpointError:
        return None
    return found.get("sha256") if isinstance(found, dict) else None
