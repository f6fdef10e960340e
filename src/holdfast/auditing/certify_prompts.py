"""The prompts of a certificate: read, each once, in clusters of near-duplicates, and not seen in training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.certification.terms import Terms, require_enough
from holdfast.core.errors import DataError, HoldfastError
from holdfast.core.hashing import sha256_file, sha256_json, sha256_lines
from holdfast.data.examples import Example, as_chat, normalise, prompt_text, searchable_texts, uniform
from holdfast.data.near_duplicates import clusters
from holdfast.data.shingles import prompt_marks
from holdfast.data.sources import prompt_key, read_examples
from holdfast.data.sources import read_prompts as prompts_alone
from holdfast.data.split_record import RECORD_NAME, load_record
from holdfast.data.splits import require_unseen
from holdfast.records.yaml_file import read_yaml

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompts:
    """What is measured, and what it came from.

    Attributes:
        examples: each once; in file order for a sequence, by id otherwise.
        cluster: per example, the position of the first of its cluster of near-duplicate prompts.
        data_sha256: of the source: a file's bytes, or these examples.
        keep: per example the class that its safety set keeps, where a run's sets are asked together.
    """

    examples: list[Example]
    cluster: list[int]
    data_sha256: str
    keep: list[str] | None = None

    @property
    def ids(self) -> list[str]:
        """Of the examples, in their order."""
        return [example.id for example in self.examples]

    @property
    def categories(self) -> list[str | None]:
        """Of the examples, in their order."""
        return [example.category for example in self.examples]

    @cached_property
    def texts(self) -> dict[str, str]:
        """By id, what the prompt is recognised by in the ledger of openings."""
        return prompt_marks(self.examples)


def units_per_category(categories: Sequence[str | None], labels: Sequence[int], drawn: str) -> dict[str, int]:
    """Groups of each category, or its prompts where these were drawn one by one."""
    by_category: dict[str, list[int]] = {}
    for category, label in zip(categories, labels, strict=True):
        by_category.setdefault(str(category), []).append(label)
    return {name: len(own if drawn == "rows" else set(own)) for name, own in sorted(by_category.items())}


def require_enough_rows(terms: Terms, labels: Sequence[int], per_category: Mapping[str, int] | None) -> None:
    """Refuse prompts, given by the labels of their groups, too few to certify even without a regression."""
    sizes = list(Counter(labels).values())
    units = len(labels) if terms.kind == "finite_pool" or terms.drawn == "rows" else len(sizes)
    require_enough(terms, units, per_category if terms.kind == "per_category" else None, sizes=sizes)


@dataclass(frozen=True)
class Leakage:
    """Whether the prompts were looked for in the training data, which that was, and how many were looked for."""

    checked: bool
    against: str | None
    prompts: int


def read_prompts(
    safety: str | Sequence[Example],
    *,
    source: str | None = None,
    reading: Mapping[str, Any] | None = None,
    template: str = "chat",
    sequential: bool = False,
    replies: bool = False,
) -> Prompts:
    """Read the prompts of a certificate.

    Args:
        safety: a file or hub data set, or examples that came from `source`, which is bound by its content.
        reading: options of `read_examples`.
        sequential: keep the order of the file.
        replies: the prompts are replied to: completions are not looked at, and the same prompt counts once.

    Raises:
        DataError: the source is missing, empty or malformed, or has a text example under a chat template.
    """
    if isinstance(safety, str):
        source, given = safety, (prompts_alone if replies else read_examples)(safety, **dict(reading or {}))
    else:
        given = list(safety)
    if not given:
        raise DataError("there are no prompts to certify on", remedy="give the certify share a fraction above 0")
    first: dict[str, Example] = {}
    for example in given:
        first.setdefault(prompt_key(example) if replies else example.id, example)
    unique = list(first.values())
    if not sequential:
        unique = sorted(unique, key=lambda example: example.id)
    labels = clusters([prompt_text(e) for e in unique])
    shaped = [as_chat(example) for example in unique] if template == "chat" else uniform(unique)
    return Prompts(shaped, labels, data_sha256(source, shaped))


def data_sha256(source: str | None, examples: Sequence[Example]) -> str:
    """sha256 of a local file's bytes; where there is no file, of the measured rows, sorted."""
    if source is not None and Path(source).expanduser().is_file():
        return sha256_file(Path(source).expanduser())
    return sha256_lines(sorted(sha256_json([e.id, e.prompt, e.completion, e.category]) for e in examples))


def require_not_steering(examples: Sequence[Example], after: str | Path) -> None:
    """Refuse prompts that steered or watched the run whose folder holds `after`; a copy elsewhere is not known.

    An id counts the completion in, so prompts are compared by their texts too, where the run's data is still there.
    """
    run = Path(after).expanduser().resolve().parent
    if not (run / "config.yaml").is_file():
        return
    for place in sorted([*run.glob(RECORD_NAME), *run.glob(f"*/{RECORD_NAME}")]):
        roles = load_record(place.parent).ids
        ids = {*roles["constraint"], *roles["monitor"]}
        texts = _texts_of(run, place.parent.name, ids)
        used = [e for e in examples if e.id in ids or normalise(prompt_text(e)) in texts]
        if used:
            raise DataError(
                f"{len(used)} of {len(examples)} prompts steered or watched the training of {after}, by {place}",
                remedy=f"holdfast certify {run} opens the share that training never saw; or use other prompts",
            )


def _texts_of(run: Path, name: str, ids: set[str]) -> set[str]:
    """Normalised prompts of a run's examples, from the data its settings name; none where it cannot be read."""
    try:
        block = read_yaml(run / "config.yaml").get("safety", {})
        block = block if isinstance(block.get("data"), str) else block.get(name, {})
        options = {key: block[key] for key in ("columns", "split", "subset", "revision") if block.get(key)}
        rows = read_examples(block["data"], **options)
    except (HoldfastError, KeyError, TypeError, AttributeError):
        logger.warning("the safety data of %s cannot be read: prompts are compared with it by id only", run)
        return set()
    return {normalise(prompt_text(example)) for example in rows if example.id in ids}


def require_no_leak(examples: Sequence[Example], train_data: Sequence[str], reading: Mapping[str, Any]) -> Leakage:
    """Look for every prompt in the training data, exactly and nearly, alone and inside longer texts."""
    if not train_data:
        return Leakage(checked=False, against=None, prompts=0)
    rows = [example for source in train_data for example in _training_rows(source, reading)]
    texts = [text for example in rows for text in searchable_texts(example)]
    try:
        require_unseen(examples, texts)
    except DataError as error:
        raise DataError(
            error.what.replace("the task data", "the training data"),
            remedy="remove these prompts from the safety file: a prompt that was trained on cannot certify",
        ) from error
    return Leakage(checked=True, against=", ".join(train_data), prompts=len(examples))


def _training_rows(source: str, reading: Mapping[str, Any]) -> list[Example]:
    try:
        return read_examples(source)
    except DataError:
        if not reading.get("columns"):
            raise
        return read_examples(source, columns=reading["columns"])
