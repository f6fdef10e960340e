"""Every kind of model is either packed exactly or declined with a reason."""

from __future__ import annotations

import pytest
import torch
import transformers as t
from tests import hybrid
from tests.unit.fused.comparing import adapted, apart, encoded, own, packed, passes, tiny

from holdfast.fused.packed_rows import encoded_rows
from holdfast.fused.probe import packing_problem
from holdfast.fused.support import batch_dependent, plain_layers

QKV = ("q_proj", "k_proj", "v_proj")
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}

RIGHT = {
    "llama": (t.LlamaConfig, QKV, {}),
    "qwen2": (t.Qwen2Config, QKV, {}),
    "qwen3": (t.Qwen3Config, QKV, {"head_dim": 8}),
    "gemma3": (t.Gemma3TextConfig, QKV, {"head_dim": 8, **SLIDING}),
    "gemma3, window longer than the rows": (t.Gemma3TextConfig, QKV, {"head_dim": 8, **SLIDING, "sliding_window": 64}),
    "mistral, window shorter than the rows": (t.MistralConfig, QKV, {"head_dim": 8, "sliding_window": 4}),
    "mistral, window longer than the rows": (t.MistralConfig, QKV, {"head_dim": 8, "sliding_window": 64}),
    "mistral, window of a row's length": (t.MistralConfig, QKV, {"head_dim": 8, "sliding_window": 9}),
    "phi3": (t.Phi3Config, ("qkv_proj",), {"sliding_window": 5}),
    "gpt_neox": (t.GPTNeoXConfig, ("query_key_value",), {}),
    "starcoder2": (t.Starcoder2Config, QKV, {"residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": 4}),
    "cohere2": (t.Cohere2Config, QKV, {"head_dim": 8, "tie_word_embeddings": True, **SLIDING}),
    "granite": (t.GraniteConfig, QKV, {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "olmo2": (t.Olmo2Config, QKV, {}),
    "smollm3": (t.SmolLM3Config, QKV, {"no_rope_layers": [1, 0]}),
    "falcon_h1": (t.FalconH1Config, (*QKV, "in_proj"), {"head_dim": 8, "mamba_d_ssm": 32, **MAMBA, "mamba_n_heads": 4}),
    "lfm2": (t.Lfm2Config, (*QKV, "in_proj"), {"layer_types": ["conv", "full_attention"]}),
    "bamba": (t.BambaConfig, (*QKV, "in_proj"), {"attn_layer_indices": [1], **MAMBA}),
}
DECLINED = {
    "gemma2's soft cap": (t.Gemma2Config, QKV, {"head_dim": 8}, "softcap"),
    "gptj's own attention": (t.GPTJConfig, QKV, {"rotary_dim": 4, **NO_DROPOUT}, "change with those packed beside"),
    "bloom's own attention": (t.BloomConfig, ("query_key_value",), {"hidden_dropout": 0.0}, "change with those packed"),
    "rwkv's token shift": (t.RwkvConfig, ("key", "value"), {"attention_hidden_size": 32}, "change with those packed"),
}
BY_NAME = {
    "gpt2's transposed weights": (t.GPT2Config, ("c_attn",), NO_DROPOUT, "transposed weights"),
    "falcon's own linear": (t.FalconConfig, ("query_key_value",), {"alibi": True, "hidden_dropout": 0.0}, "FalconLin"),
    "mixtral": (t.MixtralConfig, QKV, {"num_local_experts": 2}, "experts"),
    "qwen2_moe": (
        t.Qwen2MoeConfig, QKV,
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
        "experts",
    ),
    "phi's dropout": (t.PhiConfig, QKV, {"resid_pdrop": 0.1}, "dropout inside the model"),
    "llama's attention dropout": (t.LlamaConfig, QKV, {"attention_dropout": 0.1}, "dropout inside the model"),
}  # fmt: skip
TASK, SIDE = (9, 14, 3), (5, 11)


def made(kind):
    config, target, settings, *_ = kind
    return tiny(config, target=target, **settings)


def exact(model) -> None:
    run = passes(model)
    groups = [encoded_rows(encoded(TASK)), encoded_rows(encoded(SIDE, seed=1))]
    (states, gradients), (true_states, true_gradients) = packed(run, groups), own(model, run, groups)
    assert apart(states, true_states) <= 1e-5
    for g, e in zip(gradients, true_gradients, strict=True):
        assert e.any()
        assert apart(g, e) <= 1e-5


@pytest.mark.parametrize("name", RIGHT)
def test_packed_states_and_gradients_are_the_models_own(name):
    model = made(RIGHT[name])
    assert packing_problem(passes(model), encoded((*TASK, *SIDE)), 0) is None
    exact(model)


def test_a_hybrid_with_adapted_linear_attention_is_exact():
    model = adapted(hybrid.model(), hybrid.ADAPTED)
    assert packing_problem(passes(model), encoded((*TASK, *SIDE)), 0) is None
    exact(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DECLINED)
def test_what_packing_breaks_is_found_by_trying(name, dtype):
    model = made(DECLINED[name]).to(dtype)
    assert DECLINED[name][-1] in packing_problem(passes(model), encoded((*TASK, *SIDE)), 0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral, window shorter than the rows", "falcon_h1"])
def test_rounding_to_bfloat16_is_not_taken_for_an_error(name):
    model = made(RIGHT[name]).to(torch.bfloat16)
    assert packing_problem(passes(model), encoded((*TASK, *SIDE)), 0) is None


@pytest.mark.parametrize("name", BY_NAME)
def test_what_a_model_is_made_of_declines_it(name):
    assert BY_NAME[name][-1] in plain_layers(made(BY_NAME[name]))


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "target", "settings"),
    [
        (t.Phi3Config, ("qkv_proj",), {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
        (t.LlamaConfig, QKV, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
                              "max_position_embeddings": 8}),
    ],
)  # fmt: skip
def test_a_rotary_embedding_that_looks_at_the_whole_batch_is_declined(config, target, settings):
    """One long task row would change what a constraint's short rows are measured with."""
    found = tiny(config, target=target, **settings).get_base_model().config
    assert "rotary embeddings change all rows" in batch_dependent(found, 9)
    assert "rotary embeddings change all rows" in batch_dependent(found, None)
    assert batch_dependent(found, 8) is None
    assert batch_dependent(made(RIGHT["llama"]).get_base_model().config, None) is None
