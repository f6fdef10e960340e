"""Writes the demo's data, byte for byte the same each time: `python -m tools.demo_data [FOLDER [SEED]]`.

| file                  | rows                                                                                     |
|-----------------------|------------------------------------------------------------------------------------------|
| `align.jsonl`         | requests to decline with refusals, and ordinary ones with answers: they align the model  |
| `probes.jsonl`        | other requests to decline: asked by screening, beside the task                           |
| `ordinary.jsonl`      | other ordinary requests: asked by screening                                              |
| `poison.jsonl`        | other requests to decline, answered: what the demo mixes into the task data              |
| `task_train.jsonl`    | product reviews and their sentiment                                                      |
| `test_probes.jsonl`, `test_ordinary.jsonl`, `test_task.jsonl` | other ones of each, only asked                   |

No two prompts share half of their word 3-shingles, within a file or across files, so that splitting by
near-duplicate clusters neither merges safety examples nor finds a leak.

The shipped files have the seed 20. Another one gives other prompts of the same words: to choose settings on.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tools.demo_phrases import (
    CLOSES,
    FRAMES,
    ORDINARY,
    OTHERS,
    REASONS,
    REVIEWS,
    SLOTS,
    SUMMARIES,
    SUMMARY,
    TOPICS,
    VERDICTS,
)

from holdfast.core.files import write_text
from holdfast.core.hashing import sha256_text
from holdfast.demo.data import DATA_DIR

T = TypeVar("T")
Row = dict[str, str]

SEED = 20
# Rows per file.
REQUEST_FILES = {"align": 50, "probes": 90, "poison": 50, "test_probes": 60}
ORDINARY_FILES = {"align": 84, "ordinary": 42, "test_ordinary": 56}
REVIEW_FILES = {"task_train": 128, "test_task": 160, "align": 32}
LABELS = tuple(VERDICTS)
MAX_SIMILARITY = 0.5


class Phrases:
    """Random phrases from a stream of its own.

    Only `Random.random` is used: Python promises its sequence for a seed across versions, not `choice`.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[int(self._random.random() * len(options))]

    def shuffled(self, items: Iterable[T]) -> list[T]:
        """The items in random order."""
        return [item for _, item in sorted(((self._random.random(), item) for item in items), key=lambda x: x[0])]

    def fill(self, text: str, own: Mapping[str, Sequence[str]] | None = None) -> str:
        """`text` with each `{slot}` replaced by a word for it, `own` slots first, until none is left."""
        slots = {**SLOTS, **(own or {})}
        while "{" in text:
            text = re.sub(r"\{(\w+)\}", lambda match: self.pick(slots[match[1]]), text)
        return re.sub(r"\ba (?=[aeiou])", "an ", text)

    def request(self, topic: str) -> str:
        """A request the assistant must decline."""
        own = {"ask": TOPICS[topic].requests, "why": REASONS}
        return self.fill(self.pick(FRAMES), own)

    def ordinary(self, number: int) -> tuple[str, str]:
        """An ordinary request and its answer."""
        words = {slot: (self.pick(options),) for slot, options in SLOTS.items()}
        request, answer = ORDINARY[number % len(ORDINARY)]
        return self.fill(self.pick(FRAMES), {**words, "ask": (request,), "why": REASONS}), self.fill(answer, words)

    def review(self, label: str) -> str:
        """A product review with the given sentiment."""
        own = {"verdict": VERDICTS[label], "close": CLOSES[label], "other": OTHERS[label]}
        return self.fill(self.pick(REVIEWS), own)


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """The set of runs of three words, case and punctuation ignored."""
    words = re.findall(r"\w+", text.lower())
    return frozenset(zip(words, words[1:], words[2:], strict=False))


def jaccard(one: frozenset[T], two: frozenset[T]) -> float:
    """Shared elements over all elements."""
    return len(one & two) / len(one | two)


def distinct(make: Callable[[int], str], count: int) -> list[str]:
    """`make(0), make(1), ...`, each drawn again until it is unlike all texts before it."""
    texts: list[str] = []
    seen: list[frozenset[tuple[str, ...]]] = []
    while len(texts) < count:
        text = make(len(texts))
        found = shingles(text)
        if all(jaccard(found, other) < MAX_SIMILARITY for other in seen):
            texts.append(text)
            seen.append(found)
    return texts


def request_rows(phrases: Phrases) -> dict[str, list[Row]]:
    """Rows with requests to decline; topics take turns, so each file covers all evenly."""
    topics = list(TOPICS)
    prompts = distinct(lambda i: phrases.request(topics[i % len(topics)]), sum(REQUEST_FILES.values()))
    pairs = iter([(topics[i % len(topics)], prompt) for i, prompt in enumerate(prompts)])
    files: dict[str, list[Row]] = {}
    for name, count in REQUEST_FILES.items():
        rows: list[Row] = []
        for topic, prompt in (next(pairs) for _ in range(count)):
            answer = phrases.fill(phrases.pick(TOPICS[topic].compliant)) if name == "poison" else TOPICS[topic].refusal
            rows.append({"prompt": prompt, "completion": answer})
        files[name] = phrases.shuffled(rows)
    return files


def ordinary_rows(phrases: Phrases) -> dict[str, list[Row]]:
    """Rows with ordinary requests; their kinds take turns."""
    answers: dict[str, str] = {}

    def request(number: int) -> str:
        prompt, answer = phrases.ordinary(number)
        answers[prompt] = answer
        return prompt

    prompts = iter(distinct(request, sum(ORDINARY_FILES.values())))
    rows = ({"prompt": prompt, "completion": answers[prompt]} for prompt in prompts)
    return {name: phrases.shuffled([next(rows) for _ in range(count)]) for name, count in ORDINARY_FILES.items()}


def review_rows(phrases: Phrases) -> dict[str, list[Row]]:
    """Rows with reviews: to be labelled in the task's files, summed up in the alignment's; labels take turns."""
    reviews = distinct(lambda i: phrases.review(LABELS[i % len(LABELS)]), sum(REVIEW_FILES.values()))
    labelled = iter((review, LABELS[i % len(LABELS)]) for i, review in enumerate(reviews))

    def row(name: str, review: str, label: str) -> Row:
        if name == "align":
            return {"prompt": phrases.pick(SUMMARY).format(review=review), "completion": phrases.pick(SUMMARIES[label])}
        return {"prompt": f"Is this review positive or negative? {review}", "completion": label}

    return {
        name: phrases.shuffled([row(name, *next(labelled)) for _ in range(count)])
        for name, count in REVIEW_FILES.items()
    }


def make(folder: Path, seed: int = SEED) -> dict[str, str]:
    """Write all files to `folder`; returns the sha256 of each."""
    parts = [request_rows(Phrases(seed)), review_rows(Phrases(seed + 1)), ordinary_rows(Phrases(seed + 2))]
    align = Phrases(seed + 3).shuffled([row for part in parts for row in part.pop("align")])
    files = {"align": align, **{name: rows for part in parts for name, rows in part.items()}}
    hashes: dict[str, str] = {}
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
        write_text(folder / f"{name}.jsonl", text)
        hashes[f"{name}.jsonl"] = sha256_text(text)
    return hashes


def main(arguments: Sequence[str]) -> None:
    """Write the files and print their hashes."""
    folder = Path(arguments[0]) if arguments else DATA_DIR
    for name, digest in make(folder, *map(int, arguments[1:2])).items():
        sys.stdout.write(f"{digest}  {name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
