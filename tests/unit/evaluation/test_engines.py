"""Engines by name: options checked, `auto` chosen by model and device, and the plain engine."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from tests import tiny
from tests.greedy import NEW, examples, stopping
from transformers import MistralConfig, MistralForCausalLM

from holdfast.core.errors import ConfigError
from holdfast.judging.engines import ENGINES, Engine, open_engine
from holdfast.judging.engines.transformers import generate


@pytest.fixture
def loaded():
    return {"model": stopping(tiny.model(seed=1)), "tokenizer": tiny.tokenizer()}


def test_the_engines_are_named():
    assert list(ENGINES) == ["continuous", "endpoint", "transformers", "vllm"]


def test_an_unknown_engine_is_refused_with_the_nearest(loaded):
    with pytest.raises(ConfigError, match="unknown engine 'continous'") as caught:
        open_engine("continous", **loaded)
    assert "did you mean 'continuous'?" in caught.value.remedy


@pytest.mark.parametrize("name", ["transformers", "continuous"])
def test_an_unknown_option_is_refused(loaded, name):
    with pytest.raises(ConfigError, match=f"engine '{name}' has no option 'grpah'"):
        open_engine(name, **loaded, grpah=True)


def test_a_missing_option_is_refused():
    with pytest.raises(ConfigError, match="engine 'endpoint' needs base_url, model_name"):
        open_engine("endpoint")


@pytest.mark.parametrize("name", ["transformers", "continuous", "auto"])
@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_engines_that_run_the_weights_need_model_and_tokenizer(loaded, name, what):
    with pytest.raises(ConfigError, match=f"got no {what}, expected a loaded {what}"):
        open_engine(name, **{**loaded, what: None})


def test_a_name_is_no_loaded_model(loaded):
    with pytest.raises(ConfigError, match="got a name as its model"):
        open_engine("transformers", model="some/model", tokenizer=loaded["tokenizer"])


@pytest.mark.parametrize("name", ["transformers", "continuous"])
def test_an_engine_says_its_name(loaded, name):
    engine = open_engine(name, **loaded)
    assert isinstance(engine, Engine)
    assert engine.name == name


def test_the_plain_engine_yields_the_replies_of_generate_batch_by_batch(loaded):
    found = list(open_engine("transformers", batch_size=4, **loaded).generate(examples(), max_new_tokens=NEW))
    assert [len(batch) for batch in found] == [4, 4, 1]
    expected = generate(loaded["model"], loaded["tokenizer"], examples(), max_new_tokens=NEW)
    assert {reply.id: reply for batch in found for reply in batch} == {reply.id: reply for reply in expected}


def test_the_plain_engine_keeps_no_state_after_it_is_closed(loaded):
    model = loaded["model"].train()
    config = model.generation_config
    batches = open_engine("transformers", batch_size=2, **loaded).generate(examples(), max_new_tokens=2)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert all(module.training for module in model.modules())
    assert model.generation_config is config


def on_cuda(monkeypatch, kind):
    monkeypatch.setattr(kind, "device", property(lambda self: torch.device("cuda")))


def test_auto_is_plain_on_the_cpu(loaded):
    assert open_engine("auto", **loaded).name == "transformers"


def test_auto_is_continuous_on_cuda(loaded, monkeypatch):
    on_cuda(monkeypatch, type(loaded["model"]))
    assert open_engine("auto", **loaded).name == "continuous"


def test_auto_falls_back_where_the_model_does_not_allow_it_and_says_so(loaded, monkeypatch, caplog):
    config = MistralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    on_cuda(monkeypatch, MistralForCausalLM)
    with caplog.at_level(logging.INFO):
        engine = open_engine("auto", model=MistralForCausalLM(config), tokenizer=loaded["tokenizer"])
    assert engine.name == "transformers"
    assert "mistral layers do not keep all keys and values" in caplog.text


def test_naming_the_engines_and_the_store_loads_no_torch():
    code = "import sys, holdfast.judging.engines, holdfast.judging.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
