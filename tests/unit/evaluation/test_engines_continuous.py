"""Continuous batching gives the tokens of decoding one prompt at a time, whatever shares the rows."""

from __future__ import annotations

import logging

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from tests import tiny
from tests.greedy import chat, examples, one_by_one, stopping
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from holdfast.core.errors import ConfigError, DataError, ResourceError, UnsupportedError
from holdfast.data.examples import make_example
from holdfast.judging.engines import open_engine
from holdfast.judging.engines.continuous import loop as slot_loop
from holdfast.judging.engines.continuous import obstacle
from holdfast.judging.engines.continuous.loop import SlotLoop

NEW = 16
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def asked() -> list:
    """Ten prompts, one of them far longer than the others."""
    return [*examples(9), make_example("w3 w9 " * 30, "w4", "data:long")]


def replies(name: str, model, tokenizer, asked_of=None, *, new: int = NEW, **options) -> dict:
    engine = open_engine(name, model=model, tokenizer=tokenizer, **options)
    prompts = asked() if asked_of is None else asked_of
    found = [reply for batch in engine.generate(prompts, max_new_tokens=new) for reply in batch]
    assert len(found) == len(prompts), "every prompt is replied to once"
    return {reply.id: reply for reply in found}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture(scope="module")
def model():
    return stopping(tiny.model(seed=1)).eval()


def oracle(model, tokenizer) -> dict:
    return {e.id: one_by_one(model, tokenizer, chat(e.prompt.strip()), new=NEW) for e in asked()}


def plain(found: dict) -> dict:
    return {key: (reply.text, reply.truncated, reply.tokens) for key, reply in found.items()}


@pytest.fixture(scope="module")
def expected(model, tokenizer):
    found = oracle(model, tokenizer)
    assert {truncated for _, truncated, _ in found.values()} == {True, False}
    assert len({tokens for _, _, tokens in found.values()}) > 3, "rows have to end at different steps"
    return found


@pytest.mark.parametrize("bucket", [8, 128])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_replies_equal_decoding_one_at_a_time(model, tokenizer, expected, rows, bucket, monkeypatch):
    monkeypatch.setattr(slot_loop, "BUCKET", bucket)
    assert plain(replies("continuous", model, tokenizer, batch_size=rows)) == expected


def test_finished_rows_take_no_steps(model, tokenizer, expected):
    """Plain batches run to their longest reply; refilled rows do not."""
    engine = open_engine("continuous", model=model, tokenizer=tokenizer, batch_size=3)
    list(engine.generate(asked(), max_new_tokens=NEW))
    lengths = [min(expected[e.id][2] + 1, NEW) for e in sorted(asked(), key=lambda e: len(e.prompt))]
    in_batches = sum(max(lengths[start : start + 3]) for start in range(0, len(lengths), 3))
    assert sum(lengths) / 3 <= engine.steps + engine.fills  # type: ignore[attr-defined]
    assert engine.steps < 0.8 * in_batches  # type: ignore[attr-defined]


def test_replies_that_end_at_once(model, tokenizer):
    """Every token is an end token."""
    broken = stopping(tiny.model(seed=1))
    broken.generation_config.eos_token_id = list(range(64))
    found = replies("continuous", broken, tokenizer, batch_size=3)
    assert {(reply.text, reply.truncated, reply.tokens) for reply in found.values()} == {("", False, 0)}


def test_replies_that_never_end(tokenizer):
    endless = tiny.model(seed=1)
    with torch.no_grad():
        endless.lm_head.weight[1] = 0
    found = replies("continuous", endless, tokenizer, batch_size=4)
    assert {(reply.truncated, reply.tokens) for reply in found.values()} == {(True, NEW)}
    assert plain(found) == oracle(endless, tokenizer)


@pytest.mark.parametrize("new", [1, 2])
def test_the_shortest_replies(model, tokenizer, new):
    assert replies("continuous", model, tokenizer, new=new, batch_size=4) == replies(
        "transformers", model, tokenizer, new=new, batch_size=4
    )


def test_positions_up_to_the_models_last(model, tokenizer):
    """116 tokens with the template and 12 new ones fill the 128 positions, while short rows idle."""
    long = make_example("w3 " * 113, "w4", "data:7")
    both = [long, *examples(3)]
    assert replies("continuous", model, tokenizer, both, new=12, batch_size=4) == replies(
        "transformers", model, tokenizer, both, new=12, batch_size=4
    )
    with pytest.raises(DataError, match="leave no room for 13 new tokens"):
        replies("continuous", model, tokenizer, both, new=13)


def test_an_attached_adapter_is_used_and_can_be_off(tokenizer, expected):
    adapted = get_peft_model(stopping(tiny.model(seed=1)), tiny.lora(dropout=0.5))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    on = plain(replies("continuous", adapted, tokenizer, batch_size=4))
    with adapted.disable_adapter():
        assert plain(replies("continuous", adapted, tokenizer, batch_size=4)) == expected
    assert on == oracle(adapted.eval().merge_and_unload(), tokenizer)
    assert on != expected


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=64, **SIZES, num_key_value_heads=1, head_dim=16))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=128, n_embd=16, n_layer=1, n_head=2))


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES, **options))


