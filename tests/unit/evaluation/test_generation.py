"""Greedy replies: equal to decoding one prompt at a time, whatever shares the batch and the model's own settings."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import get_peft_model
from tests import tiny
from tests.greedy import NEW, chat, examples, one_by_one, stopping
from transformers import GenerationConfig

from holdfast.core.errors import ConfigError, DataError, ResourceError
from holdfast.data.examples import make_example
from holdfast.judging.engines.transformers import Reply, generate  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def model():
    return stopping(tiny.model(seed=1)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def expected(model, tokenizer):
    found = [one_by_one(model, tokenizer, chat(example.prompt)) for example in examples()]
    assert len({truncated for _, truncated, _ in found}) == 2, "the oracle needs ended and cut replies"
    assert len({text for text, _, _ in found}) > 3
    return found


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_batched_replies_equal_decoding_one_at_a_time(model, tokenizer, expected, batch_size):
    found = generate(model, tokenizer, examples(), max_new_tokens=NEW, batch_size=batch_size)
    assert [(reply.text, reply.truncated, reply.tokens) for reply in found] == expected
    assert [reply.id for reply in found] == [example.id for example in examples()]


def test_replies_equal_transformers_own_unbatched_greedy_decoding(model, tokenizer):
    for example, reply in zip(examples(), generate(model, tokenizer, examples(), max_new_tokens=NEW), strict=True):
        ids = tokenizer(chat(example.prompt), return_tensors="pt", add_special_tokens=False)
        out = model.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert reply.text == tokenizer.decode(out, skip_special_tokens=True).strip()


def test_plain_prompts_are_left_alone_without_a_template(model, tokenizer):
    expected = [one_by_one(model, tokenizer, example.prompt, special=True) for example in examples()]
    found = generate(model, tokenizer, examples(), max_new_tokens=NEW, template="none")
    assert [(reply.text, reply.truncated, reply.tokens) for reply in found] == expected


def test_conversations_keep_their_turns(model, tokenizer):
    turns = ({"role": "system", "content": "w4"}, {"role": "user", "content": "w5 w6"})
    reply = {"role": "assistant", "content": "w7"}
    text = "<|system|> w4 <|end|> <|user|> w5 w6 <|end|> <|assistant|> "
    for template in ("chat", "none"):
        found = generate(model, tokenizer, [make_example(turns, (reply,))], max_new_tokens=NEW, template=template)
        assert found[0].text == one_by_one(model, tokenizer, text)[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_an_adapter_is_used_and_can_be_off(tokenizer, seed):
    adapted = get_peft_model(stopping(tiny.model(seed=1)), tiny.lora())
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    base = stopping(tiny.model(seed=1)).eval()
    on = [reply.text for reply in generate(adapted, tokenizer, examples(), max_new_tokens=NEW)]
    with adapted.disable_adapter():
        off = [reply.text for reply in generate(adapted, tokenizer, examples(), max_new_tokens=NEW)]
    merged = adapted.eval().merge_and_unload()
    assert on == [one_by_one(merged, tokenizer, chat(example.prompt))[0] for example in examples()]
    assert off == [one_by_one(base, tokenizer, chat(example.prompt))[0] for example in examples()]
    assert on != off


def test_the_models_own_generation_settings_do_not_matter(tokenizer, expected, caplog, recwarn):
    model = stopping(tiny.model(seed=1))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_p=0.5, top_k=3, repetition_penalty=9.0, no_repeat_ngram_size=1,
        suppress_tokens=[8, 9, 10], min_new_tokens=5, max_length=3, eos_token_id=1,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        found = generate(model, tokenizer, examples(), max_new_tokens=NEW)
    assert [(reply.text, reply.truncated, reply.tokens) for reply in found] == expected
    assert not caplog.records
    assert not recwarn.list


def test_end_tokens_of_the_model_and_of_the_tokenizer_both_end_a_reply(tokenizer, expected):
    """The model's settings name a word of a cut reply as its end; the tokenizer's end token still ends the others."""
    cut = next(i for i, (_, truncated, _) in enumerate(expected) if truncated)
    words = expected[cut][0].split()
    ended = next(
        i for i, (text, truncated, _) in enumerate(expected) if not truncated and text and words[1] not in text
    )
    model = stopping(tiny.model(seed=1))
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(words[1])]
    found = generate(model, tokenizer, examples(), max_new_tokens=NEW)
    assert (found[cut].text, found[cut].truncated) == (" ".join(words[: words.index(words[1])]), False)
    assert (found[ended].text, found[ended].truncated) == (expected[ended][0], False)


def test_model_and_tokenizer_are_left_as_they_were(tokenizer):
    model = tiny.model(seed=1)
    model.train()
    model.model.layers[0].eval()
    tokenizer.padding_side = "right"
    modes = [module.training for module in model.modules()]
    config = model.generation_config
    settings = config.to_dict()
    generate(model, tokenizer, examples(), max_new_tokens=3)
    assert [module.training for module in model.modules()] == modes
    assert model.generation_config is config
    assert config.to_dict() == settings
    assert tokenizer.padding_side == "right"
    assert not model.lm_head._forward_pre_hooks


def test_an_interrupted_generation_puts_everything_back(tokenizer, monkeypatch):
    model = tiny.model(seed=1).train()
    config = model.generation_config

    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(model, tokenizer, examples(), max_new_tokens=3)
    assert all(module.training for module in model.modules())
    assert model.generation_config is config
    assert not model.lm_head._forward_pre_hooks


def test_generation_is_repeatable_and_leaves_the_random_state(model, tokenizer):
    torch.manual_seed(5)
    first = generate(model, tokenizer, examples(), max_new_tokens=NEW)
    state = torch.random.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(state, torch.random.get_rng_state())
    assert generate(model, tokenizer, examples(), max_new_tokens=NEW) == first


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_batch_that_does_not_fit_is_halved(tokenizer, expected, monkeypatch, error):
    model = stopping(tiny.model(seed=1))
    whole, sizes = model.generate, []

    def small(**kwargs):
        sizes.append(len(kwargs["input_ids"]))
        if sizes[-1] > 2:
            raise error
        return whole(**kwargs)

    monkeypatch.setattr(model, "generate", small)
    done: list[int] = []
    found = generate(model, tokenizer, examples(), max_new_tokens=NEW, batch_size=8, progress=done.append)
    assert [(reply.text, reply.truncated, reply.tokens) for reply in found] == expected
    assert sizes == [8, 4, 2, 2, 2, 2, 1]
    assert done == [2, 4, 6, 8, 9]


def test_a_single_prompt_that_does_not_fit_is_a_resource_error(tokenizer, monkeypatch):
    model = tiny.model()

    def never(**_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(model, "generate", never)
    with pytest.raises(ResourceError, match=r"single prompt of \d+ tokens"):
        generate(model, tokenizer, examples(), max_new_tokens=NEW)


def test_other_errors_of_the_model_are_not_hidden(tokenizer, monkeypatch):
    model = tiny.model()

    def broken(**_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(model, "generate", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        generate(model, tokenizer, examples(), max_new_tokens=NEW)


def test_text_examples_are_refused_by_name(model, tokenizer):
    texts = [make_example("", "w3 w4", f"data:{i}") for i in range(30)]
    with pytest.raises(DataError, match="30 of 31 examples are plain text without a prompt") as caught:
        generate(model, tokenizer, [*texts, examples(1)[0]], max_new_tokens=NEW)
    assert f"{texts[19].id} (data:19); ..." in str(caught.value)
    assert "w3" not in str(caught.value)


def test_prompts_beyond_the_models_positions_are_refused_before_decoding(model, tokenizer, monkeypatch):
    long = make_example("w3 " * 113, "w4", "data:7")  # 116 tokens with the template
    assert generate(model, tokenizer, [long], max_new_tokens=12)[0].id == long.id  # 128 positions, all used
    monkeypatch.setattr(model, "generate", lambda **_: pytest.fail("decoded"))
    with pytest.raises(DataError, match=r"1 of 2 prompts leave no room for 13 new tokens.*128 positions.*data:7"):
        generate(model, tokenizer, [examples(1)[0], long], max_new_tokens=13)


def test_a_tokenizer_without_a_template_is_refused(model):
    with pytest.raises(ConfigError, match="no chat template"):
        generate(model, tiny.tokenizer(chat=False), examples(), max_new_tokens=NEW)


@pytest.mark.parametrize("sizes", [{"max_new_tokens": 0}, {"max_new_tokens": 1, "batch_size": 0}])
def test_sizes_below_one_are_refused(model, tokenizer, sizes):
    with pytest.raises(ConfigError, match="expected at least 1"):
        generate(model, tokenizer, examples(), **sizes)


def test_no_examples_no_replies(model, tokenizer):
    assert generate(model, tokenizer, [], max_new_tokens=NEW) == []


def test_the_text_of_a_reply_is_not_in_its_repr():
    assert "secret" not in repr(Reply("id", "secret", truncated=False, tokens=1))
