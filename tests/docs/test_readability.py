"""Every page can be read: no long line in its source, no long sentence in the README and the guides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tools.markdown_width import LIMIT, fit

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "examples", "src", "tests", ".github")
PAGES = [
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md")))
]
LONGEST = 40
"""Words in a sentence."""
GUIDES = (
    "README.md", "CONTRIBUTING.md", "docs/getting-started.md", "docs/gate.md", "docs/own-loop.md", "docs/compare.md",
    "docs/screening.md", "docs/evidence.md", "docs/idea.md", "docs/adding.md", "docs/glossary.md",
    "docs/several-gpus.md", "docs/run-file.md", "docs/guides/customer-data.md",
    "docs/guides/over-refusal.md", "docs/guides/tracking.md", "docs/guarantees.md", "docs/results-auto.md",
    "docs/preference.md", "docs/scale.md", "docs/axolotl.md", "docs/unsloth.md", "examples/README.md",
)  # fmt: skip


def sentences(text: str) -> list[str]:
    """Sentences of the prose: a paragraph or list item ends one, a code span or link is read as its words."""
    text = re.sub(r"^```.*?^```", "\n", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", text, flags=re.S)
    text = re.sub(r"^(\||#|    ).*$", "\n", text, flags=re.M)
    text = re.sub(r"^\s*([-*+]|\d+\.) ", "\n\n", text, flags=re.M)
    text = re.sub(r"`[^`]+`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        found += re.split(r"(?<=[.!?])[\"')*]*\s+(?=\S)", " ".join(paragraph.split()))
    return [sentence for sentence in found if sentence]


def words(sentence: str) -> int:
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def long_lines(text: str) -> list[str]:
    return [f"{n}: {len(line)} characters" for n, line in enumerate(text.splitlines(), 1) if len(line) > LIMIT]


@pytest.mark.parametrize("name", PAGES)
def test_no_line_is_longer_than_the_limit(name):
    found = long_lines((ROOT / name).read_text(encoding="utf-8"))
    assert found == [], f"python -m tools.markdown_width {name}"


@pytest.mark.parametrize("name", [name for name in GUIDES if (ROOT / name).exists()])
def test_no_sentence_of_a_guide_is_longer_than_forty_words(name):
    found = sentences((ROOT / name).read_text(encoding="utf-8"))
    assert found
    assert [sentence for sentence in found if words(sentence) > LONGEST] == []


def test_every_page_under_guides_is_checked():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (guides,) = (entry["Guides"] for entry in site["nav"] if "Guides" in entry)
    pages = {f"docs/{page}" for entry in guides for page in entry.values()} - {"docs/examples.md"}
    assert pages <= set(GUIDES)


def test_the_readme_takes_five_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    evidence = text.partition("<!-- evidence -->")[2].partition("<!-- end -->")[0]
    assert 1 <= evidence.strip().count("\n") - 1 <= 5  # rows under the heading


def test_the_checks_can_fail():
    assert long_lines("a" * 201) == ["1: 201 characters"]
    assert [words(s) for s in sentences("One two. Three `a b` four.\n\n* five\n  six\n* seven")] == [2, 3, 2, 1]
    assert words(sentences("word " * 41 + ".")[0]) == 41


def test_wrapping_keeps_the_words_and_makes_no_markup():
    text = "* " + "word " * 30 + "- not a list\n\n```\n" + "x" * 150 + "\n```\n"
    fitted = fit(text)
    assert fitted.split() == text.split()
    assert max(len(line) for line in fitted.splitlines() if "x" not in line) <= 120
    assert not any(line.lstrip().startswith("- ") for line in fitted.splitlines())
    assert fit(fitted) == fitted


def test_a_wide_table_becomes_several_with_the_same_first_column():
    row = "| name |" + " 0.123 [0.1, 0.2] |" * 12
    tables = fit("\n".join([row, "|" + "---|" * 13, row])).split("\n\n")
    assert len(tables) > 1
    assert all(table.startswith("| name |") for table in tables)
    assert sum(table.splitlines()[0].count("0.123") for table in tables) == 12
    assert max(len(line) for table in tables for line in table.splitlines()) <= LIMIT
