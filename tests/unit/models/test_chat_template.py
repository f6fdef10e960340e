"""Which templates need no trial, what a trial refuses, and that it is made once."""

from __future__ import annotations

import pytest

from holdfast.core.errors import ConfigError, DataError
from holdfast.data.templates import rendered
from holdfast.models import chat_template
from holdfast.models.chat_template import plainly_linear, require_bounded
from holdfast.models.template_trial import LARGE, LONGEST, OK, SYNTAX, trial

ONE_LOOP = (
    "{% for m in messages %}{{ m['role'] ~ m.content.strip() | trim }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
TWO_LOOPS = "{% for m in messages %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        TWO_LOOPS,
        "{% for a in range(9) %}{% endfor %}",
        "{% for a in messages * 9 %}{% endfor %}",
        "{{ 'a' * 9 }}",
        "{{ 2 ** 9 }}",
        "{{ '%9s' % 'a' }}",
        "{{ 'a'.center(9) }}",
        "{{ messages | tojson(indent=9) }}",
        "{% set x = x ~ x %}",
        "{% macro f() %}{{ f() }}{% endmacro %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% include 'x' %}",
        "{% generation %}{% endgeneration %}",
        "{% for",
        "{{ " + "(" * 5000,
    ],
)
def test_what_is_not_plainly_linear(template):
    assert not plainly_linear(template)


def test_one_loop_over_the_messages_is():
    assert plainly_linear(ONE_LOOP)


def test_a_trial_is_made_once_for_a_template(monkeypatch):
    asked = []
    monkeypatch.setattr(chat_template, "_tried", asked.append)
    require_bounded(ONE_LOOP, "x")
    require_bounded(None, "x")
    assert asked == []
    require_bounded({"default": TWO_LOOPS, "tool": ONE_LOOP}, "x")
    require_bounded(TWO_LOOPS, "x")
    assert asked == [TWO_LOOPS]


def test_what_failed_is_not_remembered(monkeypatch):
    monkeypatch.setattr(chat_template, "_tried", lambda _: "does not end")
    for _ in range(2):
        with pytest.raises(ConfigError, match="the chat template of 'x' does not end"):
            require_bounded(TWO_LOOPS, "x")


@pytest.mark.parametrize("template", [5, ["a"], {"a": 5}])
def test_a_template_that_is_no_text(template):
    with pytest.raises(ConfigError, match="is no text"):
        require_bounded(template, "x")


def test_a_long_template_is_not_parsed():
    with pytest.raises(ConfigError, match="characters"):
        require_bounded("a" * 2**20 + "a", "x")


def test_a_real_template_passes_its_trial(monkeypatch):
    """With loops in loops, as for tool calls."""
    require_bounded(TWO_LOOPS + "{{ raise_exception('no tools') }}", "x")


def test_verdicts_of_a_trial():
    from transformers.utils.chat_template_utils import render_jinja_template

    def memory(*_, **__):
        raise MemoryError

    assert trial(ONE_LOOP, render_jinja_template) == OK
    assert trial("{{ raise_exception('never') }}", render_jinja_template) == OK
    assert trial("{% for", render_jinja_template) == SYNTAX
    assert trial(ONE_LOOP, memory) == LARGE
    assert trial(ONE_LOOP, lambda *_, **__: (["a" * (LONGEST + 1)], None)) == LARGE


class Refusing:
    name_or_path = "x"
    chat_template = "{{ raise_exception('no system turn, please') }}"

    def __init__(self, said: str) -> None:
        self.said = said

    def apply_chat_template(self, conversations, **_):
        raise ValueError(self.said)


@pytest.mark.parametrize(
    ("said", "shown"),
    [("no system turn, please", "no system turn, please"), ("a prompt", "ValueError"), ("", "ValueError")],
)
def test_only_the_template_s_own_words_are_repeated(said, shown):
    with pytest.raises(DataError) as refused:
        rendered(Refusing(said), [[{"role": "system", "content": "a prompt"}, {"role": "\x1b", "content": ""}]])
    assert refused.value.what == f"the chat template of 'x' cannot render a conversation (roles: system): {shown}"
    assert refused.value.__cause__ is None
