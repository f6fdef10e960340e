"""Ids, formats and text normalisation."""

import re

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import DataError
from holdfast.data.examples import (
    as_chat,
    completion_text,
    make_example,
    normalise,
    prompt_text,
    searchable_texts,
    to_rows,
    to_utf8,
    uniform,
)

USER = {"role": "user", "content": "Hello there"}
SYSTEM = {"role": "system", "content": "Be kind"}
REPLY = {"role": "assistant", "content": "Hi"}
STRANGE = ["שלום עולם", "👩‍👩‍👧 family", "e\u0301te\u0301", "half \ud83d emoji", "\u202eabc\u202c", "a\u0000b"]


def test_id_is_sixteen_hex_digits_and_depends_on_both_sides():
    one = make_example("a", "b", "f:1")
    assert re.fullmatch(r"[0-9a-f]{16}", one.id)
    assert one.id == make_example("a", "b", "g:9").id
    ids = {make_example(p, c).id for p, c in [("a", "b"), ("b", "a"), ("ab", ""), ("a", "bc"), ("", "ab")]}
    assert len(ids) == 5


def test_kinds():
    assert make_example("a", "b").kind == "plain"
    assert make_example((USER,), (REPLY,)).kind == "chat"
    assert make_example("", "b").kind == "text"


def test_as_chat_keeps_the_id_and_place():
    chat = as_chat(make_example("Hello there", "Hi", "f:1"))
    assert chat.prompt == (USER,)
    assert chat.completion == (REPLY,)
    assert chat.where == "f:1"
    assert chat.id == make_example("Hello there", "Hi").id == make_example((USER,), (REPLY,)).id
    assert as_chat(chat) is chat


def test_as_chat_refuses_text():
    with pytest.raises(DataError, match="no prompt"):
        as_chat(make_example("", "words", "f:3"))


def test_prompt_text_leaves_earlier_replies_out():
    example = make_example((SYSTEM, USER, REPLY, {"role": "user", "content": "More"}), (REPLY,))
    assert prompt_text(example) == "Be kind\nHello there\nMore"
    assert completion_text(example) == "Hi"
    assert prompt_text(make_example("p", "c")) == "p"
    assert prompt_text(make_example("", "whole text")) == "whole text"


def test_searchable_texts_are_the_joined_prompt_and_each_question():
    more = {"role": "user", "content": "More"}
    example = make_example((SYSTEM, USER, REPLY, more), (REPLY, {**more, "content": "Last"}, REPLY))
    assert searchable_texts(example) == ["Be kind\nHello there\nMore", "Be kind", "Hello there", "More", "Last"]
    assert searchable_texts(make_example((USER,), (REPLY,))) == ["Hello there"]
    assert searchable_texts(make_example("p", "c")) == ["p"]
    assert searchable_texts(make_example("", "whole text")) == ["whole text"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  How do I\tpick a LOCK?! ", "how do i pick a lock"),
        ("ＦＵＬＬ　width", "full width"),
        ("Straße", "strasse"),
        ("don't", "don t"),
        ("e\u0301", "\u00e9"),
        ("zero\u200bwidth", "zerowidth"),
        ("a + b = c", "a b c"),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


def test_texts_of_symbols_alone_stay_different():
    assert normalise("🔥🔥") != normalise("🔥")
    assert normalise("???") == "???"


@given(st.text(st.characters(), max_size=30))
def test_normalise_is_idempotent(text):
    once = normalise(text)
    assert normalise(once) == once


@pytest.mark.parametrize("text", STRANGE)
def test_any_string_hashes_and_normalises(text):
    assert make_example(text, "c").id != make_example(text + "x", "c").id
    assert normalise(text)


def test_lone_surrogates_become_replacement_characters_and_all_else_stays():
    assert to_utf8("a\ud83d b") == "a\ufffd b"
    assert to_utf8("\udc00\ud800") == "\ufffd\ufffd"
    for text in ["👩‍👩‍👧", "\ufeffstart", "שלום", "a\u0000b", ""]:
        assert to_utf8(text) == text


@pytest.mark.parametrize(
    "examples",
    [
        [make_example("p", "c"), make_example("half \ud83d", "c")],
        [make_example((USER,), (REPLY,)), make_example((SYSTEM, USER), (REPLY,))],
        [make_example("", "text")],
        [make_example("p", "c"), make_example((USER,), (REPLY,))],
    ],
    ids=["plain", "chat", "text", "mixed"],
)
def test_rows_load_into_a_dataset_unchanged(examples):
    rows = to_rows(examples)
    assert datasets.Dataset.from_list(rows).to_list() == rows


def test_a_mixture_becomes_conversational():
    plain, chat = make_example("p", "c"), make_example((USER,), (REPLY,))
    assert uniform([plain, plain]) == [plain, plain]
    assert uniform([plain, chat]) == [as_chat(plain), chat]


def test_text_is_not_mixed_with_others():
    with pytest.raises(DataError, match="1 text examples are mixed with 2"):
        uniform([make_example("p", "c"), make_example("", "t", "f:2"), make_example("q", "c")])
