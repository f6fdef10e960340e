"""The measured windows of an unfinished audit, on disk: what a killed audit continues from.

A part is written whole or not at all, and belongs to one binding: models, data, settings and versions. Its file is the
sha256 of a parquet table (32 bytes), then the table: a flipped bit is found before Arrow sees it.
"""

import io
import logging
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import CheckpointError
from holdfast.core.files import parse_parquet, read_plain_file, write_bytes
from holdfast.core.hashing import sha256_json
from holdfast.core.sealed_json import read_sealed, write_sealed

logger = logging.getLogger(__name__)

FOLDER = ".audit-parts"
DIGEST = 32
_STRINGS = ("id", "role", "category")


class PartialResults:
    """Parts of one audit, by pass (`both`, `before`, `after`) and window, and its noise floor."""

    def __init__(self, output: Path, binding: Mapping[str, Any]) -> None:
        self.folder, self.sha256 = output / FOLDER, sha256_json(dict(binding))
        self._remedy = f"delete {self.folder} and audit again"
        self._noise, manifest = self.folder / "noise.json", self.folder / "manifest.json"
        try:
            same = not manifest.exists() or read_sealed(manifest)["binding_sha256"] == self.sha256
        except (CheckpointError, KeyError):
            same = False
        if not same:
            logger.warning("the unfinished audit in %s is of other models, data or settings: starting anew", output)
            shutil.rmtree(self.folder)
        if not manifest.exists():
            write_sealed(manifest, {"binding_sha256": self.sha256, "binding": dict(binding)})

    def has(self, name: str, window: int) -> bool:
        return self._path(name, window).exists()

    def write(self, name: str, window: int, columns: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Store a window's columns, and facts about how they were measured."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        typed = {key: pa.array(values, pa.string() if key in _STRINGS else None) for key, values in columns.items()}
        sink = io.BytesIO()
        pq.write_table(pa.table(typed, metadata={key: str(value) for key, value in facts.items()}), sink)
        write_bytes(self._path(name, window), sha256(sink.getvalue()).digest() + sink.getvalue())

    def read(self, name: str, window: int) -> dict[str, Any]:
        table = self._table(name, window)
        return {
            key: table[key].to_pylist() if key in _STRINGS else np.asarray(table[key].to_numpy())
            for key in table.column_names
        }

    def facts(self, name: str, window: int) -> dict[str, str]:
        metadata = self._table(name, window).schema.metadata or {}
        return {key.decode(): value.decode() for key, value in metadata.items()}

    def noise(self) -> float | None:
        if not self._noise.exists():
            return None
        return float(read_sealed(self._noise, remedy=self._remedy)["noise_floor"])

    def write_noise(self, value: float) -> None:
        write_sealed(self._noise, {"noise_floor": value})

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _table(self, name: str, window: int) -> Any:
        path = self._path(name, window)
        data = read_plain_file(path, remedy=self._remedy)
        if sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            raise CheckpointError(f"{path} is damaged: its content does not match its checksum", remedy=self._remedy)
        return parse_parquet(data[DIGEST:])

    def _path(self, name: str, window: int) -> Path:
        return self.folder / f"{name}-{window:06d}.part"
