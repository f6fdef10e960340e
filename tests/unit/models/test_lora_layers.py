"""Which adapted modules are found, under which names, and which adapters are refused."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tests import hybrid, tiny
from transformers import GPT2Config, GPT2LMHeadModel

from holdfast.core.errors import UnsupportedError
from holdfast.models.lora_layers import lora_layers


def adapted(**options):
    return get_peft_model(tiny.model(), tiny.lora(**options))


def test_names_factors_and_base_weight():
    base = tiny.model()
    stored = {name: weight.clone() for name, weight in base.state_dict().items()}
    layers = lora_layers(get_peft_model(base, tiny.lora()), defense="x")
    assert [layer.name for layer in layers] == sorted(
        f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qkv"
    )
    for layer in layers:
        assert torch.equal(layer.base_weight, stored[f"{layer.name}.weight"])
        assert (layer.B.shape[0], layer.A.shape[1]) == layer.base_weight.shape
        assert layer.A.shape[0] == layer.B.shape[1] == 4
        assert layer.scaling == 2.0
        assert not layer.base_weight.requires_grad


def test_a_module_whose_output_is_as_wide_as_the_rank_is_told_by_name():
    """k_proj: d_out = r = 16; A is r x 32 and B 16 x 16."""
    config = LoraConfig(r=16, target_modules=["k_proj"], task_type="CAUSAL_LM")
    layer = lora_layers(get_peft_model(tiny.model(), config), defense="x")[0]
    assert layer.A.shape == (16, 32)
    assert layer.B.shape == (16, 16)
    assert not layer.B.any()
    assert layer.A.any()


def test_scaling_by_pattern_and_rslora():
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 9}, use_rslora=True,
        alpha_pattern={"layers.0.self_attn.q_proj": 20},
    )  # fmt: skip
    found = {layer.name: layer.scaling for layer in lora_layers(get_peft_model(tiny.model(), config), defense="x")}
    assert found["model.layers.0.self_attn.q_proj"] == 10.0
    assert found["model.layers.1.self_attn.q_proj"] == 4.0
    assert found["model.layers.1.self_attn.v_proj"] == pytest.approx(8 / 3)


def test_hybrid_attention_modules_carry_their_own_names():
    names = [layer.name for layer in lora_layers(get_peft_model(hybrid.model(linear=3), hybrid.lora()), defense="x")]
    assert sum(name.endswith("linear_attn.in_proj_qkv") for name in names) == 3
    assert sum(name.endswith("self_attn.q_proj") for name in names) == 1
    assert {f"{name}.weight" for name in names} <= set(hybrid.model(linear=3).state_dict())


def two_adapters():
    model = adapted()
    model.add_adapter("second", tiny.lora())
    return model


def merged():
    model = adapted()
    model.merge_adapter()
    return model


def gpt2():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
    return get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))


def gpt2_unmarked():
    model = gpt2()
    model.peft_config["default"].fan_in_fan_out = False
    return model


def of(**options):
    return lambda: get_peft_model(tiny.model(), LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options}))


REFUSED = {
    "no adapter": (tiny.model, "no adapter"),
    "two": (two_adapters, "several adapters"),
    "prompt": (
        lambda: get_peft_model(tiny.model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "PROMPT_TUNING instead of LoRA",
    ),
    "dora": (of(use_dora=True), "use_dora"),
    "bias": (of(bias="lora_only"), "trained biases"),
    "lora bias": (of(lora_bias=True), "trained biases"),
    "in full": (of(modules_to_save=["lm_head"]), "modules_to_save"),
    "tokens": (of(trainable_token_indices=[3]), "trainable_token_indices"),
    "embedding": (of(target_modules=["q_proj", "embed_tokens"]), "embed_tokens is an embedding"),
    "transposed": (gpt2, "fan_in_fan_out"),
    "conv": (gpt2_unmarked, "is a Conv1D"),
    "merged": (merged, "is merged into its base"),
    "variant": (of(alora_invocation_tokens=[3]), "a variant of LoRA"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    make, what = REFUSED[case]
    with pytest.raises(UnsupportedError) as caught:
        lora_layers(make(), defense="guard")
    assert what in caught.value.what
    assert "'guard'" in caught.value.what
