"""A small invented data folder with the file names, formats and columns of the real one, for tests without downloads.

Every prompt is mild. No two prompts are near-duplicates or contained in one another: two of the same verb, adjective
and noun share five of seven word 3-shingles, which is under 4/5.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

CATEGORIES = (
    "animal_abuse", "child_abuse", "controversial_topics,politics", "discrimination,stereotype,injustice",
    "drug_abuse,weapons,banned_substance", "financial_crime,property_crime,theft", "hate_speech,offensive_language",
    "misinformation_regarding_ethics,laws_and_safety", "non_violent_unethical_behavior", "privacy_violation",
    "self_harm", "sexually_explicit,adult_content", "terrorism,organized_crime",
    "violence,aiding_and_abetting,incitement",
)  # fmt: skip
TEST_PROMPTS = 40  # unsafe prompts of the test split
TEST_SAFE_ONLY = 20
EVALUATION_EACH = 2  # prompts per category
ADJECTIVES = ("red", "tall", "old", "quiet", "wooden", "heavy", "tiny", "blue", "round", "dusty", "warm", "empty")
NOUNS = ("kettle", "ladder", "pillow", "mirror", "carpet", "bottle", "candle", "basket", "hammer", "drawer", "clock")
PLACES = ("at home", "near the station", "during lunch")


def make_data_folder(path: Path, *, pairs: int = 60) -> Path:
    """Write the folder and return it.

    Train split: `pairs` safe and `pairs` unsafe pairs with prompts of their own, besides pairs // 10 prompts with both
    labels (a safe and an unsafe row each) and pairs // 10 unsafe rows whose prompts are in the test split. Test split:
    40 unsafe prompts (some twice, some also safe) and 20 safe ones. `pairs` refusals.
    """
    _beavertails(path / "beavertails", pairs)
    _refusals(path, pairs)
    _prompt_sets(path)
    _tasks(path, max(120, 2 * pairs))
    return path


def prompts(verb: str, n: int) -> list[str]:
    """n prompts that start with one verb, all far apart from one another."""
    chosen = list(product(PLACES, ADJECTIVES, NOUNS))[:n]
    assert len(chosen) == n, f"at most {len(chosen)} prompts a verb"
    return [f"How do I {verb} the {adjective} {noun} {place}?" for place, adjective, noun in chosen]


def _pair(prompt: str, *, unsafe: bool, number: int, flag_only: bool | None = None) -> dict[str, Any]:
    """A BeaverTails row; `flag_only` is None in the test split, which has no label_source column."""
    named = {CATEGORIES[number % 14], CATEGORIES[(5 * number + 3) % 14]} if unsafe else set()
    reply = (
        f"Sure: take it when nobody looks, trick {number}." if unsafe else f"Please ask the owner first, tip {number}."
    )
    row = {
        "prompt": prompt,
        "response": reply,
        "category": {name: name in named for name in CATEGORIES},
        "is_safe": not unsafe,
    }
    if flag_only is not None:
        row["label_source"] = "is_safe_flag" if flag_only else "category_dict"
    return row


def _beavertails(folder: Path, pairs: int) -> None:
    few = pairs // 10
    test = prompts("borrow", TEST_PROMPTS)
    rows = [_pair(prompt, unsafe=True, number=i) for i, prompt in enumerate(test)]
    rows += [_pair(prompt, unsafe=True, number=100 + i) for i, prompt in enumerate(test[:5])]
    rows += [_pair(prompt, unsafe=False, number=200 + i) for i, prompt in enumerate(test[:8])]
    rows += [_pair(p, unsafe=False, number=300 + i) for i, p in enumerate(prompts("polish", TEST_SAFE_ONLY))]
    _jsonl(folder / "30k_test.jsonl", rows)
    train = [_pair(p, unsafe=False, number=i, flag_only=i % 2 == 0) for i, p in enumerate(prompts("mend", pairs))]
    train += [_pair(p, unsafe=True, number=i, flag_only=False) for i, p in enumerate(prompts("snatch", pairs))]
    for i, prompt in enumerate(prompts("swap", few)):
        train += [_pair(prompt, unsafe=unsafe, number=400 + i, flag_only=False) for unsafe in (True, False)]
    train += [_pair(p, unsafe=True, number=500 + i, flag_only=False) for i, p in enumerate(test[:few])]
    _jsonl(folder / "30k_train_partial.jsonl", train)
    labels = [{"id": i, "prompt": row["prompt"], "is_safe": row["is_safe"]} for i, row in enumerate(train)]
    _jsonl(folder / "30k_train_prompts_labels.jsonl", labels)
    asked = prompts("tease", 14 * EVALUATION_EACH)
    _json(
        folder / "evaluation_700.json",
        [{"category": CATEGORIES[i % 14], "category_id": i % 14, "instruction": p} for i, p in enumerate(asked)],
    )
    harmful = [
        {"category": ", ".join(CATEGORIES[i : i + 2]), "prompt": p, "response": f"Sure, trick {i}.", "refusal": "No."}
        for i, p in enumerate(prompts("swipe", 10))
    ]
    copied = [
        {"category": CATEGORIES[0], "prompt": row["prompt"], "response": row["response"], "refusal": "No."}
        for row in rows[:2]
    ]
    _json(folder / "harmful_with_refusals_747.json", harmful + copied)


def _refusals(path: Path, pairs: int) -> None:
    rows = [
        {"instruction": prompt, "output": f"I cannot help with that, reason {i}.", "input": ""}
        for i, prompt in enumerate(prompts("grab", pairs))
    ]
    _json(path / "safety_tuned_llamas" / "safety_only_data_Instructions.json", rows)


def _prompt_sets(path: Path) -> None:
    goals = [[f"Sure, this is how to fool {i}", p] for i, p in enumerate(prompts("fool", 12))]
    _csv(path / "advbench" / "harmful_behaviors.csv", [["target", "goal"], *goals])
    asked = [
        [str(i + 1), p, "contrast_homonyms" if i % 2 else "homonyms", "unsafe" if i % 2 else "safe", "chill", "mild"]
        for i, p in enumerate(prompts("chill", 16))
    ]
    _csv(path / "xstest" / "xstest_prompts.csv", [["id", "prompt", "type", "label", "focus", "note"], *asked])


def _tasks(path: Path, n: int) -> None:
    words = {0: ("dull", "noisy"), 1: ("bright", "charming")}
    for name, count, start in (("train", n, 0), ("dev", 60, n), ("test-labeled", 20, n + 60)):
        lines = [f"{words[i % 2][i // 2 % 2]} film number {i} . \t{i % 2}" for i in range(start, start + count)]
        _text(path / "sst2_glue" / f"{name}.tsv", "\n".join(["sentence\tlabel", *lines]) + "\n")
    topics = (("World", "treaty"), ("Sports", "match"), ("Business", "merger"), ("Sci/Tech", "rocket"))
    news = [
        {"text": f"New {topics[i % 4][1]} {i} A\\{topics[i % 4][1]} was seen. ", "label": i % 4, "src": "invented",
         "label_text": topics[i % 4][0]}
        for i in range(n)
    ]  # fmt: skip
    _jsonl(path / "ag_news" / "train_partial.jsonl", news)
    rows = [[str(i % 4 + 1), f"Old {topics[i % 4][1]} {i}", f'A "{topics[i % 4][1]}"\\was seen.'] for i in range(60)]
    _csv(path / "ag_news" / "test.csv", rows, quoting=csv.QUOTE_ALL)
    _text(path / "ag_news" / "classes.txt", "".join(f"{name}\n" for name, _ in topics))
    for name, count, start in (("train", n, 0), ("test", 60, n)):
        sums = [
            {"question": f"Ann has {i} pears and gets {i % 7}. How many now?",
             "answer": f"{i}+{i % 7}=<<{i}+{i % 7}={i + i % 7}>>{i + i % 7} pears.\n#### {i + i % 7}"}
            for i in range(start, start + count)
        ]  # fmt: skip
        _jsonl(path / "gsm8k" / f"{name}.jsonl", sums)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _json(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    _text(path, json.dumps(rows, indent=1))


def _jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    _text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _csv(path: Path, rows: Iterable[Sequence[str]], *, quoting: int = csv.QUOTE_MINIMAL) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as handle:
        csv.writer(handle, quoting=quoting).writerows(rows)
