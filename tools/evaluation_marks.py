"""Marks of the studies' prompts, by which a test finds them among the bundled prompts; no text is kept.

    python tools/evaluation_marks.py DATA

DATA is a folder with the public data sets, one folder each, under the names in `SETS`. It writes
`tests/unit/data/evaluation_marks.json.gz`. Of each set:

| field   | holds                                                                                              |
|---------|----------------------------------------------------------------------------------------------------|
| prompts | how many different normalised texts there are                                                      |
| exact   | the first six bytes of the sha256 of each of them, ascending, in base64                            |
| near    | sketches (`certification/ledger_state.py`) over all word 3-shingles of those of five words or more;    |
|         | empty for the large sets, of which exact copies are found only                                     |

The set `planted` is one invented harmless prompt, which shows that the search finds what is there.
"""

from __future__ import annotations

import argparse
import base64
import csv
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from holdfast.certification.ledger_state import Hashes, seen, sketch
from holdfast.core.hashing import sha256_text
from holdfast.data.examples import normalise
from holdfast.data.shingles import MIN_WORDS, shingle_hashes, words

MARKS = Path(__file__).resolve().parent.parent / "tests" / "unit" / "data" / "evaluation_marks.json.gz"
PLANTED = "Which seven colours of wool does the weaver of the lighthouse need for her autumn carpet?"
PREFIX = 6  # bytes: 50,000 marks and 2,000 prompts meet by chance once in a million times

Marks = dict[str, dict[str, Any]]


def _json_lines(*columns: str) -> Callable[[Path], list[str]]:
    def read(path: Path) -> list[str]:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [row[column] for row in rows for column in columns]

    return read


def _json_list(column: str) -> Callable[[Path], list[str]]:
    return lambda path: [row[column] for row in json.loads(path.read_text(encoding="utf-8"))]


def _table(*columns: int, skip: int = 1, delimiter: str = ",") -> Callable[[Path], list[str]]:
    def read(path: Path) -> list[str]:
        with path.open(encoding="utf-8", newline="") as lines:
            quotes = None if delimiter == "\t" else '"'  # in GLUE's files a quotation mark is text
            rows = list(csv.reader(lines, delimiter=delimiter, quotechar=quotes))[skip:]
        return [row[column] for row in rows for column in columns]

    return read


def _folder(path: Path) -> list[str]:
    return [text for file in sorted(path.glob("*.json")) for text in json.loads(file.read_text())["instructions"]]


SETS: dict[str, tuple[Callable[[Path], list[str]], bool]] = {
    "beavertails/30k_test.jsonl": (_json_lines("prompt"), True),
    "beavertails/evaluation_700.json": (_json_list("instruction"), True),
    "beavertails/30k_train_prompts_labels.jsonl": (_json_lines("prompt"), False),
    "beavertails/30k_train_partial.jsonl": (_json_lines("prompt"), False),
    "beavertails/harmful_with_refusals_747.json": (_json_list("prompt"), True),
    "advbench/harmful_behaviors.csv": (_table(0, 1), True),
    "advbench/harmful_strings.csv": (_table(0), True),
    "xstest/xstest_prompts.csv": (_table(1), True),
    "safety_tuned_llamas/safety_only_data_Instructions.json": (_json_list("instruction"), True),
    "safety_tuned_llamas/evaluation": (_folder, True),
    "benign/benign_prompts.jsonl": (_json_lines("prompt"), True),
    "sst2_glue/dev.tsv": (_table(0, delimiter="\t"), True),
    "gsm8k/test.jsonl": (_json_lines("question"), False),
    "ag_news/test.csv": (_table(1, 2, skip=0), False),
}
"""By path under DATA: how to read the prompts, and whether near-duplicates are to be found."""


def marked(texts: Iterable[str], *, near: bool) -> dict[str, Any]:
    """The marks of one set."""
    unique = sorted({normalise(text) for text in texts} - {""})
    exact = b"".join(sorted(bytes.fromhex(_exact(text)) for text in unique))
    long = [text for text in unique if near and len(words(text)) >= MIN_WORDS]
    return {
        "prompts": len(unique),
        "exact": base64.b64encode(exact).decode("ascii"),
        "near": sorted(sketch(_every_shingle(text)) for text in long),
    }


def found(prompts: Sequence[str], marks: Marks) -> list[tuple[int, str]]:
    """Pairs (position, set) of the prompts that are in a set, ascending.

    That is: the normalised texts are equal, or 4/5 of the word 3-shingles of one are in the other (`seen`).
    """
    texts = [normalise(prompt) for prompt in prompts]
    now = {str(i): _every_shingle(text) for i, text in enumerate(texts) if len(words(text)) >= MIN_WORDS}
    pairs: set[tuple[int, str]] = set()
    for name, held in marks.items():
        data = base64.b64decode(held["exact"])
        exact = {data[start : start + PREFIX].hex() for start in range(0, len(data), PREFIX)}
        pairs.update((i, name) for i, text in enumerate(texts) if _exact(text) in exact)
        pairs.update((int(i), name) for i in seen(now, {str(j): coded for j, coded in enumerate(held["near"])}))
    return sorted(pairs)


def load() -> Marks:
    """The committed marks."""
    marks: Marks = json.loads(gzip.decompress(MARKS.read_bytes()))
    return marks


def _exact(normalised: str) -> str:
    return sha256_text(normalised)[: 2 * PREFIX]


def _every_shingle(normalised: str) -> Hashes:
    """Of one text alone no shingle is common, so that all are kept."""
    return shingle_hashes([normalised])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    data = parser.parse_args().data
    marks = {name: marked(read(data / name), near=near) for name, (read, near) in SETS.items()}
    marks["planted"] = marked([PLANTED], near=True)
    MARKS.write_bytes(gzip.compress(json.dumps(marks, sort_keys=True).encode("ascii"), compresslevel=9, mtime=0))
    for name, held in marks.items():
        print(f"{name}: {held['prompts']} prompts, {len(held['near'])} sketches")
    print(f"{MARKS.name}: {MARKS.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
