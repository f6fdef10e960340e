"""The short way to token ids, past the tokenizer's own call: the same ids, and taken only where it gives them."""

from __future__ import annotations

import logging

import pytest
from tests.unit.data.test_encode import CHAT, PLAIN, TEXT
from transformers import PreTrainedTokenizerFast

from holdfast.data import encode as module
from holdfast.data.encode import encode, encode_all

LONG = "Token indices sequence length is longer"


@pytest.fixture
def calls(monkeypatch):
    """Calls of a tokenizer as a whole."""
    found, own = [], PreTrainedTokenizerFast._encode_plus

    def counted(self, *arguments, **options):
        found.append(1)
        return own(self, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", counted)
    return found


def own_way(examples, tokenizer, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_backend", lambda _: None)
        return encode_all(examples, tokenizer, max_length=None, role="task")


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", ["chatml", "inst", "thinking"])
def test_ids_and_labels_are_those_of_the_tokenizers_own_call(
    make_tokenizer, templates, template, bos, calls, monkeypatch
):
    tokenizer = make_tokenizer(template=templates[template], bos=bos)
    examples = [*TEXT, *CHAT, *PLAIN]
    found = encode_all(examples, tokenizer, max_length=None, role="task")
    assert not calls
    assert found == own_way(examples, tokenizer, monkeypatch)
    assert calls


@pytest.mark.parametrize("examples", [PLAIN, CHAT], ids=["plain", "chat"])
def test_what_an_earlier_call_left_behind_is_undone(make_tokenizer, examples, calls, monkeypatch):
    expected = own_way(examples, make_tokenizer(), monkeypatch)
    for left in ({"padding": "max_length", "max_length": 90}, {"truncation": True, "max_length": 3}):
        tokenizer = make_tokenizer()
        tokenizer(["a story"], **left)
        calls.clear()
        assert encode_all(examples, tokenizer, max_length=None, role="task") == expected
        assert calls
        calls.clear()
        assert encode_all(examples, tokenizer, max_length=None, role="task") == expected
        assert not calls  # the call before has cleared up


def test_special_tokens_are_split_where_the_tokenizer_says_so(make_tokenizer, monkeypatch):
    tokenizer = make_tokenizer()
    whole = encode_all(CHAT, tokenizer, max_length=None, role="task")
    tokenizer.split_special_tokens = True
    found = [encode_all(CHAT, tokenizer, max_length=None, role="task") for _ in range(2)]
    assert found[0] == found[1] == own_way(CHAT, tokenizer, monkeypatch)
    assert found[0] != whole


def test_a_tokenizer_with_a_way_of_its_own_is_asked(make_tokenizer):
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *arguments, **options):
            found = super()._encode_plus(*arguments, **options)
            found["input_ids"] = [[7, *ids] for ids in found["input_ids"]]
            return found

    plain = make_tokenizer()
    own = Own(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>", chat_template=plain.chat_template)
    for example in (PLAIN[0], CHAT[0]):
        assert encode(example, own, max_length=None).input_ids[0] == 7
        assert encode(example, plain, max_length=None).input_ids[0] != 7
    plain.apply_chat_template = lambda *_, **__: {"input_ids": [[1, 2, 3]]}
    assert encode(CHAT[0], plain, max_length=None).input_ids == (1, 2, 3)


def test_a_tokenizer_that_switches_languages_is_asked(make_tokenizer, calls):
    tokenizer = make_tokenizer()
    tokenizer._switch_to_input_mode = lambda: None
    encode(PLAIN[0], tokenizer, max_length=None)
    assert calls


@pytest.mark.parametrize("example", [PLAIN[4], CHAT[4]], ids=["plain", "chat"])
def test_a_sequence_that_is_too_long_for_the_model_is_still_said_to_be(make_tokenizer, example, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="transformers"):  # the command line, if run before, has raised it
        tokenizer = make_tokenizer()
        encode(example, tokenizer, max_length=None)
        assert LONG not in caplog.text
        tokenizer.model_max_length = 20
        encode(example, tokenizer, max_length=None)
    assert LONG in caplog.text
