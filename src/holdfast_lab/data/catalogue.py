"""The public data sets of the harmful fine-tuning protocol by name, from a local folder or from the hub.

A folder (the argument, or the environment variable HOLDFAST_DATA) is used alone where there is one: nothing is fetched
behind the user's back. A hub data set is loaded at a commit, which is returned, so that a study can record it. The
commits are the ones that other public repositories pin; none is known for BeaverTails-Evaluation, so that its head is
asked for. Rows have one shape, the columns that `SOURCES` names, whichever copy they come from.
"""

import csv
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.hashing import sha256_lines
from holdfast.core.registry import nearest
from holdfast.data.harm_categories import CATEGORIES
from holdfast.data.readers import Rows, reader_for
from holdfast.data.rows import Problems, RowError
from holdfast.data.sources import open_rows

__all__ = ["CATEGORIES", "NAMES", "VARIABLE", "Collection", "data_folder", "load"]

VARIABLE = "HOLDFAST_DATA"
FLAG_ONLY = "is_safe_flag"  # of `label_source`: the category booleans are filled in, not annotated
_TIMEOUT_S = 10.0
Row: TypeAlias = dict[str, Any]
Column: TypeAlias = Callable[[Mapping[str, Any]], Any]  # a column's value, read from the row of a copy


def _text(column: str, *, empty: bool = False) -> Column:
    def read(row: Mapping[str, object]) -> str:
        value = row.get(column)
        if not isinstance(value, str):
            raise RowError(f"column {column!r} must be a string")
        if not empty and not value.strip():
            raise RowError(f"column {column!r} is empty")
        return value

    return read


def _choice(column: str, known: Iterable[str], expected: str) -> Column:
    def read(row: Mapping[str, object]) -> str:
        if (value := _text(column)(row)) not in known:
            raise RowError(f"column {column!r} must {expected}")
        return str(value)

    return read


def _label(classes: int, first: int = 0) -> Column:
    """A class number from 0; files write it as a digit, the hub as an integer."""

    def read(row: Mapping[str, object]) -> int:
        value = row.get("label")
        try:
            if not isinstance(value, str) and type(value) is not int:  # int() would cut 0.9 and take True
                raise TypeError
            label = int(value) - first
        except (TypeError, ValueError):
            raise RowError("column 'label' must be a whole number") from None
        if not 0 <= label < classes:
            raise RowError(f"column 'label' must be {first} to {classes - 1 + first}")
        return label

    return read


def _is_safe(row: Mapping[str, object]) -> bool:
    if not isinstance(safe := row.get("is_safe"), bool):
        raise RowError("column 'is_safe' must be true or false")
    return safe


def _categories(row: Mapping[str, object]) -> list[str] | None:
    """In beaver-dam's order, None where only the flag is known."""
    marks = row.get("category")
    if not isinstance(marks, Mapping) or set(marks) != set(CATEGORIES):
        raise RowError("column 'category' must hold the 14 categories")
    if not all(isinstance(mark, bool) for mark in marks.values()):  # "false" would count as true
        raise RowError("column 'category' must say true or false of each category")
    return None if row.get("label_source") == FLAG_ONLY else [name for name in CATEGORIES if marks[name]]


@dataclass(frozen=True)
class File:
    """A file of the folder."""

    path: str
    header: tuple[str, ...] = ()  # the columns' names, where the file does not have them
    columns: Mapping[str, Column] | None = None  # None: those of its data set
    partial: bool = False  # whether rows are missing


@dataclass(frozen=True)
class Source:
    """A data set: of each split (the first is the default) the files, of which the first that exists is read."""

    columns: Mapping[str, Column]  # how each is read; of faults of a row the first column's is told
    splits: dict[str, tuple[File, ...]]
    hub: str | None = None  # its id there; None: it is not on the hub in this form
    revision: str | None = None  # the commit that is loaded; None: the head
    subset: str | None = None
    prefix: str = ""  # of the splits' names on the hub


def _one(path: str, columns: Mapping[str, Column], split: str = "train", hub: str | None = None) -> Source:
    return Source(columns, {split: (File(path),)}, hub)