MODELS = {
    "qwen3": qwen3,
    "gpt2": gpt2,
    "one key per head": lambda: llama(num_key_value_heads=2),
    "eager attention": lambda: llama(num_key_value_heads=1, attn_implementation="eager"),
}


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_other_models_with_full_attention(kind, tokenizer):
    torch.manual_seed(3)
    made = MODELS[kind]().eval()
    with torch.no_grad():  # weights of a size at which replies depend on the prompt
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
    found = replies("continuous", made, tokenizer, batch_size=4, new=12)
    assert found == replies("transformers", made, tokenizer, batch_size=4, new=12)
    assert len({reply.text for reply in found.values()}) > 4


def test_bfloat16_runs_in_bfloat16(tokenizer):
    found = replies("continuous", stopping(tiny.model(seed=1, dtype=torch.bfloat16)), tokenizer, batch_size=4)
    assert len({reply.text for reply in found.values()}) > 4


def test_model_is_left_as_it_was(tokenizer):
    left = tiny.model(seed=1).train()
    left.model.layers[0].eval()
    modes = [module.training for module in left.modules()]
    config, attention = left.generation_config, left.config._attn_implementation
    engine = open_engine("continuous", model=left, tokenizer=tokenizer, batch_size=2)
    batches = engine.generate(asked(), max_new_tokens=3)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert [module.training for module in left.modules()] == modes
    assert left.generation_config is config
    assert left.config._attn_implementation == attention == "sdpa"
    assert not left.lm_head._forward_pre_hooks
    assert all(parameter.grad is None for parameter in left.parameters())


def test_rows_that_do_not_fit_are_halved_and_nothing_is_lost(model, tokenizer, expected, monkeypatch, caplog):
    whole, sizes = SlotLoop._fill, []

    def small(self, rows, chosen):
        sizes.append(len(self._slots))
        if len(self._slots) > 2 and (len(sizes) == 1 or len(sizes) > 3):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        whole(self, rows, chosen)

    monkeypatch.setattr(SlotLoop, "_fill", small)
    with caplog.at_level(logging.INFO):
        assert plain(replies("continuous", model, tokenizer, batch_size=8)) == expected
    assert sizes[:5] == [8, 4, 4, 4, 2]  # the third time with four rows, replies were under way
    assert "out of memory, going on with 4 rows" in caplog.text


def test_a_single_prompt_that_does_not_fit_is_a_resource_error(model, tokenizer, monkeypatch):
    def never(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(SlotLoop, "_fill", never)
    with pytest.raises(ResourceError, match=r"single prompt of \d+ tokens"):
        replies("continuous", model, tokenizer)


def test_other_errors_are_not_hidden(model, tokenizer, monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(SlotLoop, "_fill", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        replies("continuous", model, tokenizer)


@pytest.mark.parametrize("sizes", [{"new": 0}, {"batch_size": 0}], ids=["tokens", "rows"])
def test_sizes_below_one_are_refused(model, tokenizer, sizes):
    with pytest.raises(ConfigError, match="expected at least 1"):
        replies("continuous", model, tokenizer, **sizes)


def test_no_examples_no_replies(model, tokenizer):
    assert replies("continuous", model, tokenizer, []) == {}


def mistral():
    return MistralForCausalLM(MistralConfig(vocab_size=64, **SIZES, num_key_value_heads=1, sliding_window=8))


def prefixed():
    return get_peft_model(tiny.model(), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


def elsewhere():
    made = tiny.model()
    made.model.layers[1].to("meta")
    return made


def flash():
    made = tiny.model()
    made.config._attn_implementation = "flash_attention_2"
    return made


def dynamic():
    return llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


REFUSED = {
    "sliding window": (mistral, "mistral layers do not keep all keys and values"),
    "prefix tuning": (prefixed, "virtual tokens"),
    "two devices": (elsewhere, "spread over cpu, meta"),
    "flash attention": (flash, "'flash_attention_2' takes no mask"),
    "dynamic positions": (dynamic, "position encoding 'dynamic'"),
    "encoder": (
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=1)),
        "has an encoder",
    ),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_models_that_it_cannot_run_are_refused_by_name(kind, tokenizer):
    make, words = REFUSED[kind]
    with pytest.raises(UnsupportedError, match=words):
        open_engine("continuous", model=make(), tokenizer=tokenizer)


def test_an_ordinary_model_and_its_adapter_are_no_obstacle(model):
    assert obstacle(model) is None
    assert obstacle(get_peft_model(tiny.model(), tiny.lora())) is None


def test_a_graph_needs_cuda(model, tokenizer):
    with pytest.raises(UnsupportedError, match="graph = true with a model on cpu"):
        open_engine("continuous", model=model, tokenizer=tokenizer, graph=True)
