"""Fingerprints follow the stored numbers and nothing else."""

import copy
import hashlib
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_checkpoints import tiny_llama
from torch import nn

from holdfast.core.hashing import sha256_lines
from holdfast.models import fingerprint
from holdfast.models.fingerprint import (
    adapter_fingerprint,
    model_fingerprint,
    tensors_fingerprint,
)


def with_lora(seed: int = 0, **settings) -> PeftModel:
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **settings))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def test_value_is_the_documented_formula():
    weight = torch.tensor([[1.0, -2.0]])
    digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    assert tensors_fingerprint({"w": weight}) == sha256_lines([f"w torch.float32 [1, 2] {digest}"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_numbers_same_fingerprint(dtype):
    model = tiny_llama(dtype=dtype)
    twin = copy.deepcopy(model).train().requires_grad_(False)
    assert model_fingerprint(model) == model_fingerprint(twin)


def test_survives_saving_and_loading(tmp_path: Path):
    model = tiny_llama(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert model_fingerprint(type(model).from_pretrained(tmp_path)) == model_fingerprint(model)


def test_every_parameter_and_buffer_counts():
    model = tiny_llama()
    model.register_buffer("extra", torch.zeros(3))
    before = model_fingerprint(model)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied to the embeddings
            continue
        old = tensor.flatten()[-1].item()
        tensor.view(-1)[-1] += 1
        assert model_fingerprint(model) != before, name
        tensor.view(-1)[-1] = old
    assert model_fingerprint(model) == before


def test_one_ulp_in_bf16_counts():
    model = tiny_llama(dtype=torch.bfloat16)
    before = model_fingerprint(model)
    weight = model.model.layers[0].mlp.up_proj.weight.data
    weight.view(torch.int16)[0, 0] += 1
    assert model_fingerprint(model) != before


def test_name_shape_and_dtype_count():
    values = torch.zeros(4)
    seen = {
        tensors_fingerprint(tensors)
        for tensors in (
            {"a": values},
            {"b": values},
            {"a": values.reshape(2, 2)},
            {"a": values.view(torch.int32)},
            {"a": torch.zeros(4), "b": torch.zeros(4)},
        )
    }
    assert len(seen) == 5


def test_tied_weights_are_hashed_once(monkeypatch):
    hashed = []
    original = fingerprint._tensor_digest
    monkeypatch.setattr(fingerprint, "_tensor_digest", lambda t: hashed.append(t.shape) or original(t))
    model = tiny_llama(tied=True)
    model_fingerprint(model)
    assert len(hashed) == len(list(model.parameters()))


def test_pieces_and_layout_do_not_matter(monkeypatch):
    tensor = torch.randn(7, 5)
    whole = tensors_fingerprint({"t": tensor})
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 3)
    assert tensors_fingerprint({"t": tensor}) == whole
    assert tensors_fingerprint({"t": tensor.t().contiguous().t()}) == whole


def test_views_of_one_storage_are_not_taken_for_tied():
    storage = torch.arange(6.0)
    apart = {"a": storage[:3].clone(), "b": storage[3:].clone()}
    assert tensors_fingerprint({"a": storage[:3], "b": storage[3:]}) == tensors_fingerprint(apart)


def test_empty_and_scalar_tensors():
    assert tensors_fingerprint({"a": torch.empty(0), "b": torch.empty(0)}) != tensors_fingerprint({"a": torch.empty(0)})
    assert tensors_fingerprint({"a": torch.tensor(1.0)}) != tensors_fingerprint({"a": torch.tensor(2.0)})


def test_adapter_none_for_a_plain_model():
    assert adapter_fingerprint(tiny_llama()) is None


def test_adapter_survives_saving_and_loading(tmp_path: Path):
    model = with_lora()
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert adapter_fingerprint(again) == adapter_fingerprint(model)


def test_adapter_depends_on_weights_and_settings_but_not_on_the_base():
    fingerprints = {adapter_fingerprint(with_lora(0)), adapter_fingerprint(with_lora(1))}
    fingerprints.add(adapter_fingerprint(with_lora(0, lora_alpha=99)))
    assert len(fingerprints) == 3
    moved = with_lora(0)
    moved.base_model.model.model.embed_tokens.weight.data += 1
    moved.peft_config["default"].base_model_name_or_path = "elsewhere"
    assert adapter_fingerprint(moved) == adapter_fingerprint(with_lora(0))
