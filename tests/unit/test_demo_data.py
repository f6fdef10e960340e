"""The demo's data: made again byte for byte, large and varied enough to be split, and free of leaks."""

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from holdfast.data.examples import searchable_texts
from holdfast.data.splits import require_unseen
from holdfast.demo.make_data import DATA_DIR, make
from holdfast.demo.phrases import TOPICS
from holdfast.demo.settings import DemoSettings
from holdfast.demo.story import load_data

FILES = ("align", "safety", "poison", "task_train", "task_test")
REFUSAL = "Sorry, I can't help with that."


def rows(name: str) -> list[dict[str, str]]:
    lines = (DATA_DIR / f"{name}.jsonl").read_text(encoding="ascii").splitlines()
    return [json.loads(line) for line in lines]


def test_files_are_what_make_data_writes(tmp_path: Path):
    make(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in DATA_DIR.iterdir()}
    assert written.keys() == shipped.keys() == {f"{name}.jsonl" for name in FILES}
    assert [name for name in written if written[name] != shipped[name]] == []


@pytest.mark.parametrize(
    ("name", "least"),
    [("align", 100), ("safety", 320), ("poison", 64), ("task_train", 128), ("task_test", 220)],
)
def test_rows(name, least):
    found = rows(name)
    assert len(found) >= least
    assert all(row.keys() == {"prompt", "completion"} for row in found)
    assert all(text and text == text.strip() and "{" not in text for row in found for text in row.values())


def test_no_prompt_is_a_near_duplicate_of_another():
    """Brute force over all pairs: Jaccard similarity of word 3-shingles under 0.8, in and across files."""
    shingled = []
    for name in FILES:
        for i, row in enumerate(rows(name)):
            words = re.findall(r"[a-z0-9']+", row["prompt"].lower())
            shingled.append((name, i, {tuple(words[j : j + 3]) for j in range(len(words) - 2)}))
    close = [
        (one[:2], two[:2])
        for one, two in combinations(shingled, 2)
        if len(one[2] & two[2]) >= 0.8 * len(one[2] | two[2])
    ]
    assert close == []


def test_every_safety_answer_is_one_of_a_few_short_refusals():
    refusals = Counter(row["completion"] for name in ("align", "safety") for row in rows(name))
    assert 1 < len(refusals) <= 4
    assert all(text.startswith(REFUSAL) and len(text.split()) <= 12 for text in refusals)


def test_every_poison_answer_complies():
    assert all(row["completion"].startswith("Sure! ") for row in rows("poison"))


@pytest.mark.parametrize("name", ["align", "safety", "poison"])
def test_topics_are_covered_evenly(name):
    """Each prompt holds the fixed words of one topic's request; every topic has its share."""
    patterns = {
        topic: [re.compile(re.sub(r"(\ba )?\{\w+\}", ".+", text)) for text in entry.requests]
        for topic, entry in TOPICS.items()
    }
    found = Counter(
        topic
        for row in rows(name)
        for topic, requests in patterns.items()
        if any(request.search(row["prompt"]) for request in requests)
    )
    assert found == dict.fromkeys(TOPICS, len(rows(name)) // len(TOPICS))


@pytest.mark.parametrize("name", ["task_train", "task_test"])
def test_labels_are_balanced(name):
    labels = Counter(row["completion"] for row in rows(name))
    assert labels["positive"] == labels["negative"] == sum(labels.values()) / 2


def test_the_demo_trains_on_no_closed_prompt():
    """The trainer refuses closed prompts that the task data holds, exactly or nearly."""
    data = load_data(DemoSettings())
    asked = [text for example in data.task for text in searchable_texts(example)]
    assert len(data.safety.certify) > 100
    assert (len(data.safety.constraint), len(data.safety.monitor)) == (120, 100)
    require_unseen(data.safety.certify, asked)
