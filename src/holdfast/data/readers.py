"""Local files to rows: strict JSON lines, JSON, CSV, TSV and Parquet.

Each reader yields `(where, row)` and notes what it cannot read in a `Problems`: one pass lists all faults.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

from holdfast.core.errors import DataError
from holdfast.data.rows import Problems

MAX_LINE = 10 * 2**20
BOM = b"\xef\xbb\xbf"

Rows: TypeAlias = Generator[tuple[str, Any], None, None]
Reader: TypeAlias = Callable[[Path, Problems], Rows]


def strict_json(data: bytes) -> Any:
    """Parse JSON: UTF-8, no NUL, no NaN or infinity, no duplicate keys."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(mapping := dict(pairs)) != len(pairs):
            raise ValueError("an object has the same key twice")
        return mapping

    if b"\0" in data:
        raise ValueError("a NUL byte")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _lines(handle: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines; None for one over `MAX_LINE`, whose rest is read away without being kept."""
    number = 0
    while piece := handle.readline(MAX_LINE + 1):
        number += 1
        if len(piece) <= MAX_LINE:
            yield number, piece.removeprefix(BOM) if number == 1 else piece
            continue
        while piece and not piece.endswith(b"\n"):
            piece = handle.readline(MAX_LINE + 1)
        yield number, None


def read_jsonl(path: Path, problems: Problems) -> Rows:
    """JSON lines, plain or gzip; CRLF, a BOM at the start and blank lines are accepted."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as handle:
            for number, line in _lines(handle):
                where = f"{path}:{number}"
                if line is None:
                    problems.add(where, f"the line is longer than {MAX_LINE // 2**20} MB")
                elif line.strip():
                    try:
                        row = strict_json(line.rstrip(b"\r\n"))
                    except ValueError as error:
                        problems.add(where, str(error))
                    else:
                        yield where, row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        what = f"{path} is not a complete gzip file ({type(error).__name__})"
        raise DataError(what, remedy="compress or copy it again") from None


def read_json(path: Path, problems: Problems) -> Rows:
    """A JSON file that holds one list of objects; `where` counts its items from 0."""
    try:
        rows = strict_json(path.read_bytes().removeprefix(BOM))
        if not isinstance(rows, list):
            raise ValueError("expected one list of objects")
    except ValueError as error:
        problems.add(str(path), str(error), fatal=True)
    else:
        yield from ((f"{path} item {number}", row) for number, row in enumerate(rows))


def read_delimited(path: Path, problems: Problems, *, delimiter: str) -> Rows:
    """CSV or TSV with a header line and double-quote quoting; `where` is the line on which a row begins."""
    previous = csv.field_size_limit(MAX_LINE)
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, delimiter=delimiter, strict=True)
            header = next(reader, [])
            if len(set(header)) != len(header):
                problems.add(f"{path}:1", "a column name occurs twice", fatal=True)
                return
            where = f"{path}:{reader.line_num + 1}"
            for fields in reader:
                if fields and len(fields) != len(header):
                    problems.add(where, f"expected {len(header)} fields, as in the header")
                elif any("\0" in value for value in fields):
                    problems.add(where, "a NUL byte")
                elif fields:  # a blank line is no row
                    yield where, dict(zip(header, fields, strict=True))
                where = f"{path}:{reader.line_num + 1}"
    except csv.Error as error:  # the parser cannot find the next row after this
        problems.add(f"{path}:{reader.line_num}", f"not valid {path.suffix[1:].upper()}: {error}", fatal=True)
    except UnicodeDecodeError as error:
        problems.add(str(path), f"not valid UTF-8 near byte {error.start} of a block", fatal=True)
    finally:
        csv.field_size_limit(previous)


def read_parquet(path: Path, problems: Problems) -> Rows:
    """A Parquet file; `where` counts its rows from 0."""
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"row {number} of {path}", row
    except pyarrow.ArrowException as error:
        what = f"{path} cannot be read as Parquet ({type(error).__name__})"
        raise DataError(what, remedy="write or copy it again") from None


READERS: dict[str, Reader] = {
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".json": read_json,
    ".csv": partial(read_delimited, delimiter=","),
    ".tsv": partial(read_delimited, delimiter="\t"),
    ".parquet": read_parquet,
}


def reader_for(path: Path) -> Reader | None:
    """The reader for a file's ending, or None."""
    return next((reader for ending, reader in READERS.items() if path.name.lower().endswith(ending)), None)
