"""Reading examples from a file, a hub data set, or rows in memory, with every fault named by its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import nearest
from holdfast.data.examples import Example, uniform
from holdfast.data.readers import READERS, Rows, reader_for
from holdfast.data.rows import (
    MissingColumnsError,
    Problems,
    RowError,
    check_columns,
    example_from_row,
    missing_columns_error,
)

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def read_examples(
    source: str,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
    revision: str | None = None,
    skipped: Problems | None = None,
) -> list[Example]:
    """Read and check all examples of a file or hub data set.

    Plain and conversational rows may be mixed; the plain ones then become conversational.

    Args:
        source: a `.jsonl`, `.jsonl.gz`, `.json`, `.csv`, `.tsv` or `.parquet` file, or a hub id.
        columns: our names (prompt, completion, messages, text, category) to the source's; no other name is guessed.
        split: of a hub data set; `train` unless given.
        subset: configuration name of a hub data set.
        limit: read only the first rows.
        revision: commit, tag or branch of a hub data set.
        skipped: takes malformed rows, which are then left out instead of refused, as long as they are few
            (`Problems.require_few`).

    Raises:
        DataError: the source is missing, empty or malformed; up to 20 rows are named.
        ConfigError: an option does not fit the source.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; expected at least 1", remedy="leave it out to read all rows")
    rows = open_rows(source, split=split, subset=subset, revision=revision)
    problems = Problems(rows.name) if skipped is None else skipped
    with closing(rows.read(problems)) as found:  # a reader undoes its settings when closed, not when forgotten
        return _collect(islice(found, limit), columns, problems, skip=skipped is not None)


@dataclass(frozen=True)
class RowSource:
    """Rows that can be read more than once.

    Attributes:
        name: for messages.
        read: gives `(where, row)` pairs, and notes what it cannot read.
        path: the local file; None for hub data sets and rows in memory.
    """

    name: str
    read: Callable[[Problems], Rows]
    path: Path | None = None


def open_rows(
    source: str, *, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> RowSource:
    """Find a file or load a hub data set; nothing is read yet. Arguments and errors as for `read_examples`."""
    path = Path(source).expanduser()
    if not _is_local(source, path):
        dataset = _load_hub(source, split=split, subset=subset, revision=revision)
        return RowSource(source, lambda _: _numbered(dataset, source))
    for option, value in (("split", split), ("subset", subset), ("revision", revision)):
        if value is not None:
            raise ConfigError(
                f"{option} is set, but {source} is a local file; it applies to hub data sets only",
                remedy=f"remove {option}",
            )
    reader = reader_for(_require_file(path))
    if reader is None:
        raise DataError(
            f"{path}: unknown file ending; expected one of {', '.join(READERS)}",
            remedy="convert the file, for example to JSON lines",
        )
    return RowSource(str(path), partial(reader, path), path)


def _numbered(rows: Iterable[Any], name: str) -> Rows:
    """Rows with their places, counted from 0."""
    for number, row in enumerate(rows):
        yield f"row {number} of {name}", row


def rows_in_memory(rows: Iterable[Mapping[str, Any]], name: str) -> RowSource:
    """A list of rows or a `datasets.Dataset` as a source."""
    return RowSource(name, lambda _: _numbered(rows, name))


def examples_from_rows(
    rows: Iterable[Mapping[str, Any]],
    *,
    name: str,
    columns: Mapping[str, str] | None = None,
) -> list[Example]:
    """The same checks for rows in memory or a `datasets.Dataset`; `where` counts rows from 0.

    Raises:
        DataError: as `read_examples`.
    """
    return _collect(_numbered(rows, name), columns, Problems(name))


def _collect(
    rows: Iterable[tuple[str, Any]], columns: Mapping[str, str] | None, problems: Problems, *, skip: bool = False
) -> list[Example]:
    mapping = check_columns(columns)
    examples: list[Example] = []
    other_columns: DataError | None = None
    for where, row in rows:
        try:
            examples.append(example_from_row(row, mapping, where))
        except MissingColumnsError as error:
            if not examples and not problems.total:  # the first row: probably the whole source has other columns
                other_columns = missing_columns_error(where, row, mapping)
                if not skip:
                    raise other_columns from None
            problems.add(where, str(error))
        except RowError as error:
            problems.add(where, str(error))
    if other_columns is not None and not examples:
        raise other_columns
    if skip:
        problems.require_few(len(examples))
    else:
        problems.raise_if_any()
    if not examples:
        raise DataError(f"{problems.source} has no rows", remedy="give at least one example")
    return uniform(examples)


def _is_local(source: str, path: Path) -> bool:
    """Whether `source` names a file: it exists, ends like one, or cannot be a hub id."""
    return path.exists() or reader_for(path) is not None or HUB_ID.fullmatch(source) is None


def _require_file(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a file", remedy="name one file in it")
    if not path.exists():
        folder = path.parent
        if not folder.is_dir():
            raise DataError(f"{path} does not exist, nor does its folder", remedy="check the path")
        files = [entry.name for entry in folder.iterdir() if reader_for(entry) is not None]
        remedy = nearest(path.name, files) if files else "the folder holds no data files; check the path"
        raise DataError(f"{path} does not exist", remedy=remedy)
    return path


def _load_hub(source: str, *, split: str | None, subset: str | None, revision: str | None) -> Iterable[Any]:
    """Load a hub data set; code in it is never run."""
    import datasets

    try:
        return datasets.load_dataset(source, name=subset, split=split or "train", revision=revision)  # type: ignore[no-any-return]
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # The library's message may quote rows, so only its kind is passed on.
        raise DataError(
            f"hub data set {source!r} (subset {subset}, split {split or 'train'}, revision {revision}) "
            f"cannot be loaded: {type(error).__name__}; and no such file exists here",
            remedy="check the id, subset, split and network access, or give a local file",
        ) from None
