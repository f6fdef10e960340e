"""Reading examples from a file, a hub data set, or rows in memory, with every fault named by its place."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import nearest
from holdfast.data.examples import Example, as_chat, make_example, uniform
from holdfast.data.readers import READERS, Rows, reader_for
from holdfast.data.rows import (
    MissingColumnsError,
    OtherColumnsError,
    Problems,
    RowError,
    check_columns,
    example_from_row,
    messages_of,
    with_tools,
)

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)

ReadRow = Callable[[Any, Mapping[str, str], str], Example]
"""A row, the columns of `check_columns` and the row's place to an example."""


@dataclass(frozen=True)
class RowSource:
    """Rows that can be read more than once."""

    name: str
    read: Callable[[Problems], Rows]  # gives `(where, row)` pairs, and notes what it cannot read
    path: Path | None = None  # the local file; None for hub data sets and rows in memory

    def examples(
        self, columns: Mapping[str, str] | None = None, *, limit: int | None = None, skipped: Problems | None = None,
        read_row: ReadRow = example_from_row,
    ) -> Iterator[Example]:  # fmt: skip
        """Every example, in order; faults are raised at the end, all together. Arguments as for `read_examples`."""
        mapping = check_columns(columns)
        problems = Problems(self.name) if skipped is None else skipped
        count, other_columns = 0, None
        with closing(self.read(problems)) as rows:  # a reader undoes its settings when closed, not when forgotten
            for where, row in islice(rows, limit):
                try:
                    example = read_row(row, mapping, where)
                except RowError as error:
                    # The first row: probably the whole source has other columns.
                    if isinstance(error, MissingColumnsError) and not count and not problems.total:
                        other_columns = OtherColumnsError.of(where, row, mapping)
                        if skipped is None:
                            raise other_columns from None
                    problems.add(where, str(error))
                else:
                    count += 1
                    yield example
        if other_columns is not None and not count:
            raise other_columns
        if skipped is None:
            problems.raise_if_any()
        else:
            problems.require_few(count)
        if not count:
            raise DataError(f"{problems.source} has no rows", remedy="give at least one example")


def open_rows(
    source: str, *, split: str | None = None, subset: str | None = None, revision: str | None = None
) -> RowSource:
    """Find a file or load a hub data set; nothing is read yet. Arguments and errors as for `read_examples`."""
    path = Path(source).expanduser()
    # A file exists, ends like one, or cannot be a hub id.
    if not (path.exists() or reader_for(path) is not None or HUB_ID.fullmatch(source) is None):
        return rows_in_memory(_load_hub(source, split=split, subset=subset, revision=revision), source)
    hub = {"split": split, "subset": subset, "revision": revision}
    if option := next((name for name, value in hub.items() if value is not None), None):
        what = f"{option} is set, but {source} is a local file; it applies to hub data sets only"
        raise ConfigError(what, remedy=f"remove {option}")
    _require_file(path)
    if (reader := reader_for(path)) is None:
        what = f"{path}: unknown file ending; expected one of {', '.join(READERS)}"
        raise DataError(what, remedy="convert the file, for example to JSON lines")
    return RowSource(str(path), partial(reader, path), path)


def rows_in_memory(rows: Iterable[object], name: str) -> RowSource:
    """A list of rows or a `datasets.Dataset` as a source; `where` counts rows from 0."""

    def read(_: Problems) -> Rows:
        for number, row in enumerate(rows):
            yield f"row {number} of {name}", row

    return RowSource(name, read)


def read_examples(
    source: str, *, columns: Mapping[str, str] | None = None, split: str | None = None, subset: str | None = None,
    limit: int | None = None, revision: str | None = None, skipped: Problems | None = None,
) -> list[Example]:  # fmt: skip
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
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; expected at least 1", remedy="leave it out to read all rows")
    rows = open_rows(source, split=split, subset=subset, revision=revision)
    return uniform(rows.examples(columns, limit=limit, skipped=skipped))


def examples_from_rows(
    rows: Iterable[Mapping[str, object]], *, name: str, columns: Mapping[str, str] | None = None
) -> list[Example]:
    """The same for rows in memory or a `datasets.Dataset`."""
    return uniform(rows_in_memory(rows, name).examples(columns))


def task_rows(rows: Iterable[Mapping[str, object]], *, name: str, replies: bool) -> list[Example]:
    """The same of what a trainer takes; of a preference, the chosen reply is the completion.

    Without `replies` rows have a prompt alone, and the completion is empty.
    """
    first = next(iter(rows), {})
    chosen = {"completion": "chosen"} if "prompt" in first else {"messages": "chosen"}
    columns = chosen if "chosen" in first and "completion" not in first else None
    read_row = example_from_row if replies else _prompt_row
    return uniform(rows_in_memory(rows, name).examples(columns, read_row=read_row))


def read_prompts(
    source: RowSource | str, *, columns: Mapping[str, str] | None = None, limit: int | None = None, **hub: str | None
) -> list[Example]:
    """The prompts of a source, each once, to be replied to; completions are not looked at. See `read_examples`."""
    rows = open_rows(source, **hub) if isinstance(source, str) else source
    first: dict[str, Example] = {}
    for example in rows.examples(columns, limit=limit, read_row=_prompt_row):
        first.setdefault(prompt_key(example), example)
    return list(first.values())


def prompts_in_memory(rows: Iterable[Mapping[str, object]]) -> list[Example]:
    """The same for rows in memory."""
    return read_prompts(rows_in_memory(rows, "prompts"))


def prompt_key(example: Example) -> str:
    """What makes two prompts the same one to a model: every turn, the assistant's too."""
    return json.dumps(as_chat(example).prompt if example.kind != "text" else example.completion, sort_keys=True)


def _prompt_row(row: Mapping[str, object], columns: Mapping[str, str], where: str) -> Example:
    try:
        return example_from_row(row, columns, where)
    except MissingColumnsError:
        prompt = row.get(columns.get("prompt", "prompt"))
        if isinstance(prompt, list | tuple):
            prompt = messages_of(prompt, "prompt")
            if prompt[-1]["role"] not in ("user", "tool") or not prompt[-1]["content"].strip():
                raise RowError("the last message of a prompt must be the user's, with some text") from None
        elif not isinstance(prompt, str) or not prompt.strip():
            raise
        category = row.get(columns.get("category", "category"))
        return with_tools(make_example(prompt, "", where, category if isinstance(category, str) else None), row)


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a file", remedy="name one file in it")
    if path.exists():
        return
    if not path.parent.is_dir():
        raise DataError(f"{path} does not exist, nor does its folder", remedy="check the path")
    files = [entry.name for entry in path.parent.iterdir() if reader_for(entry) is not None]
    remedy = nearest(path.name, files) if files else "the folder holds no data files; check the path"
    raise DataError(f"{path} does not exist", remedy=remedy)


def _load_hub(
    source: str, *, split: str | None, subset: str | None, revision: str | None
) -> Iterable[Mapping[str, object]]:
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
