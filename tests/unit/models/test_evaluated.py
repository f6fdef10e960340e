"""Adapters beside their base: as they are evaluated, and as they go on being trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_checkpoints import tiny_llama, tiny_tokenizer

from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.models.handle import load_adapter_pair, load_model, load_unmerged

TARGETS = ["q_proj", "v_proj"]
IDS = torch.tensor([[5, 9, 11, 4]])


def lora(**changes) -> LoraConfig:
    settings = {"r": 2, "lora_alpha": 8, "lora_dropout": 0.25, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**settings, **changes})


@pytest.fixture
def adapter(base_dir: Path, tmp_path: Path):
    """Save an adapter with weights that do something: `adapter(use_dora=True)`."""

    def save(name: str = "adapter", base: Path = base_dir, **changes) -> Path:
        torch.manual_seed(1)
        model = get_peft_model(load_model(base), lora(**changes))
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if "lora_B" in key:
                    weight.normal_(0, 0.2)
        model.base_model.model.name_or_path = str(base)
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_a_full_model_is_loaded_as_it_is(base_dir):
    model, tokenizer = load_unmerged(base_dir, device="cpu")
    assert torch.equal(logits(model), logits(load_model(base_dir)))
    assert not model.training
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


def test_an_adapter_is_attached_in_evaluation_mode_and_its_base_stays(base_dir, adapter):
    folder = adapter()
    model, _ = load_unmerged(folder, device="cpu")
    assert not any(module.training for module in model.modules())  # a dropout of 1/4 would show
    torch.testing.assert_close(logits(model), logits(load_model(folder)))
    assert not torch.allclose(logits(model), logits(load_model(base_dir)))
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(load_model(base_dir)))


def test_a_small_update_survives_on_a_bfloat16_base(base_dir, adapter):
    """Merged, most of it is rounded away, which is why it is not merged."""
    tiny_llama(dtype=torch.bfloat16).save_pretrained(base_dir)
    folder = adapter(r=1)
    weights = folder / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({k: v * (1e-4 if "lora_B" in k else 1) for k, v in load_file(weights).items()}, weights)
    base, merged = (load_model(one, dtype="bfloat16").state_dict() for one in (base_dir, folder))
    changed = [(merged[key] != base[key]).float().mean().item() for key in base if key.split(".")[-2] in TARGETS]
    assert max(changed) < 0.5
    model, _ = load_unmerged(folder, dtype="bfloat16", device="cpu")
    delta = [m.get_delta_weight("default") for m in model.modules() if hasattr(m, "get_delta_weight")]
    assert len(delta) == 4
    assert min((d != 0).float().mean().item() for d in delta) > 0.9


def test_the_base_of_an_adapter_may_be_an_adapter(adapter):
    first = adapter("first")
    second = adapter("second", base=first)
    model, _ = load_unmerged(second, device="cpu")
    torch.testing.assert_close(logits(model), logits(load_model(second)))
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(load_model(first)))


def test_an_adapter_with_missing_weights_is_refused(adapter):
    from safetensors.torch import load_file, save_file

    folder = adapter()
    weights = folder / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "layers.1" not in k}, weights)
    for load in (lambda: load_unmerged(folder, device="cpu"), lambda: load_adapter_pair(folder, lora())):
        with pytest.raises((ConfigError, CheckpointError)):
            load()


def test_prompt_learning_adapters_are_refused_by_name(base_dir, tmp_path):
    model = get_peft_model(load_model(base_dir), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    model.peft_config["default"].base_model_name_or_path = str(base_dir)
    model.save_pretrained(tmp_path / "prompt")
    with pytest.raises(UnsupportedError, match="PROMPT_TUNING"):
        load_unmerged(tmp_path / "prompt", device="cpu")
    with pytest.raises(UnsupportedError, match="PROMPT_TUNING"):
        load_adapter_pair(tmp_path / "prompt", lora())


def test_a_tokenizer_larger_than_the_model_is_refused(base_dir, adapter):
    folder = adapter()
    tiny_tokenizer([*tiny_tokenizer().get_vocab(), "more", "still"]).save_pretrained(folder)
    with pytest.raises(ConfigError, match="embeddings"):
        load_unmerged(folder, device="cpu")


def test_a_continued_adapter_starts_where_it_stood_and_is_trained(base_dir, adapter):
    folder = adapter()
    model, tokenizer = load_adapter_pair(folder, lora())
    torch.testing.assert_close(logits(model.eval()), logits(load_model(folder)))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert len(trained) == 2 * 2 * len(TARGETS)
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


def test_a_run_on_all_linear_layers_continues_an_adapter_on_the_layers_it_has(adapter):
    model, _ = load_adapter_pair(adapter(), lora(target_modules="all-linear"))
    assert set(model.peft_config["default"].target_modules) == set(TARGETS)


@pytest.mark.parametrize(
    "change",
    [{"r": 4}, {"lora_alpha": 4}, {"lora_dropout": 0.0}, {"target_modules": ["q_proj"]}],
    ids=["rank", "alpha", "dropout", "modules"],
)
def test_an_adapter_of_another_shape_is_not_continued(adapter, change):
    with pytest.raises(ConfigError, match=f"its {next(iter(change))} is .*, the run's lora block says"):
        load_adapter_pair(adapter(), lora(**change))


@pytest.mark.parametrize(
    ("change", "said"),
    [({"use_dora": True}, "DoRA"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
     ({"bias": "lora_only"}, "biases")],
    ids=["dora", "modules", "bias"],
)  # fmt: skip
def test_an_adapter_that_is_more_than_lora_is_not_continued(adapter, change, said):
    """The run's record would call it plain LoRA."""
    folder = adapter()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedError, match=said):
        load_adapter_pair(folder, lora())


def test_a_full_model_has_no_adapter_to_continue(base_dir):
    with pytest.raises(ConfigError, match="is not an adapter"):
        load_adapter_pair(base_dir, lora())


def test_an_adapter_whose_base_is_gone_is_refused(base_dir, adapter):
    folder = adapter()
    shutil.rmtree(base_dir)
    for load in (lambda: load_unmerged(folder, device="cpu"), lambda: load_adapter_pair(folder, lora())):
        with pytest.raises(ConfigError, match="no such folder"):
            load()