_PAIR: dict[str, Column] = {"prompt": _text("prompt"), "response": _text("response", empty=True)}
# The original CSV has classes from 1; the hub joins title and description with one blank. Backslashes, which stand for
# line breaks, stay, as the hub has them.
_NEWS: dict[str, Any] = {"header": ("label", "title", "description"), "columns": {
    "text": lambda row: f"{_text('title')(row)} {_text('description', empty=True)(row)}".strip(),
    "label": _label(4, first=1),
}}  # fmt: skip
SOURCES: dict[str, Source] = {
    "beavertails": Source(
        {"is_safe": _is_safe, "categories": _categories, **_PAIR},
        {
            "train": (File("beavertails/30k_train.jsonl"), File("beavertails/30k_train_partial.jsonl", partial=True)),
            "test": (File("beavertails/30k_test.jsonl"),),
        },
        "PKU-Alignment/BeaverTails", "8401fe609d288129cc684a9b3be6a93e41cfe678", prefix="30k_",
    ),
    "beavertails_evaluation": _one(  # copies call the prompt `prompt` or `instruction`
        "beavertails/evaluation_700.json",
        {"category": _choice("category", CATEGORIES, "name one of the 14 categories"),
         "prompt": lambda row: _text("prompt" if "prompt" in row else "instruction")(row)},
        "test", "PKU-Alignment/BeaverTails-Evaluation",
    ),
    "refusals": _one(  # an instruction, with its input below where there is one
        "safety_tuned_llamas/safety_only_data_Instructions.json",
        {"prompt": lambda row: "\n\n".join(filter(None, [_text("instruction")(row), str(row.get("input") or "")])),
         "response": _text("output", empty=True)},
    ),
    "harmful_with_refusals": _one(
        "beavertails/harmful_with_refusals_747.json",
        {**_PAIR, "refusal": _text("refusal", empty=True), "category": _text("category")},
    ),
    "advbench": _one("advbench/harmful_behaviors.csv", {"prompt": _text("goal")}, "test"),
    "xstest": _one(  # its unsafe prompts look like safe ones
        "xstest/xstest_prompts.csv",
        {"safe": lambda row: _choice("label", ("safe", "unsafe"), "be safe or unsafe")(row) == "safe",
         "prompt": _text("prompt"), "category": _text("type")},
        "test",
    ),
    "sst2": Source(  # every GLUE line ends with a blank; label 0 is negative, 1 positive
        {"sentence": lambda row: _text("sentence")(row).strip(), "label": _label(2)},
        {"train": (File("sst2_glue/train.tsv"),), "validation": (File("sst2_glue/dev.tsv"),)},
        "stanfordnlp/sst2", "8d51e7e4887a4caaa95b3fbebbf53c0490b58bbb",
    ),
    "ag_news": Source(  # label 0 to 3: World, Sports, Business, Sci/Tech
        {"text": lambda row: _text("text")(row).strip(), "label": _label(4)},
        {
            "train": (File("ag_news/train.csv", **_NEWS), File("ag_news/train_partial.jsonl", partial=True)),
            "test": (File("ag_news/test.csv", **_NEWS),),
        },
        "fancyzhx/ag_news", "eb185aade064a813bc0b7f42de02595523103ca4",
    ),
    "gsm8k": Source(  # a solution ends with `#### number`
        {"question": _text("question"), "answer": _text("answer")},
        {"train": (File("gsm8k/train.jsonl"),), "test": (File("gsm8k/test.jsonl"),)},
        "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", subset="main",
    ),
}  # fmt: skip
NAMES: tuple[str, ...] = tuple(SOURCES)


@dataclass(frozen=True)
class Collection:
    """The rows of one split of one data set."""

    name: str  # in this catalogue
    split: str  # of the data set
    rows: list[Row]  # in the order of the source
    origin: str  # `folder`, or the hub id
    revision: str | None  # the commit of a hub data set; None for a folder
    sha256: str  # of the rows as JSON, in order
    partial: bool = False  # whether the source is known to lack rows of the split
    dropped: int = 0  # rows left out because they are in a test split

    def describe(self) -> dict[str, object]:
        return {**vars(self), "rows": len(self.rows)}


def load(name: str, split: str | None = None, *, folder: Path | None = None) -> Collection:
    """Load one split of a data set of `NAMES`: train, validation or test; its first unless given.

    Without `folder` from HOLDFAST_DATA if it is set, else from the hub, at the catalogue's commit (the head of the main
    branch where it has none). Of malformed rows up to 20 are named.
    """
    if name not in SOURCES:
        raise ConfigError(f"unknown data set {name!r}", remedy=nearest(name, list(NAMES)))
    splits = SOURCES[name].splits
    chosen = next(iter(splits)) if split is None else split
    if chosen not in splits:
        raise ConfigError(f"data set {name!r} has no split {chosen!r}", remedy=nearest(chosen, list(splits)))
    place = data_folder(folder)
    if place is None:
        return _from_hub(name, chosen)
    found = _from_folder(name, chosen, place)
    return _without_test_pairs(found, place) if name == "harmful_with_refusals" else found


