"""The prompt templates: what they render, and that training and generation see the same prompt tokens."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from holdfast.core.errors import ConfigError
from holdfast.data.encode import IGNORE, encode
from holdfast.data.examples import as_chat, make_example, to_utf8
from holdfast.data.tasks import user_text
from holdfast.data.templates import NO_THINKING, use_template
from holdfast.judging.prompts import prompt_ids

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen's: a switch that is on unless set, an empty thought where it is off.
SWITCHED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{{- m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
EOS = "<|im_end|>"
# Runs of line breaks are tokens of their own here, as in real vocabularies: they can merge across a boundary.
CORPUS = [
    "the quick brown fox\n\n### Response:\njumps",
    "a\n\n\nb\n\n c",
    "\n \n  \n",
    "### Input:\n### Instruction:\n",
] * 9


# How Qwen and Llama 3 cut text before merging, shortened: line breaks stay together and with punctuation before them.
# GPT-2's rule, which ByteLevel has built in, leaves the last blank before a word alone.
LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build(*, template=CHATML, bos=False, eos=EOS, lines=False):
    backend = Tokenizer(models.BPE())
    whole = pre_tokenizers.Split(Regex(LINES), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*([whole] if lines else []), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not lines)]
    )
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", EOS, "<s>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token="<|pad|>", chat_template=template
    )


@pytest.fixture(scope="module", params=[False, True], ids=["gpt2", "lines"])
def alpaca(request):
    tokenizer = build(lines=request.param)
    use_template(tokenizer, "alpaca")
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def parts(encoded, tokenizer):
    """The masked ids, and the text of the scored ids."""
    n = encoded.labels.count(IGNORE)
    assert encoded.labels == (IGNORE,) * n + encoded.input_ids[n:]
    return list(encoded.input_ids[:n]), tokenizer.decode(encoded.input_ids[n:])


def test_alpaca_renders_the_published_format_without_an_input(alpaca):
    assert alpaca.apply_chat_template([user("Say hello"), assistant("hello")], tokenize=False) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nSay hello\n\n### Response:\nhello<|im_end|>"
    )


def test_alpaca_renders_the_published_format_with_an_input(alpaca):
    asked = user_text("Find the mood", "what a day", "alpaca")
    assert alpaca.apply_chat_template([user(asked)], tokenize=False, add_generation_prompt=True) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request."
        "\n\n### Instruction:\nFind the mood\n\n### Input:\nwhat a day\n\n### Response:\n"
    )


def test_alpaca_leaves_the_response_mark_to_the_generation_prompt(alpaca):
    assert alpaca.apply_chat_template([user("Say hello")], tokenize=False).endswith("### Instruction:\nSay hello")


def test_a_reply_that_ends_with_eos_gets_no_second_one(alpaca):
    text = alpaca.apply_chat_template([user("a"), assistant(f"b{EOS}")], tokenize=False)
    assert text.count(EOS) == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be kind"}, user("a")],
        [user("a"), assistant("b"), user("c")],
        [user("a"), user("b")],
        [assistant("a")],
    ],
    ids=["system", "several turns", "two users", "no user"],
)
def test_alpaca_refuses_what_it_has_no_place_for(alpaca, messages):
    with pytest.raises(TemplateError, match="one user message and at most one assistant reply"):
        alpaca.apply_chat_template([*messages], tokenize=False)


@pytest.mark.parametrize("bos", [True, False], ids=["bos", "no bos"])
def test_alpaca_begins_with_bos_exactly_where_plain_text_does(bos):
    tokenizer = build(bos=bos)
    use_template(tokenizer, "alpaca")
    ids = tokenizer.apply_chat_template([user("a")], tokenize=True, return_dict=True)["input_ids"]
    assert (ids[0] == tokenizer.bos_token_id) is bos
    assert ids.count(tokenizer.bos_token_id) == bos


def test_the_template_is_saved_with_the_tokenizer(alpaca, tmp_path):
    alpaca.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == alpaca.chat_template


def test_a_task_puts_the_input_below_the_instruction():
    assert user_text("do", "this", "chat") == "do\n\nthis"
    assert user_text("do", "this", "none") == "do\n\nthis\n\n"
    assert user_text("do", "this", "alpaca") == "do\n\n### Input:\nthis"
    assert {user_text("do", "", template) for template in ("chat", "alpaca")} == {"do"}


def test_chat_switches_thinking_off_once_and_for_good():
    tokenizer = build(template=SWITCHED)
    for _ in range(2):
        use_template(tokenizer, "chat")
    assert tokenizer.chat_template == NO_THINKING + SWITCHED
    for wish in ({}, {"enable_thinking": True}):
        opened = tokenizer.apply_chat_template([user("a")], tokenize=False, add_generation_prompt=True, **wish)
        assert opened == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_chat_leaves_a_template_without_the_switch_alone():
    tokenizer = build()
    use_template(tokenizer, "chat")
    assert tokenizer.chat_template == CHATML


def test_chat_switches_thinking_off_in_every_named_template():
    tokenizer = build(template={"default": SWITCHED, "tool_use": CHATML})
    use_template(tokenizer, "chat")
    assert tokenizer.chat_template == {"default": NO_THINKING + SWITCHED, "tool_use": CHATML}


@pytest.mark.parametrize(
    ("form", "day"),
    [("%d %b %Y", "26 Jul 2024"), ("%d %B %Y", "26 July 2024"), ("%Y-%m-%d", "2024-07-26")],
    ids=["short", "long", "iso"],
)
def test_chat_writes_the_same_day_every_day(form, day, tmp_path):
    """Llama 3.2's way: a variable, else the clock."""
    dated = (
        f"{{%- if not date_string is defined %}}{{%- set date_string = strftime_now('{form}') %}}{{%- endif %}}"
        "{{- 'Today: ' + date_string + '\n' }}" + CHATML
    )
    tokenizer = build(template=dated)
    assert day not in tokenizer.apply_chat_template([user("a")], tokenize=False), "the clock stands at this day"
    for _ in range(2):
        use_template(tokenizer, "chat")
    assert tokenizer.chat_template.count("macro strftime_now") == 1
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        text = one.apply_chat_template([user("a")], tokenize=False)
        assert text == f"Today: {day}\n<|im_start|>user\na<|im_end|>\n"


