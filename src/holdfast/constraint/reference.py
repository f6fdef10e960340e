"""Reference losses: every safety example at theta_0, measured once, bound to what they were measured on.

A table is stored as `reference.safetensors` (losses) and `reference.json` (example ids and provenance). It is reused
only where every provenance key agrees; a table that claims to match is spot-checked against the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.completion import CompletionLosses
from holdfast.constraint.degradation import in_unit
from holdfast.constraint.passes import Forward
from holdfast.core.errors import CheckpointError, DataError, HoldfastError
from holdfast.core.files import read_json, write_bytes, write_json
from holdfast.core.hashing import sha256_json, sha256_lines
from holdfast.core.ranks import barrier, gather_objects, rank
from holdfast.data.encode import Encoded

COLUMNS = ("total", "tokens", "first", "first_tokens")
SPOT_CHECK = 8
SPOT_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}  # nats per token; a wrong model is off by far more
VERSION = 1


@dataclass(frozen=True)
class ReferenceTable:
    """Losses at theta_0, one row per example, with their provenance."""

    ids: tuple[str, ...]
    losses: CompletionLosses
    provenance: Mapping[str, Any]

    @cached_property
    def sha256(self) -> str:
        """Hash of ids, losses and provenance."""
        columns = [getattr(self.losses, name).tolist() for name in COLUMNS]
        return sha256_json([list(self.ids), columns, dict(self.provenance)])

    def in_unit(self, constraint: ChanceConstraint) -> Tensor:
        """The losses to subtract for this constraint; zeros for `kl_token`."""
        if constraint.unit == "kl_token":
            return torch.zeros(len(self.ids), dtype=torch.float64)
        return in_unit(self.losses, constraint)

    def rows(self, ids: Sequence[str]) -> ReferenceTable:
        """The part of the table for these examples, in this order."""
        at = {example_id: i for i, example_id in enumerate(self.ids)}
        picked = [at[example_id] for example_id in ids]
        return ReferenceTable(
            tuple(ids), CompletionLosses(*(getattr(self.losses, name)[picked] for name in COLUMNS)), self.provenance
        )

    def save(self, stem: Path) -> None:
        """Write `<stem>.safetensors` and then `<stem>.json`, each atomically."""
        write_bytes(stem.with_suffix(".safetensors"), save({name: getattr(self.losses, name) for name in COLUMNS}))
        write_json(
            stem.with_suffix(".json"),
            {"version": VERSION, "ids": list(self.ids), "provenance": dict(self.provenance), "sha256": self.sha256},
        )

    @classmethod
    def load(cls, stem: Path) -> ReferenceTable:
        """Read a table; damage of either file is a `CheckpointError`."""
        record = read_json(stem.with_suffix(".json"))
        try:
            tensors = load_file(stem.with_suffix(".safetensors"))
            table = cls(
                tuple(record["ids"]), CompletionLosses(*(tensors[name] for name in COLUMNS)), record["provenance"]
            )
            intact = table.sha256 == record["sha256"]
        except Exception as error:
            raise _damaged(stem, str(error)) from error
        if not intact:
            raise _damaged(stem, "its content does not match its hash")
        return table


def _damaged(stem: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"reference losses {stem}.* are damaged: {why}", remedy="delete both files; they are measured again"
    )


def data_sha256(examples: Sequence[Encoded]) -> str:
    """Hash of the tokenised examples, labels included."""
    return sha256_lines(f"{e.id}|{list(e.input_ids)}|{list(e.labels)}" for e in examples)


def require_same_provenance(stored: Mapping[str, Any], current: Mapping[str, Any], where: Path) -> None:
    """Refuse a table measured on anything else, naming the differing keys."""
    differing = sorted(k for k in {*stored, *current} if stored.get(k) != current.get(k))
    if differing:
        listed = "; ".join(f"{k}: stored {_short(stored.get(k))}, now {_short(current.get(k))}" for k in differing)
        raise CheckpointError(
            f"reference losses {where} were measured on something else ({listed})",
            remedy="use another run folder, or delete the reference.* files there to measure them again",
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "..."


def measure_reference(
    forward: Forward, examples: Sequence[Encoded], provenance: Mapping[str, Any], first_k: int
) -> ReferenceTable:
    """Measure the table now; non-finite losses are refused by id."""
    losses = forward.losses(examples, first_k)
    bad = [e.id for e, x in zip(examples, losses.total.tolist(), strict=True) if not math.isfinite(x)]
    if bad:
        raise DataError(
            f"the reference loss of {len(bad)} safety examples is not finite (ids {', '.join(bad[:20])})",
            remedy="remove these examples, or load the model in float32",
        )
    return ReferenceTable(tuple(e.id for e in examples), losses, provenance)


def _spot_check(forward: Forward, table: ReferenceTable, examples: Sequence[Encoded], where: Path) -> None:
    some = sorted(range(len(examples)), key=lambda i: examples[i].id)[:SPOT_CHECK]
    fresh = forward.losses([examples[i] for i in some], int(table.provenance["first_k"])).per_token()
    # The mean over the examples: a single one may stray by bfloat16's noise, a wrong model is off on all.
    gap = float((fresh - table.losses.per_token()[some]).abs().mean())
    exact = table.provenance["dtype"] == "float32" and table.provenance["autocast"] == "no"
    tolerance = SPOT_TOLERANCE["float32" if exact else "bfloat16"]
    if not gap <= tolerance:
        raise CheckpointError(
            f"reference losses {where} do not belong to this model: {len(some)} examples measured again differ by "
            f"{gap:.3g} nats per token on average",
            remedy="delete these files; the losses are measured again",
        )


def cache_folder(configured: str | None) -> Path:
    """Where tables are shared between runs: `reference` in `cache_root`."""
    return cache_root(configured) / "reference"


def cache_root(configured: str | None) -> Path:
    """What runs share: the setting, else `HOLDFAST_CACHE`, else ~/.cache/holdfast."""
    root = configured or os.environ.get("HOLDFAST_CACHE") or str(Path.home() / ".cache" / "holdfast")
    return Path(root).expanduser()


def _stored(place: Path, provenance: Mapping[str, Any], ids: tuple[str, ...]) -> ReferenceTable | None:
    """The table kept at `place`, or None. Rank 0 reads it for all: a cache may lie on its node alone."""

    def read() -> ReferenceTable | HoldfastError | None:
        if not place.with_suffix(".json").exists():
            return None
        try:
            table = ReferenceTable.load(place)
            require_same_provenance(table.provenance, provenance, place)
            if set(table.ids) != set(ids):
                raise _damaged(place, "it lists other examples")
        except HoldfastError as error:
            return error
        return table.rows(ids)

    found = gather_objects(read() if rank() == 0 else None)[0]
    if isinstance(found, HoldfastError):
        raise found
    return found


def reference_table(
    forward: Forward,
    examples: Sequence[Encoded],
    provenance: Mapping[str, Any],
    *,
    stem: Path,
    cache: Path,
    writer: bool,
) -> ReferenceTable:
    """The table from the run folder, else from the cache, else measured; stored in both.

    Args:
        stem: `<run folder>/reference`, without suffix.
        writer: whether this process writes files (rank 0).
    """
    ids = tuple(e.id for e in examples)
    shared = cache / sha256_json(dict(provenance))
    for place in (stem, shared):
        found = _stored(place, provenance, ids)
        if found is not None:
            table = found
            _spot_check(forward, table, examples, place)
            break
    else:
        table = measure_reference(forward, examples, provenance, int(provenance["first_k"]))
    if writer:
        for place in (stem, shared):
            if not place.with_suffix(".json").exists():
                table.save(place)
    barrier()
    return table
