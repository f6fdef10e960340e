"""Token mixers are found in every kind of decoder, in the language tower alone, and refused where a block has none."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tests import hybrid, tiny
from torch import nn

from holdfast.core.errors import UnsupportedError
from holdfast.models.token_mixers import shifted, token_mixers

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": 1}


def made(name: str, **options):
    config = transformers.AutoConfig.for_model(name, **options)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


DECODERS = {
    "llama": (SMALL, "model.layers.{}.self_attn"),
    "mistral": (SMALL, "model.layers.{}.self_attn"),
    "qwen2": (SMALL, "model.layers.{}.self_attn"),
    "qwen3": (SMALL, "model.layers.{}.self_attn"),
    "gemma2": (SMALL, "model.layers.{}.self_attn"),
    "opt": ({**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}, "model.decoder.layers.{}.self_attn"),
    "gpt2": (GPT, "transformer.h.{}.attn"),
    "bloom": ({"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "transformer.h.{}.self_attention"),
    "gpt_neox": (SMALL, "gpt_neox.layers.{}.attention"),
    "mamba": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "backbone.layers.{}.mixer"),
}


@pytest.mark.parametrize("name", list(DECODERS))
def test_one_in_every_block(name):
    options, path = DECODERS[name]
    found = token_mixers(made(name, **options))
    assert [n for n, _ in found] == [path.format(i) for i in range(2)]


def test_hybrids_give_both_kinds():
    assert [n for n, _ in token_mixers(hybrid.model(linear=3))] == [
        *(f"model.layers.{i}.linear_attn" for i in range(3)),
        "model.layers.3.self_attn",
    ]


def test_mixers_side_by_side_are_both_given():
    options = {**SMALL, "num_hidden_layers": 1, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
    found = token_mixers(made("falcon_h1", **options))
    assert [n for n, _ in found] == ["model.layers.0.mamba", "model.layers.0.self_attn"]


def test_wrappers_of_peft_are_looked_through():
    model = get_peft_model(tiny.model(), LoraConfig(target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"))
    found = token_mixers(model)
    assert [n for n, _ in found] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert found[1][1] is model.get_base_model().model.layers[1].self_attn


def test_the_language_tower_alone_of_a_multimodal_model():
    vision = {"depth": 4, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=hybrid.config(linear=3).to_dict(), vision_config=vision)
    with torch.device("meta"):
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    assert len(model.model.visual.blocks) == 4  # as many as the text model has, with a module `attn` each
    names = [n for n, _ in token_mixers(model)]
    assert len(names) == 4
    assert all(n.startswith("model.language_model.layers.") for n in names)


def refused(model, what):
    with pytest.raises(UnsupportedError, match=what) as caught:
        token_mixers(model)
    assert caught.value.remedy


def test_a_block_without_a_mixer_is_refused():
    model = tiny.model()
    block = model.model.layers[1]
    block.weird = block.self_attn
    del block.self_attn
    refused(model, r"block 1 of LlamaForCausalLM \(LlamaDecoderLayer\) has no token mixer")


def test_a_feed_forward_called_mixer_is_none():
    class TinyMLP(nn.Linear):
        pass

    model = tiny.model()
    model.model.layers[0] = nn.ModuleDict({"mixer": TinyMLP(4, 4)})
    refused(model, "block 0 of LlamaForCausalLM")


def test_shared_mixers_are_refused():
    model = tiny.model()
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    refused(model, "share a token mixer")


@pytest.mark.parametrize("kind", ["other length", "no transformers model"])
def test_no_blocks_are_refused(kind):
    model = tiny.model()
    if kind == "other length":
        model.config.num_hidden_layers = 3
    refused(model if kind == "other length" else nn.Sequential(nn.Linear(2, 2)), "decoder blocks in")


@pytest.mark.parametrize("kind", ["tensor", "tuple"])
def test_shifting_reaches_every_row_and_is_taken_back(kind):
    class Mixer(nn.Module):
        def forward(self, x):
            return x if kind == "tensor" else (x, "weights", None)

    mixer, x = Mixer(), torch.zeros(2, 3, 4)
    with shifted([("m", mixer)], lambda name, h: torch.ones_like(h)):
        found = mixer(x)
    if kind == "tuple":
        assert found[1:] == ("weights", None)
        found = found[0]
    assert torch.equal(found, torch.ones(2, 3, 4))
    assert not mixer._forward_hooks
