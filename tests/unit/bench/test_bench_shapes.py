"""Random models: the published sizes, and weights as transformers draws them."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.shapes import NAMES
from transformers import AutoModelForCausalLM

from holdfast_lab.bench.settings import ADAPTED, EVERY, MODULES, SHAPES, empty_model, random_model

PARAMETERS = {"llama-3.1-8b": 8_030_261_248, "qwen3.5-4b": 4_205_751_296, "smollm2-135m": 134_515_008}
SMALL = ["tiny", "tiny-hybrid"]


@pytest.mark.parametrize("shape", PARAMETERS)
def test_parameters_of_the_published_shapes(shape):
    model = empty_model(shape)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[shape]
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_every_shape_has_a_name():
    assert set(NAMES) == set(SHAPES)


@pytest.mark.parametrize("shape", SMALL)
def test_losses_of_a_random_model_are_sensible(shape):
    model = random_model(shape)
    tokens = torch.randint(3, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert loss == pytest.approx(math.log(model.config.vocab_size), abs=0.3)


@pytest.mark.parametrize("shape", SMALL)
def test_weights_and_buffers_are_as_in_a_model_made_the_usual_way(shape):
    made = random_model(shape)
    usual = AutoModelForCausalLM.from_config(made.config)
    for name, buffer in usual.named_buffers():
        torch.testing.assert_close(made.get_buffer(name), buffer)
    for name, weight in usual.named_parameters():
        own = made.get_parameter(name)
        if "norm" in name or "dt_bias" in name:
            torch.testing.assert_close(own, weight)
        elif "A_log" in name:
            assert ((own >= math.log(0.001)) & (own <= math.log(16.01))).all()
        else:
            assert own.std().item() == pytest.approx(0.02, rel=0.25)


def test_the_same_seed_gives_the_same_weights():
    first, again, other = (random_model("tiny", seed=s).state_dict() for s in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_hybrid_has_adapted_modules():
    names = [name for name, _ in random_model("tiny-hybrid").named_modules() if name.endswith(ADAPTED)]
    assert len(names) == len(ADAPTED)  # one full-attention layer


def test_every_linear_layer_but_the_head_can_be_named():
    models = [empty_model(shape) for shape in SHAPES]
    linear = {name for model in models for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    assert {EVERY} | {name.rpartition(".")[2] for name in linear} - {"lm_head"} == set(MODULES)
