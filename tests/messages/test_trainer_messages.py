"""Refusals of the trainer: one line of cause, one line of remedy, the right exit code, no example text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from peft import PromptTuningConfig
from tests import tiny
from tests.unit.trainers.building import arguments, build, safety, task

import holdfast as hf
from holdfast.core.errors import ConfigError, HoldfastError, UnsupportedError
from holdfast.training.support import require_supported_engine, require_supported_model

REFUSED_ARGUMENTS = {
    "fp16": ({"fp16": True}, "loss scale", "bf16=True"),
    "torch_compile": ({"torch_compile": True}, "torch_compile", "torch_compile=False"),
    "auto batch": ({"auto_find_batch_size": True}, "auto_find_batch_size", "per_device_train_batch_size"),
    "lomo": ({"optim": "lomo"}, "during the backward pass", "adamw_torch"),
}


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_unsupported_arguments(tmp_path, name):
    options, what, remedy = REFUSED_ARGUMENTS[name]
    args = arguments(tmp_path)
    for key, value in options.items():  # type: ignore[attr-defined]
        setattr(args, key, value)
    with pytest.raises(UnsupportedError) as caught:
        build(tmp_path, given={"args": args})
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "schedule_free_adamw"])
def test_optimizers_as_the_arguments_hold_them(tmp_path, optim):
    """TrainingArguments makes an enumeration of the name, whose text is OptimizerNames.LOMO."""
    with pytest.raises(UnsupportedError) as caught:
        build(tmp_path, optim=optim)
    assert f"optimizer {optim}: " in caught.value.what


REFUSED_ENGINES = {
    "DeepSpeed": ({"distributed_type": "DEEPSPEED"}, "DeepSpeed"),
    "Megatron": ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM"),
    "FSDP1": ({"distributed_type": "FSDP", "is_fsdp2": False}, "FSDP version 1"),
    "tensor": ({"parallelism_config": SimpleNamespace(tp_size=2)}, "tensor parallelism"),
    "context": ({"parallelism_config": SimpleNamespace(cp_size=4)}, "context parallelism (cp_size=4)"),
    "hybrid": (
        {"distributed_type": "FSDP", "is_fsdp2": True, "parallelism_config": SimpleNamespace(dp_replicate_size=2)},
        "hybrid sharding",
    ),
}


@pytest.mark.parametrize("name", REFUSED_ENGINES)
def test_unsupported_engines(name):
    values, what = REFUSED_ENGINES[name]
    with pytest.raises(UnsupportedError) as caught:
        require_supported_engine(SimpleNamespace(**{"distributed_type": "NO", "parallelism_config": None, **values}))
    assert what in caught.value.what
    assert "DDP" in caught.value.remedy or "fsdp" in caught.value.remedy.lower()


def test_supported_engines():
    for kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        require_supported_engine(SimpleNamespace(distributed_type=kind, parallelism_config=None))
    require_supported_engine(SimpleNamespace(distributed_type="FSDP", is_fsdp2=True, parallelism_config=None))


def test_virtual_tokens_and_images():
    model = SimpleNamespace(peft_config={"default": PromptTuningConfig(num_virtual_tokens=4)})
    with pytest.raises(UnsupportedError, match="virtual tokens shift every position"):
        require_supported_model(model, vision=False)
    with pytest.raises(UnsupportedError, match="vision data sets"):
        require_supported_model(SimpleNamespace(), vision=True)


BAD_SETTINGS = {
    "on_leak": ({"on_leak": "ignore"}, "on_leak is 'ignore'"),
    "batch": ({"safety_batch_size": 0}, "safety_batch_size is 0"),
    "micro": ({"safety_micro_batch_size": -1}, "safety_micro_batch_size is -1"),
    "eval": ({"safety_eval_batch_size": 0}, "safety_eval_batch_size is 0"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_out_of_range(tmp_path, name):
    options, what = BAD_SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        arguments(tmp_path, **options)
    assert what in caught.value.what


def test_fractions_that_do_not_sum_to_one(tmp_path):
    with pytest.raises(ConfigError, match="sum to 1"):
        build(tmp_path, safety_fractions=[0.5, 0.1, 0.1])


def test_missing_task_data_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no task data") as caught:
        build(tmp_path, given={"train_dataset": None})
    assert "train_dataset" in caught.value.remedy


def refusals(tmp_path):
    """One refusal of each kind that has seen the data."""
    bad = {"prompt": "w0 SECRETWORD", "completion": "   "}
    roles = {"constraint": tiny.rows(4, seed=2), "monitor": tiny.rows(4, seed=2)}
    shared = tiny.rows(20, seed=2)
    yield lambda: build(tmp_path / "1", given={"safety_dataset": [*shared, bad]})
    yield lambda: build(tmp_path / "2", given={"safety_dataset": roles})
    yield lambda: build(tmp_path / "3", given={"train_dataset": safety()})
    yield lambda: build(tmp_path / "4", given={"constraint": hf.ChanceConstraint(tau=0.1, beta=1.0, unit="nll_token")})
    yield lambda: build(tmp_path / "5", given={"defense": "holdfst"})
    yield lambda: build(tmp_path / "6", given={"safety_dataset": task().to_iterable_dataset()})
    yield lambda: build(tmp_path / "7", max_length=3)


def test_every_refusal_is_two_lines_without_example_text(tmp_path):
    texts = {row["prompt"].strip() for row in tiny.rows(20, seed=2)} | {"SECRETWORD"}
    seen = 0
    for refused in refusals(tmp_path):
        with pytest.raises(HoldfastError) as caught:
            refused()
        error = caught.value
        assert "\n" not in error.what
        assert "\n" not in error.remedy
        assert error.remedy
        assert error.exit_code in range(2, 8)
        assert not any(text in str(error) for text in texts)
        seen += 1
    assert seen == 7
