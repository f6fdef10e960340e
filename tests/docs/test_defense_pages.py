"""The pages of the defenses are what their classes and docstrings say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tools import defense_pages as _pages

from holdfast.training.hooks import DEFENSES
from holdfast_lab.defenses.booster import Booster

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", list(DEFENSES))
def test_the_page_is_what_the_code_says(name):
    assert (DOCS / "defenses" / f"{name}.md").read_text(encoding="utf-8") == _pages.render(DEFENSES[name]), "make pages"


def test_so_is_the_list():
    assert (DOCS / "defenses.md").read_text(encoding="utf-8") == _pages.render_index(), "make pages"


def test_no_page_is_left_of_a_defense_that_is_gone():
    assert sorted(page.stem for page in (DOCS / "defenses").glob("*.md")) == list(DEFENSES)


def test_writing_removes_old_pages(tmp_path):
    (tmp_path / "defenses").mkdir()
    (tmp_path / "defenses" / "gone.md").write_text("old")
    _pages.write(tmp_path)
    assert {page.name for page in tmp_path.rglob("*.md")} == {"defenses.md", *(f"{name}.md" for name in DEFENSES)}
    assert (tmp_path / "defenses" / "sft.md").read_text() == _pages.render(DEFENSES["sft"])


@pytest.mark.parametrize("name", list(DEFENSES))
def test_every_option_is_explained(name):
    page, cls = " ".join(_pages.render(DEFENSES[name]).split()), DEFENSES[name]
    for field in dataclasses.fields(cls.Config):
        (item,) = re.findall(rf" \* `{field.name}` \((.*?)\): (.*?)(?= \* `|$)", page)
        stated, meaning = item
        assert len(meaning.split()) > 1, f"{name}: {field.name} is missing from the Attributes of its Config"
        assert (field.name in cls.paper) == ("; the paper: " in stated)
        if field.name in cls.paper:
            assert _pages._value(cls.paper[field.name]) in stated


def test_a_page_has_facts_options_and_the_docstring():
    page = _pages.render(Booster)
    assert "| passes per step | 3 forward + backward |" in page
    assert "| side data | harmful pairs |" in page
    assert "\n* `lam` (`5.0`; the paper: `5.0`): lambda, weight of what that step gains" in page
    assert "\n* `harmful_batch_size` (`null`): harmful pairs per step" in page
    assert "\n    min_theta  L_safe(theta) + lambda [" in page
    assert "\n\n* theta is copied and put back" in page
    assert "end the run.\n\nThe authors go on" in page


def test_no_text_becomes_a_tag_and_no_bar_a_column():
    assert _pages._markdown("a <g, h> b `<x>`\n\n    <code>") == "a &lt;g, h> b `<x>`\n\n    <code>"
    assert _pages._cell("|g| of `a|b`") == "\\|g\\| of `a\\|b`"
