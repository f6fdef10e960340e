"""A slack filter changes nothing: the adapter is bit for bit TRL's after ten steps."""

from __future__ import annotations

import functools

import pytest
import torch
from trl import SFTConfig, SFTTrainer

import holdfast as hf
from holdfast.core.event_log import read
from tests import tiny

COMMON = {
    "max_steps": 10, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True,
    "learning_rate": 5e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
    "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "max_length": 32, "disable_tqdm": True,
}  # fmt: skip
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}


def trained(trainer) -> dict[str, torch.Tensor]:
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """TRL's weights under some settings, trained once."""

    @functools.cache
    def weights(optimizer: str = "adamw_torch_fused", reentrant: bool = False) -> dict[str, torch.Tensor]:
        changes = {"optim": optimizer, **(REENTRANT if reentrant else {})}
        folder = str(tmp_path_factory.mktemp("sft"))
        return trained(
            SFTTrainer(
                tiny.model(), SFTConfig(folder, **COMMON, **changes), processing_class=tiny.tokenizer(),
                train_dataset=tiny.dataset(24, seed=1, start="w1"), peft_config=tiny.lora(0.2),
            )
        )  # fmt: skip

    return weights


def safe(tmp_path, constraint, defense="holdfast", **kwargs):
    trainer = hf.SafeSFTTrainer(
        tiny.model(),
        hf.SafeSFTConfig(str(tmp_path / "safe"), reference_cache=str(tmp_path / "cache"), **{**COMMON, **kwargs}),
        processing_class=tiny.tokenizer(), train_dataset=tiny.dataset(24, seed=1, start="w1"),
        peft_config=tiny.lora(0.2), safety_dataset=tiny.dataset(40, seed=2), constraint=constraint, defense=defense,
    )  # fmt: skip
    return trained(trainer), trainer


def assert_identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), f"{name} differs by {(value - b[name]).abs().max()}"


@pytest.mark.parametrize(
    ("tau", "beta"),
    [(1e6, 10.0), (10.0, 0.0999)],
    ids=["gradient of g is zero", "gradient of g is not zero"],
)
@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "sgd"])
def test_inactive_filter_is_bit_identical_to_trl(tmp_path, plain, tau, beta, optimizer):
    expected = plain(optimizer)
    found, trainer = safe(tmp_path, hf.ChanceConstraint(tau=tau, beta=beta, unit="nll_token"), optim=optimizer)
    assert_identical(expected, found)
    rows = read(trainer.run_dir / "events.jsonl")
    assert {row["event"] for row in rows} == {"inactive"}


def test_an_anchor_that_is_never_reached_changes_nothing(tmp_path, plain):
    slack = hf.ChanceConstraint(tau=10.0, beta=0.0999, unit="kl_token")
    found, trainer = safe(
        tmp_path, slack, {"name": "holdfast", "anchor": True, "every": 2, "reserve": 0.4, "verify": 8}
    )
    assert_identical(plain(), found)
    rows = read(trainer.run_dir / "events.jsonl")
    assert {row["event"] for row in rows} == {"inactive"}
    assert {row["violation_rate"] for row in rows} == {0.0, None}  # None: a step that measured nothing


WAYS = {
    "continued adapter": {"model": tiny.continued},
    "all weights": {"model": tiny.model},
    "packed": {"model": lambda: tiny.fresh(dropout=0.2), "packing": True},
    "all weights, padding-free": {"model": tiny.tied, "padding_free": True, "max_length": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_in_kl_too_however_the_model_is_trained(tmp_path, way):
    """The safety pass is not packed; what it keeps of the reference leaves the random state alone."""
    options = {**COMMON, "max_steps": 5, **WAYS[way]}
    start = options.pop("model")
    given = {"processing_class": tiny.tokenizer(), "train_dataset": tiny.dataset(24, seed=1, start="w1")}
    expected = trained(SFTTrainer(start(), SFTConfig(str(tmp_path / "sft"), **options), **given))
    args = hf.SafeSFTConfig(str(tmp_path / "safe"), reference_cache=str(tmp_path / "cache"), **options)
    limit = hf.ChanceConstraint(tau=10.0, beta=0.0999, unit="kl_token")
    trainer = hf.SafeSFTTrainer(start(), args, **given, safety_dataset=tiny.dataset(40, seed=2), constraint=limit)
    assert_identical(expected, trained(trainer))
    rows = read(trainer.run_dir / "events.jsonl")
    assert {row["event"] for row in rows} == {"inactive"}
    assert any(row["g"] > limit.value(torch.zeros(1)) for row in rows)  # the pass saw the model move


def test_sft_with_a_safety_set_is_bit_identical_to_trl(tmp_path, plain):
    expected = plain()
    found, _ = safe(tmp_path, hf.ChanceConstraint(unit="nll_token"), defense="sft")
    assert_identical(expected, found)


def test_an_active_filter_does_change_the_adapter(tmp_path, plain):
    """The comparison above can fail."""
    expected = plain()
    found, _ = safe(tmp_path, hf.ChanceConstraint(tau=0.01, beta=100.0, unit="nll_token"))
    assert any(not torch.equal(expected[name], found[name]) for name in expected)


def test_reentrant_checkpointing_too(tmp_path, plain):
    expected = plain(reentrant=True)
    found, _ = safe(tmp_path, hf.ChanceConstraint(tau=10.0, beta=0.0999, unit="nll_token"), **REENTRANT)
    assert_identical(expected, found)
