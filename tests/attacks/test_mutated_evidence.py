"""10,000 mutated evidence files: with stale checksums all are refused, with new ones wherever the table contradicts.

What a reader still believes once every checksum was computed again is listed in `OPEN`: who wrote a file, only a hash
kept elsewhere (`verify --expect`) or a signature can tell. A new format of a file is added to `TARGETS`.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from holdfast.core.errors import CheckpointError
from tests.attacks.forging import edit, file_sha256, rebind_config, rebind_table
from tests.attacks.mutating import damaged, edited, other_value
from tests.attacks.runs import certified, pair, run, tiny_model, trained
from tests.overwriting import overwrite

__all__ = ["certified", "pair", "run", "tiny_model", "trained"]

STALE = 1050  # mutations of each file; with those of `Target.resealed`, 10,190 in all


def _audit(folder: Path) -> object:
    from holdfast.records.audit import Audit

    return Audit.load(folder)


def _splits(folder: Path) -> object:
    from holdfast.data.split_record import load_record

    return load_record(folder)


def _result(folder: Path) -> object:
    from holdfast.runs.stages.run_folder import RunFolder

    return RunFolder(folder).finished()


def _reference(folder: Path) -> object:
    from holdfast.scoring.reference import ReferenceTable

    return ReferenceTable.load(folder / "reference")


def _certificate(folder: Path) -> object:
    from holdfast.records.certificate import load_certificate

    return load_certificate(folder / "certificate.json")


def _certificate_table(folder: Path) -> object:
    from holdfast.records.certificate_table import read_rows

    record: Any = _certificate(folder)
    return read_rows(folder / "certificate.parquet", record.tau, record.bound["table_sha256"])


def _rebind_certificate(folder: Path) -> None:
    digest = file_sha256(folder / "certificate.parquet")
    edit(folder / "certificate.json", lambda values: values["bound"].update(table_sha256=digest))


def _rebind_losses(folder: Path) -> None:
    digest = file_sha256(folder / "reference.safetensors")
    edit(folder / "reference.json", lambda values: values.update(losses_sha256=digest))


@dataclass(frozen=True)
class Target:
    """One evidence file: who reads it, under which key its checksum stands, and what holds a checksum of it."""

    read: Callable[[Path], object]
    seal: str = "sha256"
    rebind: Callable[[Path], None] | None = None
    resealed: int = 40


TARGETS = {
    "audit.json": Target(_audit, resealed=200),
    "audit.parquet": Target(_audit, rebind=rebind_table, resealed=200),
    "splits.json": Target(_splits, seal="record_sha256", resealed=100),
    "result.json": Target(_result, resealed=60),
    "config.yaml": Target(_result, rebind=rebind_config, resealed=20),
    "reference.json": Target(_reference),
    "reference.safetensors": Target(_reference, rebind=_rebind_losses),
    "certificate.json": Target(_certificate),
    "certificate.parquet": Target(_certificate_table, rebind=_rebind_certificate),
}

ANY = frozenset({"any"})
OPEN: dict[str, frozenset[str]] = {
    # Models, data and settings are not in the table; a tau between the same two degradations changes no figure.
    "audit.json": frozenset({
        "after", "before", "binding", "commit", "data", "device", "dtype", "duplicates_dropped", "first_k", "hardware",
        "mode", "noise_floor", "seconds", "tau", "template_sha256", "tokenizer", "tokenizer_sha256", "versions",
    }),
    # Names of the prompts (a run's are compared with splits.json), and bytes that no column is read from. A KL that is
    # not the audit's unit follows from no other column, and has figures for the headline's role alone.
    "audit.parquet": frozenset({"category", "flip", "id", "kl_first"}),
    # How the split was drawn: `audit RUN` and `certify RUN` draw it again from the data.
    "splits.json": frozenset({
        "contradictory_prompts", "duplicates_dropped", "fractions", "moved_from_certify", "rule", "seed",
    }),
    # The report compares its figures and `audit_sha256` with the audit beside it.
    # What screening and the monitor counted follows from no table; `certify RUN` compares the former.
    "result.json": frozenset({
        "audit_sha256", "barrier", "behaviour", "commit", "cost", "data", "defense", "hardware", "memory", "safety",
        "screening", "seconds", "spikes", "step", "step_declined", "steps", "trust_remote_code", "versions",
    }),
    "config.yaml": ANY,  # settings and their hash in result.json, changed together
    "reference.json": frozenset({"ids", "provenance"}),  # compared with the run when it is used
    "reference.safetensors": ANY,  # rows are measured again when it is used
    "certificate.json": ANY,  # `verify` recomputes it from its table, models, data and ledger
    "certificate.parquet": frozenset({"category", "cluster", "degradation", "flip", "id", "strength"}),
}  # fmt: skip


@pytest.fixture
def folder(request: pytest.FixtureRequest, run: Path, name: str) -> Path:
    """A run folder; where the test needs one, with a certificate."""
    if name.startswith("certificate"):
        for file in request.getfixturevalue("certified").output.iterdir():
            shutil.copy(file, run)
    TARGETS[name].read(run)  # as it is, it is believed
    return run


def outcome(target: Target, folder: Path) -> str:
    try:
        target.read(folder)
    except CheckpointError as error:
        return "refused" if (error.exit_code, bool(error.remedy)) == (6, True) else "refused without a remedy"
    except Exception as error:  # noqa: BLE001  (any other one is the fault this test looks for)
        return f"traceback: {type(error).__name__}"
    return "believed"


@pytest.mark.parametrize("name", TARGETS)
def test_a_stale_checksum_is_always_refused(name, folder):
    """B7: evidence that was damaged or edited was believed, or ended in a traceback."""
    target, path, draw = TARGETS[name], folder / name, random.Random(f"stale {name}")
    whole, found = path.read_bytes(), Counter()
    for _ in range(STALE):
        overwrite(path, damaged(whole, draw))
        found[outcome(target, folder)] += 1
    assert found == {"refused": STALE}


@pytest.mark.parametrize("name", TARGETS)
def test_a_new_checksum_does_not_help_where_the_table_contradicts(name, folder):
    """A7: whatever follows from stored rows is computed from them, not read."""
    target, path, draw = TARGETS[name], folder / name, random.Random(f"resealed {name}")
    kept = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    found, believed = Counter(), Counter()
    for _ in range(target.resealed):
        where = forged(path, target, kept[name], draw)
        if target.rebind is not None:
            target.rebind(folder)
        ended = outcome(target, folder)
        found[ended] += 1
        believed[where] += ended == "believed"
        for other in {name, "audit.json", "result.json", "reference.json", "certificate.json"} & set(kept):
            overwrite(folder / other, kept[other])
    print(f"{name}: {dict(found)}; believed: {dict(+believed)}")
    assert set(found) <= {"refused", "believed"}
    assert OPEN[name] == ANY or set(+believed) <= OPEN[name]
    assert OPEN[name] == ANY or found["refused"]


def forged(path: Path, target: Target, whole: bytes, draw: random.Random) -> str:
    """Write a mutated file whose own checksum fits; returns the field that was changed."""
    if path.suffix == ".json":
        where, values = edited(json.loads(whole), draw, target.seal)
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        return where
    if path.suffix == ".yaml":
        settings = yaml.safe_load(whole)
        key = draw.choice(sorted(settings))
        path.write_text(yaml.safe_dump(settings | {key: other_value(settings[key], draw)}))
        return key
    if path.suffix == ".parquet" and draw.random() < 0.7:
        return _forged_cell(path, whole, draw)
    data = bytearray(whole)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return "flip"


def _forged_cell(path: Path, whole: bytes, draw: random.Random) -> str:
    """One cell of a table changed, in its column's type."""
    table = pq.read_table(pa.BufferReader(whole))
    while True:
        name, row = draw.choice(table.column_names), draw.randrange(table.num_rows)
        cells = table.column(name).to_pylist()
        value = other_value(cells[row], draw)
        try:
            changed = pa.array([*cells[:row], value, *cells[row + 1 :]], table.schema.field(name).type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError):
            continue
        if changed.to_pylist() != cells:
            break
    at = table.column_names.index(name)
    pq.write_table(table.set_column(at, table.schema.field(name), changed), path)
    return name