def data_folder(folder: Path | None = None) -> Path | None:
    """The folder that `load` reads: the argument, else HOLDFAST_DATA, else None for the hub."""
    given = folder or os.environ.get(VARIABLE)
    if not given:
        return None
    path = Path(given).expanduser()
    if not path.is_dir():
        raise DataError(
            f"the data folder {path} does not exist or is no folder",
            remedy=f"correct the path ({VARIABLE} or the data folder setting), or unset it to use the hub",
        )
    return path


def _from_folder(name: str, split: str, folder: Path) -> Collection:
    files = SOURCES[name].splits[split]
    file = next((file for file in files if (folder / file.path).is_file()), None)
    if file is None:
        what = f"data set {name!r}, split {split!r}: the folder {folder} has no {' nor '.join(f.path for f in files)}"
        raise DataError(what, remedy="add the file, or unset the folder to use the hub")
    path = folder / file.path
    problems = Problems(str(path))
    reader = partial(_without_header, header=file.header) if file.header else reader_for(path)
    assert reader is not None  # every ending in the catalogue has one
    with closing(reader(path, problems)) as rows:
        columns = file.columns or SOURCES[name].columns
        return _collect(rows, columns, problems, name=name, split=split, origin="folder", partial=file.partial)


def _without_header(path: Path, problems: Problems, *, header: tuple[str, ...]) -> Rows:
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, strict=True)
            for fields in reader:
                where = f"{path}:{reader.line_num}"
                if len(fields) == len(header):
                    yield where, dict(zip(header, fields, strict=True))
                else:
                    problems.add(where, f"expected {len(header)} fields: {', '.join(header)}")
    except (csv.Error, UnicodeDecodeError) as error:
        problems.add(str(path), f"not valid CSV in UTF-8 ({type(error).__name__})")


def _collect(
    rows: Iterable[tuple[str, Mapping[str, object]]], columns: Mapping[str, Column], problems: Problems, **about: Any
) -> Collection:
    kept: list[Row] = []
    for where, row in rows:
        try:
            if not isinstance(row, Mapping):
                raise RowError("expected an object with named columns")
            kept.append({name: read(row) for name, read in columns.items()})
        except RowError as error:
            problems.add(where, str(error))
    problems.raise_if_any()
    if not kept:
        raise DataError(f"{problems.source} has no rows", remedy="copy the file again")
    return Collection(rows=kept, sha256=_digest(kept), **{"revision": None, **about})


def _digest(rows: Iterable[Row]) -> str:
    return sha256_lines(json.dumps(row, sort_keys=True) for row in rows)


def _without_test_pairs(found: Collection, folder: Path) -> Collection:
    """Some of these pairs were copied from BeaverTails' test split; training on them would leak it."""
    test = {(row["prompt"], row["response"]) for row in _from_folder("beavertails", "test", folder).rows}
    kept = [row for row in found.rows if (row["prompt"], row["response"]) not in test]
    return replace(found, rows=kept, sha256=_digest(kept), dropped=len(found.rows) - len(kept))


def _from_hub(name: str, split: str) -> Collection:
    source = SOURCES[name]
    if source.hub is None:
        what = f"data set {name!r} is not on the hub in this form"
        raise DataError(what, remedy=f"set {VARIABLE} to a folder that holds {source.splits[split][0].path}")
    commit = source.revision or _head(source.hub)
    try:
        rows = open_rows(source.hub, split=f"{source.prefix}{split}", subset=source.subset, revision=commit)
    except DataError as error:
        remedy = f"check the network and HF_HUB_OFFLINE, or set {VARIABLE} to a folder with the files"
        raise DataError(error.what, remedy=remedy) from error
    problems = Problems(rows.name)
    with closing(rows.read(problems)) as found:
        return _collect(found, source.columns, problems, name=name, split=split, origin=source.hub, revision=commit)


def _head(repository: str) -> str:
    """The newest commit of a hub data set."""
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(repository, revision=None, timeout=_TIMEOUT_S).sha)
    except Exception as error:  # noqa: BLE001  (transport errors belong to the hub client's HTTP library)
        what = f"the hub does not say which commit the head of data set {repository!r} is ({type(error).__name__})"
        raise DataError(what, remedy=f"check the network, or set {VARIABLE} to a local folder") from None
