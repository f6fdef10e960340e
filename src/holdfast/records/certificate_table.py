"""`certificate.parquet`: what a certificate counted, one row per prompt, without any text.

By behaviour the rows are the classes of the replies, otherwise degradations. They are written for verification alone
and shown nowhere, so the file is for its owner (mode 0600).
"""

import io
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.certification.behaviour import Claimed, Classes, assessed
from holdfast.certification.terms import Rows, Terms, named_statement
from holdfast.core.errors import CheckpointError, HoldfastError
from holdfast.core.files import parse_parquet, write_bytes
from holdfast.records.certificate import TABLE_NAME, CertificateRecord

COLUMNS = ("id", "strength", "degradation", "violated", "cluster", "category")
CLASSES = ("id", "cluster", "category", "before", "again", "after")
KEEP = "keep"
"""A further column of classes where prompts of several sets were asked: what the set of each keeps."""
Table = Rows | Classes
_ISSUE = "it is not what the certificate was issued for: restore it, or certify again"
_RESTORE = "restore it from where the certificate was issued, or certify again"


def write_table(path: Path, table: Table, tau: float) -> str:
    """Write the table, atomically and readable by the owner only; returns the sha256 of its bytes."""
    import pyarrow
    from pyarrow import parquet

    text, real = pyarrow.string(), pyarrow.float64()
    columns = {"id": pyarrow.array(table.ids, text), "category": pyarrow.array(table.category, text)}
    columns["cluster"] = pyarrow.array(table.cluster.tolist(), pyarrow.int32())
    if isinstance(table, Classes):
        order = (*CLASSES, KEEP) if table.keep is not None else CLASSES
        columns |= {name: pyarrow.array(getattr(table, name), text) for name in order[3:]}
    else:
        order, regressed = COLUMNS, table.regressed(tau).tolist()
        strengths = [None if np.isnan(s) else s for s in table.strength.tolist()]
        columns |= {"strength": pyarrow.array(strengths, real), "violated": pyarrow.array(regressed, pyarrow.bool_())}
        columns["degradation"] = pyarrow.array(table.degradation.tolist(), real)
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({name: columns[name] for name in order}), buffer)
    data = buffer.getvalue()
    write_bytes(path, data, mode=0o600)
    return sha256(data).hexdigest()


def outcome_lines(table: Table, tau: float) -> list[str]:
    """What an opening came to, one text a row, as the ledger keeps its hash."""
    if isinstance(table, Classes):
        return [f"{name} {was} {now}" for name, was, now in zip(table.ids, table.before, table.after, strict=True)]
    kept = (table.degradation <= tau).tolist()
    return [f"{name} {s:g} {k}" for name, s, k in zip(table.ids, table.strength.tolist(), kept, strict=True)]


def read_stored(record: CertificateRecord, folder: Path) -> Table:
    """The table beside a certificate."""
    place, expected = folder / TABLE_NAME, record.bound["table_sha256"]
    if record.by != "behaviour":
        return read_rows(place, record.tau, expected)
    table = _columns(place, expected, CLASSES, KEEP)
    classes = (table["before"], table["again"], table["after"], table.get(KEEP))
    return Classes(table["id"], np.array(table["cluster"], dtype=np.int64), table["category"], *classes)


def read_rows(path: Path, tau: float, expected_sha256: str) -> Rows:
    """Read degradations from a table whose bytes have the expected sha256 and whose violations follow from tau."""
    table = _columns(path, expected_sha256, COLUMNS)
    try:
        degradation, strength = (np.array(table[name], dtype=np.float64) for name in ("degradation", "strength"))
        rows = Rows(table["id"], degradation, np.array(table["cluster"], dtype=np.int64), table["category"], strength)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a certificate's table", remedy=_RESTORE) from error
    if table["violated"] != rows.regressed(tau).tolist():
        raise CheckpointError(f"{path}: its violations are not those of tau = {tau:g}", remedy=_RESTORE)
    return rows


def _columns(path: Path, expected_sha256: str, names: tuple[str, ...], further: str = "") -> dict[str, list[Any]]:
    """The columns of a table whose bytes are those that were written; `further` may be the last of them."""
    import pyarrow

    try:
        data = path.read_bytes()
    except OSError as error:
        what = f"the certificate's table {path} cannot be read: {error.strerror}"
        raise CheckpointError(what, remedy=_RESTORE) from error
    digest = sha256(data).hexdigest()
    if digest != expected_sha256:
        what = f"the certificate's table {path} was changed: expected sha256 {expected_sha256}, found {digest}"
        raise CheckpointError(what, remedy=_RESTORE)
    try:
        table: dict[str, list[Any]] = parse_parquet(data).to_pydict()
    except (pyarrow.ArrowException, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a certificate's table", remedy=_RESTORE) from error
    whole = tuple(table) in (names, (*names, further)) and all(isinstance(name, str) for name in table["id"])
    if not whole or any(not isinstance(label, int) for label in table["cluster"]):
        raise CheckpointError(f"{path} is not a certificate's table", remedy=_RESTORE)
    return table


def require_figures(record: CertificateRecord, table: Table) -> None:
    """Every figure, the statement and the verdict, from the table."""
    try:
        computed = assessed(table, Terms.of(record, record.openings["declared"]), claims_of(record))
    except CheckpointError:
        raise
    except (HoldfastError, ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"the certificate's figures cannot be computed: {error}", remedy=_ISSUE) from error
    if (strength := computed["strength"]) is not None:
        if (of := record.strength) is not None:
            strength.update({"original": of["original"], "original_sha256": of["original_sha256"]})
        strength["adapter"] = None if strength["chosen"] is None else record.places["after"]
    if computed["behaviour"] is not None and record.behaviour is not None:
        computed["behaviour"] = record.behaviour | computed["behaviour"]
    computed["statement"] = named_statement(
        computed["statement"], record.by, record.models, record.bound, computed["behaviour"], record.screening
    )
    if record.behaviour is not None:  # how replies were made and sorted is what the claim was entered with
        how, seen = record.settings["replies"], record.behaviour
        rules = {"name": how.get("rules"), "revision": how.get("rules_revision")}
        stated = (seen["rules"], seen["max_new_tokens"], seen["longest"])
        if stated != (rules, how.get("max_new_tokens"), how.get("longest")):
            raise CheckpointError("the certificate's rules or lengths are not those of its claim", remedy=_ISSUE)
    values = record.to_json()
    wrong = sorted(name for name, figure in computed.items() if figure != values[name])
    if wrong:
        raise CheckpointError(f"the certificate's {', '.join(wrong)} do not follow from its table", remedy=_ISSUE)
    if record.bound["reference_sha256"] != record.bound["before_sha256"]:
        raise CheckpointError("the certificate's reference is not its model before", remedy=_ISSUE)
    if record.bound["before_sha256"] == record.bound["after_sha256"]:
        raise CheckpointError("the certificate compares a model with itself", remedy=_ISSUE)


def claims_of(record: CertificateRecord) -> tuple[Claimed, ...]:
    """What a behaviour certificate claims: refusals, and answers where it has a second claim."""
    return (Claimed.REFUSALS,) if record.also is None else (Claimed.REFUSALS, Claimed.ANSWERS)
