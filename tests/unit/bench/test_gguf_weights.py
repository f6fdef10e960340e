"""`benchmarks.held_safety.weights`: the tensors of a GGUF file, dequantised in pieces."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from benchmarks.held_safety import weights
from safetensors.torch import load_file, save_file

SHAPES = {"token_embd.weight": (64, 32), "blk.0.attn_q.weight": (32, 64), "blk.0.attn_norm.weight": (32,)}
"""More than one piece each but for the norm, at the size of piece of this test."""


@pytest.fixture
def quantised(tmp_path):
    """A GGUF file in Q8_0 with its norm in float32, and what the package itself makes of it."""
    path, expected = tmp_path / "m.gguf", {}
    writer = gguf.GGUFWriter(path, "qwen2")
    for seed, (name, shape) in enumerate(SHAPES.items()):
        values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        packed = gguf.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        expected[weights.named(name)] = torch.from_numpy(gguf.dequantize(packed, kind).astype(np.float32)).bfloat16()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = tmp_path / "converted"
    folder.mkdir()
    save_file(expected, folder / "model.safetensors", metadata={"format": "pt"})
    return path, folder, expected


def test_pieces_make_the_weights_that_the_whole_file_makes(quantised, tmp_path, monkeypatch):
    path, folder, expected = quantised
    monkeypatch.setattr(weights, "CHUNK", 100)  # not a whole number of blocks: rounded down to one
    monkeypatch.setenv("PROCS", "1")
    plan = json.loads(json.dumps(weights.table(path, folder)))
    weights.make(plan, path, tmp_path / "made")
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    assert weights.digest(tmp_path / "made" / "model.safetensors") == plan["sha256"]


def test_weights_of_another_file_are_refused_and_removed(quantised, tmp_path, monkeypatch):
    path, folder, _ = quantised
    monkeypatch.setenv("PROCS", "1")
    plan = weights.table(path, folder)
    damaged = bytearray(path.read_bytes())
    damaged[plan["tensors"][0]["offset"] + 5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(SystemExit, match="expected " + plan["sha256"]):
        weights.make(plan, path, tmp_path / "made")
    assert not (tmp_path / "made" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.7.attn_v.bias", "model.layers.7.self_attn.v_proj.bias"),
        ("blk.12.attn_output.weight", "model.layers.12.self_attn.o_proj.weight"),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ],
)
def test_tensors_have_the_names_of_transformers(tensor, name):
    assert weights.named(tensor) == name
