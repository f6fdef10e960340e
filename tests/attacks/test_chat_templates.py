"""B5: chat templates are programs that come with a model; none of them hangs, prints escapes or repeats the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.data.encode import encode
from holdfast.data.examples import as_chat, make_example
from holdfast.models.handle import load_tokenizer
from tests import tiny
from tests.attacks.endings import ending, refusal

CANARY = "CANARYTEXT"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"
ESCAPES = "\x1b[2J\x1b]0;x\x07"


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny.tokenizer(chat=False).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def encoded(folder: Path) -> None:
    encode(as_chat(make_example(f"{CANARY} w1", "w2", "row 1")), load_tokenizer(folder), max_length=None)


@pytest.mark.parametrize("template", [NESTED, LARGE], ids=["nested loops", "endless text"])
def test_a_template_that_does_not_end(folder, template):
    """B5: nested loops hang whatever renders the first prompt."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert ending(lambda: encoded(folder)) == "refused"


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ " + ESCAPES,
        "{{ raise_exception('" + ESCAPES + "' ~ messages[0]['content']) }}",
        "{{ raise_exception(messages[0]['content']) }}",
        "{{ messages[0]['content'] / 2 }}",
        "{{ messages[9]['content'].a.b }}",
    ],
    ids=["syntax", "escapes", "the conversation", "a type", "an attribute"],
)
def test_what_a_template_raises_is_one_clean_line(folder, template):
    """B5: a traceback with raw terminal escapes and the conversation's text."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    refused = refusal(lambda: encoded(folder))
    assert refused is not None
    shown = f"{refused.what}{refused.remedy}"
    assert shown.isprintable()
    assert CANARY not in shown
    assert "chat template" in refused.what
    assert refused.__cause__ is None or CANARY not in str(refused.__cause__)
