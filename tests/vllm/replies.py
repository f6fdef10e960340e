"""Replies and log-probabilities of vLLM itself against transformers'; the suite does not collect this file.

It needs an environment with vLLM and holdfast. On a machine without a GPU vLLM has to be built for CPUs. The model is a
small Llama, since vLLM's kernels know heads from 32 numbers on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import holdfast
from holdfast.data.examples import make_example
from holdfast.judging.engines import open_engine
from tests import tiny

pytest.importorskip("vllm", reason="an environment with vLLM")
OPTIONS = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True}
EXAMPLES = [make_example(row["prompt"], row["completion"]) for row in tiny.rows(12, seed=2)]
PORT = 8199
WITHIN = 300  # seconds for a server to start


def write_model(folder: Path, scale: float) -> Path:
    """Replies differ by prompt; some end by themselves, since the end token is nearly as likely as a frequent word."""
    torch.manual_seed(0)
    tokenizer = tiny.tokenizer()
    end = tokenizer.eos_token_id
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=end,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight.mul_(20 * scale)
        model.lm_head.weight[end] = 1.01 * model.lm_head.weight[tokenizer.convert_tokens_to_ids("w11")]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_model(made / "before", 1.0)
    write_model(made / "after", 1.05)
    torch.manual_seed(1)
    settings = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(made / "before"), settings)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(made / "adapter")
    return made


def replies(engine: Any) -> dict[str, tuple[str, bool]]:
    return {
        reply.id: (reply.text, reply.truncated)
        for batch in engine.generate(EXAMPLES, max_new_tokens=16)
        for reply in batch
    }


def by_transformers(folder: Path, name: str, adapter: Path | None = None) -> dict[str, tuple[str, bool]]:
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    return replies(open_engine("transformers", model=model.eval(), tokenizer=tokenizer_of(folder)))


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder / "before")


def require_variety(found: dict[str, tuple[str, bool]]) -> None:
    """Else agreement would say little."""
    assert len(set(found.values())) > len(found) / 2


def require_ends(found: dict[str, tuple[str, bool]]) -> None:
    """Some replies end by themselves, others are cut."""
    assert {truncated for _, truncated in found.values()} == {True, False}


@pytest.mark.parametrize("adapted", [False, True])
def test_replies_are_those_of_transformers(folder, adapted):
    adapter = folder / "adapter" if adapted else None
    expected = by_transformers(folder, "before", adapter)
    require_variety(expected)
    if not adapted:
        require_ends(expected)
    engine = open_engine(
        "vllm", model_ref=folder / "before", tokenizer=tokenizer_of(folder), adapter=adapter, batch_size=4,
        options=OPTIONS,
    )  # fmt: skip
    assert replies(engine) == expected


@pytest.fixture(scope="module")
def server(folder):
    """The address of vLLM's own server of the model after."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "after")]
    words += ["--served-model-name", "mine", "--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4"]
    words += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(PORT)]
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ}) as run:
        try:
            for _ in range(WITHIN):
                time.sleep(1)
                assert run.poll() is None, (folder / "log").read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health")
                    break
                except OSError:
                    continue
            yield f"http://127.0.0.1:{PORT}/v1"
        finally:
            run.terminate()


def test_a_server_replies_as_transformers_does(folder, server):
    expected = by_transformers(folder, "after")
    require_variety(expected)
    require_ends(expected)
    assert replies(open_engine("endpoint", base_url=server, model_name="mine")) == expected


def test_an_audit_through_logprobs_is_the_local_one(folder, server):
    endpoint = f"endpoint:base_url={server},model_name=mine"
    local, asked = (
        holdfast.audit(folder / "before", after, EXAMPLES, dtype="float32").to_pandas().set_index("id")
        for after in (folder / "after", endpoint)
    )
    apart = (asked.loc[local.index, "nll_sum"] - local["nll_sum"]).abs().max()
    print(f"largest difference of a reply's loss: {apart:.1e} nats; the models differ by {local['nll_sum'].max():.1f}")
    assert apart < 1e-3
    assert local["nll_sum"].abs().max() > 1.0
