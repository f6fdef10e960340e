"""What an adapter and a configuration may ask for, and devices that are not there."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny_checkpoints import tiny_llama

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.models.handle import require_device
from holdfast.models.limits import require_loadable, require_sizes_of, tensor_shapes


def write(folder, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4} | settings), encoding="utf-8")
    save_file({"a.lora_A.weight": torch.zeros(4, 16)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": r".*\.(q|v)_proj$"},
        {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "r": 16},
        {"target_modules": ["a+)("], "rank_pattern": {"^model.layers.0.q_proj": 8, r"model\.(a|b)": 2}},
    ],
)
def test_ordinary_settings(tmp_path, settings):
    require_loadable(write(tmp_path / "adapter", **settings), tiny_llama())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"r": 17}, "its r is 17, the largest dimension of its tensors 16"),
        ({"r": 1e9}, "its r is"),
        ({"rank_pattern": {"q": 17}}, "its rank_pattern is 17"),
        ({"target_modules": "(a"}, "the pattern under target_modules is no regular expression"),
        ({"modules_to_save": ["(a|"]}, "the pattern under modules_to_save is no regular expression"),
    ],
)
def test_settings_beyond_the_file(tmp_path, settings, said):
    with pytest.raises(CheckpointError, match=said):
        require_loadable(write(tmp_path / "adapter", **settings), tiny_llama())


@pytest.mark.parametrize("kind", [None, 5, ["LORA"], "lora", "LORB"])
def test_types_that_peft_does_not_know(tmp_path, kind):
    with pytest.raises(ConfigError, match="is unknown to the installed PEFT"):
        require_loadable(write(tmp_path / "adapter", peft_type=kind), tiny_llama())


def test_shapes_are_read_from_the_header(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    assert tensor_shapes(tmp_path / "x.safetensors") == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(("name", "most"), [("num_hidden_layers", 2), ("hidden_size", 64), ("vocab_size", 64)])
def test_a_configuration_for_other_weights(tmp_path, name, most):
    save_file({"model.layers.1.w": torch.zeros(16, 8)}, tmp_path / "x.safetensors")
    for value, fits in ((most, True), (most + 1, False), ("x", True), (None, True)):
        config = SimpleNamespace(get_text_config=lambda value=value: SimpleNamespace(**{name: value}))
        if fits:
            require_sizes_of(config, [tmp_path / "x.safetensors"], "x")
        else:
            with pytest.raises(CheckpointError, match=f"asks for {name} {value}"):
                require_sizes_of(config, [tmp_path / "x.safetensors"], "x")


def test_devices(monkeypatch):
    assert require_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device 'gpu' is unknown"):
        require_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert require_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ResourceError, match="torch sees 2 CUDA devices"):
        require_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="torch sees no CUDA device"):
        require_device(torch.device("cuda"))
