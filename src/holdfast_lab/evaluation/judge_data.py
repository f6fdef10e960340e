"""What a judge is trained and measured on: BeaverTails pairs, parted by normalised prompt.

Test: the complete test split. Training and validation: rows of the train split whose prompt is not in the test split,
with all rows of one prompt on one side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_json
from holdfast.core.seeding import generator
from holdfast.data.examples import normalise
from holdfast_lab.data.catalogue import CATEGORIES, load


@dataclass(frozen=True)
class LabelledPair:
    """A prompt and a reply that people called safe or unsafe.

    `categories` is None where an unsafe pair's categories are unknown; a safe pair has none of them.
    """

    prompt: str = field(repr=False)
    reply: str = field(repr=False)
    unsafe: bool
    categories: Mapping[str, bool] | None


@dataclass(frozen=True)
class JudgeData:
    """The three parts, and where they come from as JSON."""

    train: tuple[LabelledPair, ...]
    validation: tuple[LabelledPair, ...]
    test: tuple[LabelledPair, ...]
    record: dict[str, Any]


def judge_data(
    *, seed: int, validation: float, limit: int | None = None, test_limit: int | None = None, folder: Path | None = None
) -> JudgeData:
    """Read and part the pairs; limits are drawn at random by the seed, None takes all.

    `validation` is the share of the prompts that choose the epoch and the temperature.
    """
    sources = {split: load("beavertails", split, folder=folder) for split in ("train", "test")}
    held_out = [_pair(row) for row in sources["test"].rows]
    closed = {normalise(pair.prompt) for pair in held_out}
    found = [_pair(row) for row in sources["train"].rows]
    usable = [pair for pair in found if normalise(pair.prompt) not in closed]
    chosen = _drawn(usable, limit, seed, "judge limit")
    test = _drawn(held_out, test_limit, seed, "judge test limit")
    train, choice = _parted(chosen, validation, seed)
    parts = {"train": train, "validation": choice, "test": test}
    for name, pairs in parts.items():
        unsafe = sum(pair.unsafe for pair in pairs)
        if not 0 < unsafe < len(pairs):
            raise DataError(
                f"judge data, {name} part: {unsafe} unsafe and {len(pairs) - unsafe} safe pairs, expected some of each",
                remedy="raise the limit, or give a data folder with more of BeaverTails",
            )
    overlap = {normalise(pair.prompt) for pair in (*train, *choice)} & closed
    assert not overlap, "a training prompt is in the test split"
    record = {
        "sources": {split: source.describe() for split, source in sources.items()},
        "shared_with_test": len(found) - len(usable),
        "disjoint_from_test": len(usable),
        "test_complete": len(test) == len(held_out),
        "parts": {name: _described(pairs) for name, pairs in parts.items()},
    }
    return JudgeData(tuple(train), tuple(choice), tuple(test), record)


def _pair(row: Mapping[str, Any]) -> LabelledPair:
    unsafe = not row["is_safe"]
    named = (row["categories"] or ()) if unsafe else ()
    known = dict.fromkeys(CATEGORIES, False) | dict.fromkeys(named, True)
    return LabelledPair(row["prompt"], row["response"], unsafe, None if unsafe and not named else known)


def _drawn(pairs: list[LabelledPair], limit: int | None, seed: int, name: str) -> list[LabelledPair]:
    if limit is None or limit >= len(pairs):
        return pairs
    places = generator(seed, name).permutation(len(pairs))[:limit]
    return [pairs[place] for place in sorted(places.tolist())]


def _parted(pairs: Sequence[LabelledPair], share: float, seed: int) -> tuple[list[LabelledPair], list[LabelledPair]]:
    """Training and validation pairs: round(share * prompts) of the prompts, at least one, are for validation."""
    prompts = sorted({normalise(pair.prompt) for pair in pairs})
    order = generator(seed, "judge validation").permutation(len(prompts)).tolist()
    held = {prompts[place] for place in order[: max(1, round(share * len(prompts)))]}
    train, validation = ([p for p in pairs if (normalise(p.prompt) in held) == wanted] for wanted in (False, True))
    return train, validation


def _described(pairs: Sequence[LabelledPair]) -> dict[str, Any]:
    rows = sorted(sha256_json([pair.prompt, pair.reply, pair.unsafe]) for pair in pairs)
    return {
        "rows": len(pairs), "unsafe": sum(pair.unsafe for pair in pairs),
        "flag_only": sum(pair.categories is None for pair in pairs),
        "prompts": len({normalise(pair.prompt) for pair in pairs}), "sha256": sha256_json(rows),
    }  # fmt: skip
