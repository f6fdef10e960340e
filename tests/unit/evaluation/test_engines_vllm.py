"""The vLLM engine against a stand-in for the package: what it is asked, and how its outputs become replies."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from peft import get_peft_model
from tests import tiny
from tests.greedy import NEW, examples

from holdfast.core.errors import ConfigError, ResourceError, UnsupportedError
from holdfast.judging.engines import open_engine
from holdfast.judging.prompts import prompt_ids


class StandIn:
    """Replies with the prompt's length in words: ended by <eos>, or cut at `max_tokens`."""

    made: ClassVar[list[dict]] = []
    calls: ClassVar[list[tuple]] = []

    def __init__(self, **given):
        StandIn.made.append(given)

    def generate(self, prompts, settings, lora_request, use_tqdm):
        StandIn.calls.append((prompts, settings, lora_request))
        found = []
        for prompt in prompts:
            length = len(prompt["prompt_token_ids"])
            cut = length > settings["max_tokens"]
            tokens = [10] * settings["max_tokens"] if cut else [*([11] * (length - 1)), 1]
            reason = "length" if cut else "stop"
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(tokens), finish_reason=reason)]))
        return found


@pytest.fixture
def vllm(monkeypatch):
    package, lora, request = (ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    package.LLM, package.SamplingParams = StandIn, lambda **given: given  # type: ignore[attr-defined]
    package.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    request.LoRARequest = lambda *given: given  # type: ignore[attr-defined]
    for module in (package, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    StandIn.made, StandIn.calls = [], []
    return StandIn


def test_without_the_package_it_is_a_resource_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ResourceError, match="vllm is not installed") as caught:
        open_engine("vllm", model="some/model", tokenizer=tiny.tokenizer())
    assert caught.value.remedy == "pip install 'holdfast-llm[vllm]'"


def test_prompts_go_over_as_tokens_and_outputs_become_replies(vllm):
    tokenizer = tiny.tokenizer()
    engine = open_engine("vllm", model="some/model", tokenizer=tokenizer, batch_size=1, options={"dtype": "float32"})
    found = {r.id: r for batch in engine.generate(examples(), max_new_tokens=NEW) for r in batch}
    assert vllm.made == [{"model": "some/model", "max_num_seqs": 1, "dtype": "float32"}]
    settings = vllm.calls[0][1]
    assert settings == {"temperature": 0.0, "max_tokens": NEW, "stop_token_ids": [1]}
    assert vllm.calls[0][2] is None
    kinds = set()
    for example, ids in zip(examples(), prompt_ids(tokenizer, examples(), "chat"), strict=True):
        reply, cut = found[example.id], len(ids) > NEW
        kinds.add(cut)
        assert {"prompt_token_ids": ids} in vllm.calls[0][0]
        assert (reply.truncated, reply.tokens) == (cut, NEW if cut else len(ids) - 1)
        assert reply.text == " ".join(["w3" if cut else "w4"] * reply.tokens)
    assert kinds == {True, False}


def test_the_model_is_loaded_once_and_replies_come_in_pieces(vllm):
    engine = open_engine("vllm", model="some/model", tokenizer=tiny.tokenizer(), batch_size=1)
    asked = examples(40)
    sizes = [len(batch) for batch in engine.generate(asked, max_new_tokens=2)]
    list(engine.generate(asked, max_new_tokens=2))
    assert sizes == [16, 16, 8]
    assert len(vllm.made) == 1


def test_an_adapter_goes_along_as_a_folder(vllm, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 32}))
    engine = open_engine(
        "vllm", model=tiny.model(), model_ref="some/model", adapter=tmp_path, revision="abc", tokenizer=tiny.tokenizer()
    )
    list(engine.generate(examples(), max_new_tokens=2))
    assert vllm.made[0] == {
        "model": "some/model", "max_num_seqs": 32, "revision": "abc", "enable_lora": True, "max_lora_rank": 32,
    }  # fmt: skip
    assert vllm.calls[0][2] == ("adapter", 1, str(tmp_path))


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (4, 8), (8, 8), (12, 16), (64, 64)])
def test_the_room_for_an_adapter_is_one_that_vllm_knows(vllm, tmp_path, rank, room):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    engine = open_engine("vllm", model="some/model", adapter=tmp_path, tokenizer=tiny.tokenizer())
    list(engine.generate(examples(1), max_new_tokens=2))
    assert vllm.made[0]["max_lora_rank"] == room


@pytest.mark.parametrize("reason", ["abort", None, "error"])
def test_a_row_that_did_not_end_by_itself_is_no_reply(vllm, monkeypatch, reason):
    ended = SimpleNamespace(outputs=[SimpleNamespace(token_ids=(10, 11), finish_reason=reason)])
    monkeypatch.setattr(vllm, "generate", lambda self, prompts, *_, **__: [ended] * len(prompts))
    engine = open_engine("vllm", model="some/model", tokenizer=tiny.tokenizer())
    with pytest.raises(ResourceError, match="a row ended by"):
        list(engine.generate(examples(1), max_new_tokens=2))


def test_a_folder_without_an_adapter_is_refused(vllm, tmp_path):
    with pytest.raises(ConfigError, match=r"holds no adapter_config\.json"):
        open_engine("vllm", model="some/model", adapter=tmp_path, tokenizer=tiny.tokenizer())


def test_a_loaded_model_is_refused(vllm):
    with pytest.raises(UnsupportedError, match="got PeftModelForCausalLM as its model"):
        open_engine("vllm", model=get_peft_model(tiny.model(), tiny.lora()), tokenizer=tiny.tokenizer())


def test_a_missing_tokenizer_is_refused(vllm):
    with pytest.raises(ConfigError, match="got no tokenizer"):
        open_engine("vllm", model="some/model")
