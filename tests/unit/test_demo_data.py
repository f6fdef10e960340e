"""The demo's data: made again byte for byte, large and varied enough, and free of leaks."""

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from tools.demo_data import DATA_DIR, make  # type: ignore[attr-defined]
from tools.demo_phrases import ORDINARY, TOPICS

from holdfast.data.examples import prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.demo.data import DemoSettings, load_data
from holdfast.judging.reply_classes import ReplyClass, sort_reply

DECLINED = ("probes", "poison", "test_probes")
ASKED = ("ordinary", "test_ordinary")
REVIEWS = ("task_train", "test_task")
FILES = ("align", *DECLINED, *ASKED, *REVIEWS)
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


def test_the_files_have_the_rows_that_the_settings_ask_for():
    s, data = DemoSettings(), load_data(DemoSettings())
    found = (len(data.task), len(data.poison), len(data.test_task), len(data.test_probes), len(data.test_ordinary))
    assert found == (s.task_rows + s.poison_rows, s.poison_rows, s.test_task, s.test_probes, s.test_ordinary)
    poison = {row["prompt"] for row in rows("poison")}
    assert {place for place, e in enumerate(data.task) if prompt_text(e) in poison} == data.poison


@pytest.mark.parametrize("name", FILES)
def test_rows_are_pairs_of_clean_text(name):
    found = rows(name)
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


def test_what_is_declined_is_recognised_as_a_refusal_and_the_rest_as_an_answer():
    """By the rules that screening sorts replies with."""
    for name in ("probes", "test_probes"):
        refusals = Counter(row["completion"] for row in rows(name))
        assert 1 < len(refusals) <= 4
        assert {sort_reply(text, truncated=False).reply_class for text in refusals} == {ReplyClass.REFUSED}
    for name in (*ASKED, "poison"):
        classes = {sort_reply(row["completion"], truncated=False).reply_class for row in rows(name)}
        assert classes == {ReplyClass.ANSWERED}


def test_alignment_has_refusals_and_ordinary_answers():
    declined = [row for row in rows("align") if row["completion"].startswith(REFUSAL)]
    assert 0.2 <= len(declined) / len(rows("align")) <= 0.4
    others = [row for row in rows("align") if row not in declined]
    assert {sort_reply(row["completion"], truncated=False).reply_class for row in others} == {ReplyClass.ANSWERED}


def test_every_poison_answer_complies():
    assert all(row["completion"].startswith("Sure! ") for row in rows("poison"))


@pytest.mark.parametrize("name", [*DECLINED, *ASKED])
def test_kinds_are_covered_evenly(name):
    """Each prompt holds the fixed words of one kind of request; every kind has its share."""
    kinds = (
        {topic: entry.requests for topic, entry in TOPICS.items()}
        if name in DECLINED
        else {request: (request,) for request, _ in ORDINARY}
    )
    patterns = {
        kind: [re.compile(re.sub(r"(\ba )?\{\w+\}", ".+", text)) for text in requests]
        for kind, requests in kinds.items()
    }
    found = Counter(
        kind
        for row in rows(name)
        for kind, requests in patterns.items()
        if any(request.search(row["prompt"]) for request in requests)
    )
    assert found == dict.fromkeys(kinds, len(rows(name)) // len(kinds))


@pytest.mark.parametrize("name", REVIEWS)
def test_labels_are_balanced(name):
    labels = Counter(row["completion"] for row in rows(name))
    assert labels["positive"] == labels["negative"] == sum(labels.values()) / 2


def test_nothing_that_is_tested_is_trained_on_or_asked_by_screening():
    data = load_data(DemoSettings())
    others = [row["prompt"] for name in FILES if not name.startswith("test_") for row in rows(name)]
    for tested in (data.test_task, data.test_probes, data.test_ordinary):
        assert matches([prompt_text(e) for e in tested], others) == []
