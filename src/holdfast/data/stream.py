"""Examples read one at a time, twice: first to check and hash them all, then in windows to work on them.

Between the passes nine bytes an example are kept (its id, and whether it is a duplicate), and a small sample.
"""

import hashlib
import heapq
import json
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.hashing import sha256_file
from holdfast.core.registry import nearest
from holdfast.data.examples import Example, as_chat
from holdfast.data.rows import Problems, RowError, check_columns, example_from_row
from holdfast.data.sources import RowSource, open_rows, rows_in_memory

Template = Literal["chat", "none"]
SAMPLE = 64


@dataclass(frozen=True)
class ExampleStream:
    """Checked examples of one source, exact duplicates left out; made by `open_stream`."""

    name: str  # of the source
    n: int  # how many examples there are
    duplicates: int  # rows left out because an earlier row has the same prompt and completion
    sha256: str  # of ids, texts and categories of all rows, in order
    file_sha256: str | None  # of the file's bytes; None for anything but a local file
    # the 64 examples with the smallest ids, which are hashes: a random sample that depends on content alone
    sample: tuple[Example, ...]
    chat: bool  # whether the examples are conversations
    _rows: RowSource
    _columns: Mapping[str, str]
    _ids: "array[int]"
    _kept: np.ndarray[Any, np.dtype[np.bool_]]

    def __iter__(self) -> Iterator[Example]:
        number = -1
        problems = Problems(self.name)
        with closing(self._rows.read(problems)) as rows:
            for number, (where, row) in enumerate(rows):
                try:
                    example = _example(row, self._columns, where)
                except RowError:
                    raise self._changed() from None
                if number >= len(self._ids) or int(example.id, 16) != self._ids[number]:
                    raise self._changed()
                if self._kept[number]:
                    yield as_chat(example) if self.chat else example
        if problems.total or number + 1 != len(self._ids):
            raise self._changed()

    def _changed(self) -> DataError:
        return DataError(f"{self.name} changed while it was being read", remedy="run again when nothing writes to it")


def open_stream(
    source: Any, *, columns: Mapping[str, str] | None = None, template: Template = "chat", name: str | None = None,
    **hub: str | None,
) -> ExampleStream:  # fmt: skip
    """Read a source once: check every row, count, hash, and find exact duplicates.

    Args:
        source: a data file, a hub id, rows in memory, a `datasets.Dataset`, or examples.
        columns: as for `read_examples`.
        template: `chat` turns prompt and completion into a conversation; `none` leaves plain text plain.
        name: of rows in memory.
        hub: split, subset and revision of a hub data set.
    """
    if template not in ("chat", "none"):
        raise ConfigError(f"template {template!r} is unknown", remedy=nearest(str(template), ["chat", "none"]))
    if isinstance(source, (str, Path)):
        rows = open_rows(str(source), **hub)
    elif isinstance(source, Iterator) or not hasattr(source, "__iter__"):
        what = f"safety data of type {type(source).__name__} can be read only once"
        raise UnsupportedError(what, remedy="give a list, file or data set")
    else:
        rows = rows_in_memory(source, name or "the safety rows")
    ids: array[int] = array("Q")
    digest, kinds = hashlib.sha256(), dict[str, str]()
    smallest: list[tuple[int, int, Example]] = []  # a heap, the largest id on top
    for example in rows.examples(columns, read_row=_example):
        number = int(example.id, 16)
        content = [example.id, example.prompt, example.completion, example.category]
        line = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        digest.update(len(line).to_bytes(8, "little") + line)
        kinds.setdefault(example.kind, example.where)
        if all(number != -key for key, _, _ in smallest):
            heapq.heappush(smallest, (-number, -len(ids), example))
            if len(smallest) > SAMPLE:
                heapq.heappop(smallest)
        ids.append(number)
    chat = _is_chat(kinds, template)
    kept = np.zeros(len(ids), dtype=bool)
    kept[np.unique(np.frombuffer(ids, dtype=np.uint64), return_index=True)[1]] = True
    sample = [example for _, _, example in sorted(smallest, key=lambda item: -item[0])]
    return ExampleStream(
        name=rows.name, n=int(kept.sum()), duplicates=int((~kept).sum()), sha256=digest.hexdigest(),
        file_sha256=None if rows.path is None else sha256_file(rows.path),
        sample=tuple(map(as_chat, sample) if chat else sample), chat=chat,
        _rows=rows, _columns=check_columns(columns), _ids=ids, _kept=kept,
    )  # fmt: skip


def _example(row: object, columns: Mapping[str, str], where: str) -> Example:
    return row if isinstance(row, Example) else example_from_row(row, columns, where)


def _is_chat(kinds: Mapping[str, str], template: Template) -> bool:
    """Whether all become conversations, from where each kind of example occurs first."""
    chat = template == "chat" or len(kinds) > 1
    if chat and "text" in kinds:
        mixed = " mixed with others" if len(kinds) > 1 else ""
        what = f"{kinds['text']}: text examples{mixed} have no prompt and cannot become a conversation"
        remedy = "give prompt and completion columns, or messages; or text alone with template: none"
        raise DataError(what, remedy=remedy)
    return chat or "chat" in kinds