def test_chat_settles_day_and_thinking_together_once():
    tokenizer = build(template=SWITCHED + "{# strftime_now #}")
    use_template(tokenizer, "chat")
    first = tokenizer.chat_template
    assert first.startswith(NO_THINKING)
    use_template(tokenizer, "chat")
    assert tokenizer.chat_template == first


def test_chat_warns_when_generation_opens_a_reply_otherwise_than_training(caplog):
    always = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with caplog.at_level(logging.WARNING):
        use_template(build(), "chat")
        assert caplog.records == []
        use_template(build(template=always), "chat")
    assert "otherwise than in training" in caplog.text


def test_none_leaves_the_tokenizer_alone():
    tokenizer = build()
    use_template(tokenizer, "none")
    assert tokenizer.chat_template == CHATML


def test_unusable_templates_are_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        use_template(build(template=None), "chat")
    with pytest.raises(ConfigError, match="no EOS token"):
        use_template(build(eos=None), "alpaca")
    with pytest.raises(ConfigError, match="'alpacca' is unknown") as error:
        use_template(build(), "alpacca")
    assert "alpaca" in error.value.remedy
    with pytest.raises(ConfigError, match="unknown"):
        user_text("a", "b", "vicuna")


# Texts that try to break the boundary: marks of the format, runs of blanks, special tokens, lone surrogates.
PIECES = st.one_of(
    st.sampled_from(
        [
            "### Response:",
            "### Response:\n",
            "\n\n### Input:\n",
            "\n",
            "\n\n",
            " ",
            "\t",
            "\u00a0",
            "<think>",
            "the fox",
        ]
    ),
    st.text(max_size=6),
)
TEXT = st.lists(PIECES, max_size=6).map("".join)
PROMPT = TEXT.filter(lambda text: text != "")
CHECKS = settings(max_examples=100, deadline=None)


@CHECKS
@given(PROMPT, TEXT)
def test_alpaca_masks_the_prompt_and_scores_reply_and_eos(alpaca, prompt, reply):
    example = make_example(prompt, reply)
    masked, scored = parts(encode(as_chat(example), alpaca, max_length=None), alpaca)
    rendered = alpaca.apply_chat_template([user(to_utf8(prompt))], tokenize=False, add_generation_prompt=True)
    assert alpaca.decode(masked) == rendered
    assert scored == to_utf8(reply).lstrip() + EOS
    assert prompt_ids(alpaca, [example], "alpaca") == [masked]


@pytest.fixture(scope="module", params=[CHATML, SWITCHED], ids=["plain", "thinking"])
def chat(request):
    # A thought ends with two line breaks, which GPT-2's rule parts before a word and joins at the end of a text.
    tokenizer = build(template=request.param, lines=request.param is SWITCHED)
    use_template(tokenizer, "chat")
    return tokenizer


@CHECKS
@given(PROMPT, TEXT.map(str.lstrip))
def test_chat_masks_the_prompt_and_scores_reply_and_end_of_turn(chat, prompt, reply):
    """A reply with leading blanks may merge with the line break before it: the tokenizer's template is not ours."""
    example = make_example(prompt, reply)
    masked, scored = parts(encode(as_chat(example), chat, max_length=None), chat)
    rendered = chat.apply_chat_template([user(to_utf8(prompt))], tokenize=False, add_generation_prompt=True)
    assert chat.decode(masked) == rendered
    assert scored == f"{to_utf8(reply)}{EOS}\n"
    assert prompt_ids(chat, [example], "chat") == [masked]


@CHECKS
@given(PROMPT.map(lambda text: text.rstrip() + "\n"), TEXT.map(str.lstrip))
def test_none_masks_the_prompt_and_scores_reply_and_eos(alpaca, prompt, reply):
    """A prompt that ends with a line break and a reply that does not begin with a blank do not merge."""
    example = make_example(prompt, reply)
    masked, scored = parts(encode(example, alpaca, max_length=None), alpaca)
    assert alpaca.decode(masked) == to_utf8(prompt)
    assert scored == to_utf8(reply).removesuffix(EOS) + EOS
    assert prompt_ids(alpaca, [example], "none") == [masked]
