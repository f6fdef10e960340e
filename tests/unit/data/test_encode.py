"""Token ids and labels, with TRL's own preparation as the oracle."""

import datasets
import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from holdfast.core.errors import ConfigError, DataError
from holdfast.data.encode import (
    IGNORE,
    Encoded,
    encode,
    encode_all,
    first_tokens,
    require_usable_tokenizer,
    template_sha256,
    tokenizer_sha256,
)
from holdfast.data.examples import as_chat, make_example, to_rows
from holdfast.data.sources import examples_from_rows

PLAIN = [
    make_example("tell me a story", " the quick brown fox"),
    make_example("the qui", "ck brown fox"),  # tokens merge across the boundary
    make_example("please", " the lazy dog<|im_end|>"),  # EOS is there already
    make_example("naïve 👩‍👩‍👧 שלום \ud83d", " réply 🔥"),
    make_example("a long prompt " * 30, " story"),
]
CHAT = [as_chat(example) for example in PLAIN] + [
    make_example(
        (
            {"role": "system", "content": "please"},
            {"role": "user", "content": "tell me"},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": "a story"},
        ),
        ({"role": "assistant", "content": "the quick brown fox"},),
    )
]
TEXT = [make_example("", "the quick brown fox"), make_example("", "the lazy dog<|im_end|>")]


@pytest.fixture(scope="module")
def trl_prepare(tmp_path_factory, make_tokenizer):
    """`SFTTrainer._prepare_dataset` of a tiny random model: rows to pairs of ids and labels."""
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    args = SFTConfig(str(tmp_path_factory.mktemp("trl")), report_to="none", use_cpu=True, bf16=False)
    first = datasets.Dataset.from_list(to_rows(PLAIN[:1]))
    trainer = SFTTrainer(model, args, train_dataset=first, processing_class=tokenizer)

    def prepare(rows, tokenizer, max_length, completion_only):
        trainer.completion_only_loss = completion_only
        trainer._tokenizer = tokenizer
        args.max_length = max_length
        dataset = datasets.Dataset.from_list(rows)
        done = trainer._prepare_dataset(dataset, tokenizer, args, False, None, "train")
        return [(tuple(row["input_ids"]), tuple(row["labels"])) for row in done]

    return prepare


def ours(examples, tokenizer, max_length):
    encoded = [encode(example, tokenizer, max_length=max_length) for example in examples]
    return [(item.input_ids, item.labels) for item in encoded if any(x != -100 for x in item.labels)]


@pytest.mark.parametrize("max_length", [None, 20])
@pytest.mark.parametrize("bos", [False, True])
def test_plain_examples_are_encoded_as_trl_does(trl_prepare, make_tokenizer, bos, max_length):
    tokenizer = make_tokenizer(bos=bos, pad_token="<|im_end|>")
    assert ours(PLAIN, tokenizer, max_length) == trl_prepare(to_rows(PLAIN), tokenizer, max_length, True)


@pytest.mark.parametrize("max_length", [None, 20])
@pytest.mark.parametrize("template", ["chatml", "inst", "thinking"])
def test_conversations_are_encoded_as_trl_does(trl_prepare, make_tokenizer, templates, template, max_length):
    tokenizer = make_tokenizer(template=templates[template])
    assert ours(CHAT, tokenizer, max_length) == trl_prepare(to_rows(CHAT), tokenizer, max_length, True)


@pytest.mark.parametrize("bos", [False, True])
def test_text_is_encoded_as_trl_does(trl_prepare, make_tokenizer, bos):
    tokenizer = make_tokenizer(bos=bos)
    assert ours(TEXT, tokenizer, None) == trl_prepare(to_rows(TEXT), tokenizer, None, False)


def test_messages_have_trl_ids_but_score_the_last_reply_only(trl_prepare, tokenizer):
    rows = [{"messages": [*example.prompt, *example.completion]} for example in CHAT[-1:]]
    (ids, labels), *_ = trl_prepare(rows, tokenizer, None, False)
    assert labels == ids  # TRL scores every token of a messages row
    example = examples_from_rows(rows, name="rows")[0]
    item = encode(example, tokenizer, max_length=None)
    assert item.input_ids == ids
    scored = [token for token in item.labels if token != -100]
    assert tokenizer.decode(scored) == "the quick brown fox<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", "the quick brown fox<|im_end|>\n"),
        ("inst", " the quick brown fox<|im_end|>"),
        ("thinking", "the quick brown fox<|im_end|>\n"),
    ],
)
def test_the_reply_and_its_end_are_scored(make_tokenizer, templates, template, expected):
    tokenizer = make_tokenizer(template=templates[template], pad_token="<|im_end|>")
    item = encode(CHAT[-1], tokenizer, max_length=None)
    scored = [token for token in item.labels if token != -100]
    assert tokenizer.decode(scored) == expected
    assert tokenizer.eos_token_id in scored


