"""Generic refusals as replies: after examples, and after prompts of which only the token ids are left."""

from __future__ import annotations

import pytest
from tests import tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from holdfast.core.errors import DataError, UnsupportedError
from holdfast.data.encode import encode
from holdfast.data.examples import completion_text, make_example
from holdfast.data.refusals import GENERIC, RefusalTokens, refused


def user(text):
    return ({"role": "user", "content": text},)


def assistant(text):
    return ({"role": "assistant", "content": text},)


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level BPE, whose tokens carry the blank before a word, with a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*GENERIC, "What is it? Say so: yes.\n\n"] * 3, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    made.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    return made


def parts(row):
    start = next(i for i, label in enumerate(row.labels) if label != -100)
    return row.input_ids[:start], row.input_ids[start]


def test_the_list_is_short_plain_and_without_repetition():
    assert 50 <= len(GENERIC) <= 70
    assert len({text.casefold() for text in GENERIC}) == len(GENERIC)
    for text in GENERIC:
        assert text.endswith(".")
        assert "\n" not in text
        assert text == text.strip()
        assert text.isascii()
        assert 3 <= len(text.split()) <= 12


def test_a_refusal_takes_the_place_of_the_reply():
    plain = refused(make_example("Why?", "  Because."), 61)
    assert plain.prompt == "Why?"
    assert plain.completion == "  " + GENERIC[61 % len(GENERIC)]
    chat = refused(make_example(user("Why?"), (*assistant("a"), *user("b"), *assistant("c"))), 2)
    assert chat.prompt == user("Why?")
    assert chat.completion == assistant(GENERIC[2])


def test_a_text_has_no_prompt_to_refuse():
    with pytest.raises(DataError, match="no prompt to refuse"):
        refused(make_example("", "a whole text"), 0)


PROMPTS = ["What is it?", "Say so:\n\n", "yes", "(it)", "It is so. "]


@pytest.mark.parametrize("kind", ["word-level", "byte-level"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_after_a_conversational_prompt_are_those_of_the_whole_conversation(kind, prompt, byte_level):
    tokenizer = tiny.tokenizer() if kind == "word-level" else byte_level
    example = make_example(user(prompt), assistant("It is."))
    before, first = parts(encode(example, tokenizer, max_length=None))
    found = RefusalTokens(tokenizer).after(before, first, None)
    expected = [encode(refused(example, i), tokenizer, max_length=None) for i in range(len(GENERIC))]
    assert (found.input_ids, found.labels) in [(row.input_ids, row.labels) for row in expected]


@pytest.mark.parametrize("blank", [" ", ""], ids=["blank", "none"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_after_a_plain_prompt_begin_with_a_blank_like_the_reply(prompt, blank, byte_level):
    # Without a blank the prompt must end where a token ends, as it must for training itself.
    example = make_example(prompt + (":" if blank else ":\n"), blank + "It is.")
    before, first = parts(encode(example, byte_level, max_length=None))
    found = RefusalTokens(byte_level).after(before, first, None)
    expected = [encode(refused(example, i), byte_level, max_length=None) for i in range(len(GENERIC))]
    assert (found.input_ids, found.labels) in [(row.input_ids, row.labels) for row in expected]


TEMPLATES = {
    "header": "{%- for m in messages %}{{- '<|user|>' + m.role + '<|assistant|>\\n\\n' + m.content + eos_token }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|user|>assistant<|assistant|>\\n\\n' }}{%- endif %}",
    "thinking": "{%- for m in messages %}{{- '<|' + m.role + '|>\\n' }}"
    "{%- if m.role == 'assistant' %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + eos_token + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
}


@pytest.fixture(scope="module", params=["gpt2", "lines"])
def cutting(request):
    """Two ways to cut text before merging: GPT-2's, and that of Llama 3 and Qwen, which keeps line breaks together."""
    backend, lines = Tokenizer(models.BPE()), request.param == "lines"
    rule = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *([pre_tokenizers.Split(Regex(rule), "isolated")] if lines else []),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not lines),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<eos>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*GENERIC, *["a\n\n\nb\n\n c", "<think>\n\n</think>\n\n\n"] * 99], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


@pytest.mark.parametrize(
    "reply", ["It is.", " It is.", "\nIt is.", "\n\n It is."], ids=["none", "blank", "line", "more"]
)
@pytest.mark.parametrize("template", list(TEMPLATES))
def test_a_reply_that_begins_with_blanks_does_not_hide_its_conversation(template, reply, cutting):
    """Its blanks are joined with those that the template puts before a reply."""
    cutting.chat_template = TEMPLATES[template]
    tokens = RefusalTokens(cutting)
    for prompt in PROMPTS:
        example = make_example(user(prompt), assistant(reply))
        found = tokens.after(*parts(encode(example, cutting, max_length=None)), None)  # type: ignore[call-arg]
        expected = [encode(refused(example, i), cutting, max_length=None) for i in range(len(GENERIC))]
        assert (found.input_ids, found.labels) in [(row.input_ids, row.labels) for row in expected]


def test_some_token_is_scored_where_the_opening_fills_the_length(cutting):
    cutting.chat_template = TEMPLATES["header"]
    for reply in ("It is.", "\nIt is."):
        before, first = parts(encode(make_example(user("yes"), assistant(reply)), cutting, max_length=None))
        found = RefusalTokens(cutting).after(before, first, len(before) + 1)
        assert len(found.input_ids) == len(before) + 1
        assert found.n_labels >= 1


def test_the_choice_depends_on_the_prompt_alone():
    tokens = RefusalTokens(tiny.tokenizer())
    rows = [tuple(range(7, 7 + n)) for n in range(1, 40)]
    chosen = [tokens.after(row, 9, None) for row in rows]
    others = RefusalTokens(tiny.tokenizer())
    assert chosen == [others.after(row, 30, None) for row in rows]
    assert len({len(a.input_ids) - len(row) for a, row in zip(chosen, rows, strict=True)}) > 3
    assert len(tokens.after((7, 8), 9, None).input_ids) == 2 + 8  # a choice of another process, another day


def test_the_whole_is_cut():
    tokens = RefusalTokens(tiny.tokenizer())
    whole, cut = tokens.after((7, 8, 9), 9, None), tokens.after((7, 8, 9), 9, 5)
    assert cut.input_ids == whole.input_ids[:5]
    assert cut.labels == whole.labels[:5] == (-100, -100, -100, *whole.input_ids[3:5])
    assert cut.truncated
    assert not whole.truncated


@pytest.mark.parametrize("without", ["template", "eos"])
def test_a_tokenizer_with_one_format_only(without):
    tokenizer = tiny.tokenizer(chat=without != "template")
    ends_with = 1
    if without == "eos":
        tokenizer.eos_token, ends_with = None, 6
    assert RefusalTokens(tokenizer).after((7, 8), 9, None).input_ids[-1] == ends_with


def test_a_template_whose_replies_depend_on_the_prompt_is_refused():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> {% else %}{{ messages[0]['content'] | length }} <|end|>{% endif %}"
        "{% if messages[0]['content'] | length > 3 %}<|end|>{% endif %}"
    )
    with pytest.raises(UnsupportedError, match="differently after different prompts"):
        RefusalTokens(tokenizer)


def test_replies_are_read_back_as_they_were_written(byte_level):
    example = refused(make_example(user("Why?"), assistant("x")), 7)
    assert completion_text(example) == GENERIC[7]
    row = encode(example, byte_level, max_length=None)
    reply = [label for label in row.labels if label != -100]
    assert byte_level.decode(reply, skip_special_tokens=True).strip() == GENERIC[7]
