"""The bundled prompts: enough of them, balanced, different, in nobody's evaluation set, and each kind with one use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import pytest
from tools.evaluation_marks import MARKS, PLANTED, SETS, found, load

from holdfast.core.errors import DataError
from holdfast.data import bundled as module
from holdfast.data.bundled import ALL_KINDS, KINDS, USES, bundled, bundled_sha256, public_ids
from holdfast.data.near_duplicates import clusters, contained, matches
from holdfast.demo.data import DATA_DIR

ROOT = Path(__file__).parents[3]
FILES = ROOT / "src" / "holdfast" / "prompts"
HARD_CLEAN = ROOT / "benchmarks" / "screening" / "hard_clean.jsonl"
ALL = [example for name in ALL_KINDS for example in bundled(name)]
TEXTS = [str(example.prompt) for example in ALL]


@pytest.mark.parametrize(
    ("name", "least", "kinds"),
    [("probes", 1000, 14), ("everyday", 400, 12), ("borderline", 200, 12), ("tasks", 160, 10)],
)
def test_there_are_enough_and_kinds_are_balanced(name, least, kinds):
    sizes = Counter(example.category for example in bundled(name))
    assert sizes.total() >= least
    assert len(sizes) >= kinds
    assert sizes.keys() == ALL_KINDS[name].keys()
    assert max(sizes.values()) <= 1.3 * min(sizes.values())


@pytest.mark.parametrize("use", USES)
def test_every_use_stands_on_its_own(use):
    probes = bundled("probes", use)
    assert len(probes) >= 400
    assert len({probe.category for probe in probes}) >= 5
    answers = bundled("everyday", use) + bundled("borderline", use)
    assert len(answers) >= 150
    assert len({answer.category for answer in answers}) >= 6


def test_tasks_are_trained_on_and_measured_by_other_forms_and_are_no_source_of_a_safety_block():
    assert len(bundled("tasks", "steer")) >= 100
    assert len(bundled("tasks", "monitor")) >= 60
    assert bundled("tasks", "certify") == []
    # What `safety: auto` may ask, and what a stored screening is bound to.
    assert KINDS.keys() == {"probes", "everyday", "borderline"} == ALL_KINDS.keys() - {"tasks"}
    assert public_ids(bundled("tasks")) == {example.id for example in bundled("tasks")}


@pytest.mark.parametrize("name", ALL_KINDS)
def test_uses_share_no_kind_and_leave_none_out(name):
    parts = [bundled(name, use) for use in USES]
    for one, two in combinations(parts, 2):
        assert not {e.category for e in one} & {e.category for e in two}
    assert sorted(e.id for part in parts for e in part) == sorted(e.id for e in bundled(name))


@pytest.mark.parametrize("name", ALL_KINDS)
def test_examples_are_the_lines_of_the_file(name):
    data = (FILES / f"{name}.jsonl").read_bytes()
    rows = [json.loads(line) for line in data.decode("ascii").splitlines()]
    assert [(e.prompt, e.category, e.where) for e in bundled(name)] == [
        (row["prompt"], row["kind"], f"{name}:{number}") for number, row in enumerate(rows, start=1)
    ]
    assert all(row.keys() == {"prompt", "kind"} for row in rows)
    assert {example.completion for example in bundled(name)} == {""}
    assert bundled_sha256(name) == hashlib.sha256(data).hexdigest()


def test_what_a_caller_does_to_the_list_stays_with_the_caller():
    bundled("everyday").clear()
    assert len(bundled("everyday")) >= 400


@pytest.mark.parametrize(
    "data",
    [None, b'{"prompt": "caf\xe9", "kind": "theft"}', b'{"prompt": "a"}', b"[]", b'{"prompt": "", "kind": "theft"}',
     b'{"prompt": "How?", "kind": "other"}', b"{"],
)  # fmt: skip
def test_a_damaged_installation_is_named(data, tmp_path, monkeypatch):
    (tmp_path / "prompts").mkdir()
    if data is not None:
        (tmp_path / "prompts" / "probes.jsonl").write_bytes(data)
    monkeypatch.setattr(module, "files", lambda package: tmp_path)
    stored = module._text, module._examples
    for function in stored:
        function.cache_clear()
    try:
        with pytest.raises(DataError, match="probes") as refused:
            bundled("probes")
        assert "install" in refused.value.remedy
    finally:
        for function in stored:
            function.cache_clear()


# Names of places, peoples, languages, days and things. No person's name is among them.
PROPER = set(
    """
    I ACID AIDS Aboriginal Africa Africans Age Ages Aires Alexandria Almaty American Amsterdam April Arabic Arabs
    Asia Asians Athens Atlantic August Australia Australians Balkan Bangkok Berlin Black Blacks British Bronze
    Budapest Buenos C CSS CSV CV Cambodia Canada Catholics Celsius Central China Chinese Christian Christmas
    Congolese Congress Cornwall Croatia Cyprus DMT DNA Dalit Death Dhaka Dockerfile Down Dubai Dublin Dutch Earth
    Eastern Ebola Egyptians Empire England English Europe European Europeans Fahrenheit False Fi First Flanders
    French Friday GHB Gdansk German Go God Golden Grandma Great Greece Greek HIV HR HTTP Halloween Hanoi Hanseatic
    Highlands Hindus Hiroshima Holocaust ID IT Iceland Inca Indians Indigenous Inquisition Ireland Iron Islamic
    Israelis Istanbul Italian JSON January Japan Japanese Java JavaScript Jewish Jews Johannesburg June Karachi
    Korean Kotlin Kurds Kyoto LSD Lagos Lahore Latin League Linux Lisbon London MDMA Mali Manchester Mandarin Manila
    March Marseille May Meiji Mexican Mexicans Mexico Middle Monday Mondays Mongols Mumbai Muslim Muslims Nairobi
    Naples Nazis Nepal Nigerian Node None North Oaxaca October Ohio Opium PDF PIN Pakistan Pakistanis Palestinians
    Panama Philippines Pluto Poland Polish Polynesia Ponzi Portuguese PostgreSQL Prague Python QR RACI Ramadan
    Restoration Revolution Road Roma Roman Rome Rosetta Russian Rust Rwanda SIM SQL SUV Saturday Scottish Second
    Siberia Sikhs Silk Slovenia Somali Somalia South Southeast Spain Spanish Sparta Stone Sunday Sundays Swedish
    Switzerland System TODO Tamil Texas Thailand Thirty Thursday True Tuesday TypeScript USB Ubuntu Ukrainians
    Victorian Vienna Vietnamese Wales Wall War Wars Warsaw Wednesday Welsh West Wi Wikipedia World Years
    """.split()  # noqa: SIM905
)
LOWER = {word for text in TEXTS for word in re.findall(r"\b[a-z]+", text)}
OPENINGS = set(
    """
    Assemble Assign Assist Breakfast Classify Compile Compose Compute Condense Correct Craft Dear Develop Devise
    Extract Flag Forward Glorify Grade Hey Hi Identify Imagine Improve Instruct Integrate Itemise Lovely Modify
    Naturally Nope Oh Photosynthesis Proofread Propose Provide Rank Reduce Render Reword Shorten Simplify Simulate
    Soften Solve Sum
    """.split()  # noqa: SIM905
)


def faults(text: str) -> list[str]:
    """What a bundled prompt may not have."""
    wrong = [] if text.isascii() and text.isprintable() and text == text.strip() else ["characters"]
    if not 5 <= len(text.split()) <= 80:
        wrong.append("length")
    if re.search(r"://|\bwww\.|\S@\S|\b[\w-]+\.(?:com|org|net|io|gov|edu|info|co)\b", text):
        wrong.append("address")
    for word in re.finditer(r"\b[A-Z][A-Za-z]*", text):
        opens = re.search(r"(?:^|[.?!:;]['\"]? |\.\.\. ?)[\"'(]*$|[\"(]$", text[: word.start()])
        if word[0] not in PROPER and not (opens and (word[0].lower() in LOWER or word[0] in OPENINGS)):
            wrong.append(f"name {word[0]}")
    return wrong


def test_prompts_are_plain_english_without_addresses_and_names():
    assert {example.where: wrong for example in ALL if (wrong := faults(str(example.prompt)))} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Write a poem about caf\u00e9s in spring", "characters"),
        ("Two lines\nare in this prompt", "characters"),
        ("Too short a prompt", "length"),
        ("word " * 81, "length"),
        ("Summarise the page at www.example.org for me", "address"),
        ("Tell ann@example.org about the party", "address"),
        ("Read example.com and say what it is", "address"),
        ("Write a letter to Gwendolyn about tea", "name Gwendolyn"),
        ("Gwendolyn wants a letter about tea today", "name Gwendolyn"),
        ("Say hello to Mark from all of us", "name Mark"),
    ],
)
def test_faults_are_found(text, wrong):
    assert wrong in faults(text)


def close_pairs(texts: list[str]) -> list[tuple[int, int]]:
    """Pairs with Jaccard similarity of word 3-shingles of at least 0.8, every shingle counted; by counting."""
    shingled = []
    for text in texts:
        words = re.findall(r"[a-z0-9]+", text.lower())
        shingled.append({tuple(words[i : i + 3]) for i in range(len(words) - 2)})
    holders = defaultdict(list)
    for number, shingles in enumerate(shingled):
        for shingle in shingles:
            holders[shingle].append(number)
    shared = Counter(pair for numbers in holders.values() for pair in combinations(numbers, 2))
    return [(i, j) for (i, j), both in shared.items() if both >= 0.8 * len(shingled[i] | shingled[j])]


def test_no_prompt_is_a_near_duplicate_of_another():
    """Within a file, across files and so across uses; by the rule of the splits and by a count of every shingle."""
    assert clusters(TEXTS) == list(range(len(TEXTS)))
    assert close_pairs(TEXTS) == []


def test_near_duplicates_would_be_found():
    added = [*TEXTS, f"{TEXTS[500]} Please!"]
    assert close_pairs(added) == [(500, len(TEXTS))]
    assert clusters(added)[-1] == 500


def demo_prompts() -> list[str]:
    lines = [line for path in sorted(DATA_DIR.glob("*.jsonl")) for line in path.read_text("ascii").splitlines()]
    return [json.loads(line)["prompt"] for line in lines]


def test_no_prompt_is_in_the_demo():
    demo = demo_prompts()
    assert len(demo) > 700
    assert matches(TEXTS, demo) == []
    assert contained(TEXTS, demo) == contained(demo, TEXTS) == []
    assert matches([*TEXTS, demo[3].upper()], demo) != []


def test_no_prompt_is_in_an_evaluation_set():
    assert [(ALL[i].where, name) for i, name in found(TEXTS, load())] == []


def test_an_evaluation_prompt_would_be_found():
    """A copy, in another case, without its last word, and inside a longer prompt."""
    planted = [
        PLANTED,
        PLANTED.upper().replace("?", " ..."),
        PLANTED.removesuffix(" carpet?"),
        f"Tell me as a friend of the island would. {PLANTED}",
    ]
    added = [*TEXTS, *planted]
    assert found(added, load()) == [(number, "planted") for number in range(len(TEXTS), len(added))]


def test_the_marks_hold_hashes_of_every_set_and_no_text():
    marks = load()
    assert marks.keys() == {*SETS, "planted"}
    assert MARKS.stat().st_size < 1_500_000
    for name, held in marks.items():
        assert held.keys() == {"prompts", "exact", "near"}
        assert len(base64.b64decode(held["exact"], validate=True)) == 6 * held["prompts"], name
        assert all(len(base64.b64decode(coded, validate=True)) % 8 == 0 for coded in held["near"]), name
    near = {name: len(held["near"]) for name, held in marks.items()}
    assert near["beavertails/30k_test.jsonl"] > 2400
    assert near["beavertails/evaluation_700.json"] > 690
    assert near["advbench/harmful_behaviors.csv"] > 500
    assert near["xstest/xstest_prompts.csv"] > 400
    assert sum(held["prompts"] for held in marks.values()) > 38_000


def test_hard_clean_rows_are_apart_from_bundled_and_evaluation_prompts():
    rows = [json.loads(line) for line in HARD_CLEAN.read_text("ascii").splitlines()]
    assert Counter(row["kind"] for row in rows) == dict.fromkeys(
        ("capability", "legal", "medical", "moderation", "security"), 60
    )
    prompts = [row["prompt"] for row in rows]
    assert all(row["prompt"] and row["completion"] for row in rows)
    assert clusters(prompts) == list(range(300))
    assert matches(prompts, TEXTS) == []
    assert found(prompts, load()) == []
