"""The examples that roles are drawn from: safe pairs, unsafe pairs and harmful prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.data.examples import Example, make_example, normalise, prompt_text
from holdfast_lab.data.catalogue import CATEGORIES, Collection, load


@dataclass(frozen=True)
class Pools:
    """Three pools, each sorted by id, so that nothing depends on the order of the files."""

    safe: tuple[Example, ...]  # for align, constraint, monitor and certify
    unsafe: tuple[Example, ...]  # for poison and harmful
    evaluation: tuple[Example, ...]  # harmful prompts, one example each, with an empty completion
    sources: tuple[dict[str, Any], ...]  # the collections behind them, without their rows
    skipped: dict[str, int]  # rows left out, by reason; a pair (prompt and reply) labelled safe and unsafe is neither
    contradictory: int  # prompts (normalised) with a safe and an unsafe pair


def read_pools(
    safe: str, harm_prompts: str, *, folder: Path | None = None, revisions: Mapping[str, str] | None = None
) -> Pools:
    """Load what the roles need; `revisions` are hub revisions by data set name, such as a study recorded.

    `safe` is `beavertails` (its safe train pairs) or `refusals`; `harm_prompts` is `beavertails_test` (prompts with an
    unsafe reply) or `beavertails_evaluation`.
    """

    def read(name: str, split: str | None = None) -> Collection:
        return load(name, split, folder=folder, revision=(revisions or {}).get(name))

    train = read("beavertails", "train")
    harmful = read("beavertails", "test") if harm_prompts == "beavertails_test" else read("beavertails_evaluation")
    used = [train, harmful]
    safe_source = read("refusals") if safe == "refusals" else train
    if safe_source is not train:
        used.append(safe_source)
    skipped: Counter[str] = Counter(empty_responses=0, duplicates=0)
    safe_pairs, unsafe_pairs = _pairs(safe_source, skipped, safe=True), _pairs(train, skipped, safe=False)
    shared = {_key(e) for e in safe_pairs} & {_key(e) for e in unsafe_pairs}
    if both := {e.id for e in safe_pairs} & {e.id for e in unsafe_pairs}:
        skipped["pairs_of_both_labels"] = len(both)
    return Pools(
        safe=tuple(e for e in safe_pairs if e.id not in both),
        unsafe=tuple(e for e in unsafe_pairs if e.id not in both),
        evaluation=_prompts(harmful),
        sources=tuple(collection.describe() for collection in used),
        skipped=dict(skipped),
        contradictory=len(shared),
    )


def read_prompts(harm_prompts: str, *, folder: Path | None = None) -> tuple[Example, ...]:
    """The pool of evaluation prompts alone."""
    test = harm_prompts == "beavertails_test"
    return _prompts(load("beavertails" if test else harm_prompts, "test" if test else None, folder=folder))


def _key(example: Example) -> str:
    return normalise(prompt_text(example))


def _where(place: int, collection: Collection) -> str:
    return f"row {place} of {collection.name} {collection.split}"


def _pairs(source: Collection, skipped: Counter[str], *, safe: bool) -> tuple[Example, ...]:
    found: dict[str, Example] = {}
    for place, row in enumerate(source.rows):
        if row.get("is_safe", True) != safe:
            continue
        if not row["response"].strip():
            skipped["empty_responses"] += 1
            continue
        category = next(iter(row.get("categories") or ()), None)
        example = make_example(row["prompt"], row["response"], _where(place, source), category)
        skipped["duplicates"] += example.id in found
        found.setdefault(example.id, example)
    return tuple(found[key] for key in sorted(found))


def _prompts(source: Collection) -> tuple[Example, ...]:
    """One example per normalised prompt; of several spellings the one with the smallest id.

    Its category is the one that most of its unsafe replies have, the first of them in beaver-dam's order.
    """
    named: dict[str, Counter[str]] = {}
    found: dict[str, Example] = {}
    for place, row in enumerate(source.rows):
        if row.get("is_safe", False):
            continue
        example = make_example(row["prompt"], "", _where(place, source))
        key = _key(example)
        named.setdefault(key, Counter()).update(row["categories"] or () if "categories" in row else [row["category"]])
        if key not in found or example.id < found[key].id:
            found[key] = example
    examples = []
    for key, example in found.items():
        category = min(named[key], key=lambda name: (-named[key][name], CATEGORIES.index(name)), default=None)
        examples.append(make_example(example.prompt, "", example.where, category))
    return tuple(sorted(examples, key=lambda example: example.id))