def test_the_first_label_is_not_counted():
    assert Encoded("a", (1, 2, 3), (1, 2, 3), truncated=False).n_labels == 2
    assert Encoded("a", (1, 2, 3), (-100, -100, 3), truncated=False).n_labels == 1
    assert Encoded("a", (1,), (1,), truncated=False).n_labels == 0


def test_truncation_keeps_the_start_and_is_flagged(tokenizer):
    full = encode(PLAIN[0], tokenizer, max_length=None)
    n = len(full.input_ids)
    assert not full.truncated
    assert not encode(PLAIN[0], tokenizer, max_length=n).truncated
    cut = encode(PLAIN[0], tokenizer, max_length=n - 1)
    assert cut.truncated
    assert cut.input_ids == full.input_ids[:-1]
    assert cut.labels == full.labels[:-1]
    assert encode_all(PLAIN[:3], tokenizer, max_length=n - 1, role="safety").n_truncated == 1


def test_a_safety_prompt_that_fills_max_length_is_an_error(tokenizer):
    with pytest.raises(DataError) as caught:
        encode_all(PLAIN, tokenizer, max_length=100, role="safety")
    assert caught.value.exit_code == 3
    assert PLAIN[4].id in caught.value.what
    assert "1 of 5 safety examples" in caught.value.what
    assert "long prompt" not in str(caught.value)


def test_task_examples_without_labels_are_dropped_up_to_five_percent(tokenizer):
    fine = [make_example(f"tell {i}", " me") for i in range(19)]
    result = encode_all([*fine, PLAIN[4]], tokenizer, max_length=20, role="task")
    assert [item.id for item in result.examples] == [example.id for example in fine]
    assert result.n_truncated == 0
    with pytest.raises(DataError, match="1 of 19 task examples"):
        encode_all([*fine[1:], PLAIN[4]], tokenizer, max_length=20, role="task")


def test_a_reply_that_is_only_eos_is_refused_for_safety(tokenizer):
    example = make_example("please", " <|im_end|> ")
    for one in (example, as_chat(example)):
        with pytest.raises(DataError, match="no completion token"):
            encode_all([one], tokenizer, max_length=None, role="safety")


def test_a_template_that_drops_the_reply_is_refused(make_tokenizer):
    template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="template leaves the reply out"):
        encode_all(CHAT[:1], make_tokenizer(template=template), max_length=None, role="safety")


def test_no_chat_template_is_refused_only_when_needed(make_tokenizer):
    tokenizer = make_tokenizer(template=None)
    require_usable_tokenizer(tokenizer, needs_chat=False)
    with pytest.raises(ConfigError, match="no chat template") as caught:
        require_usable_tokenizer(tokenizer, needs_chat=True)
    assert caught.value.exit_code == 2


def test_pad_falls_back_to_eos(make_tokenizer):
    tokenizer = make_tokenizer(pad_token=None)
    require_usable_tokenizer(tokenizer, needs_chat=True)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    kept = make_tokenizer()
    require_usable_tokenizer(kept, needs_chat=True)
    assert kept.pad_token == "<|pad|>"


def test_a_tokenizer_without_eos_is_refused(make_tokenizer):
    with pytest.raises(ConfigError, match="no EOS token"):
        require_usable_tokenizer(make_tokenizer(eos_token=None), needs_chat=False)
    with pytest.raises(ConfigError, match="neither a pad nor an EOS"):
        require_usable_tokenizer(make_tokenizer(eos_token=None, pad_token=None), needs_chat=True)


def test_tokenizer_hash_ignores_padding_and_template_but_sees_the_vocabulary(make_tokenizer):
    tokenizer = make_tokenizer(pad_token=None)
    before = tokenizer_sha256(tokenizer)
    require_usable_tokenizer(tokenizer, needs_chat=True)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    tokenizer.chat_template = "other"
    assert tokenizer_sha256(tokenizer) == before == tokenizer_sha256(make_tokenizer())
    assert tokenizer_sha256(make_tokenizer(bos=True)) != before
    tokenizer.add_tokens(["foxes"])
    assert tokenizer_sha256(tokenizer) != before


def test_template_hash(make_tokenizer, templates):
    hashes = {template_sha256(make_tokenizer(template=t)) for t in (*templates.values(), None)}
    assert len(hashes) == 4


def test_a_row_ends_with_its_kth_scored_token():
    row = Encoded("a", (5, 6, 7, 8, 9), (IGNORE, IGNORE, 7, 8, 9), truncated=False)
    assert first_tokens(row, 2) == Encoded("a", (5, 6, 7, 8), (IGNORE, IGNORE, 7, 8), truncated=False)
    assert first_tokens(row, 3) is row
    # The first token has no prediction, so that it is not scored.
    assert first_tokens(Encoded("b", (5, 6, 7), (5, 6, 7), truncated=False), 1).input_ids == (5, 6)
