"""Adapters, layers and runs that the fused step does not know: two passes with a line saying why, or a refusal."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers as t
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from tests import tiny as words
from tests.unit.fused.comparing import adapted, encoded, own, packed, passes
from tests.unit.trainers.building import deep as build
from torch import nn

import holdfast as hf
from holdfast.core.errors import UnsupportedError
from holdfast.fused.joint_pass import JointPass
from holdfast.fused.packed_rows import encoded_rows
from holdfast.fused.support import plain_layers
from holdfast.training.fused_setup import joint_pass, longest_row, why_not
from holdfast.training.hooks import Defense, two_pass_only
from holdfast.training.step import TwoPassEngine, choose_engine
from holdfast_lab.defenses.primal_dual import PrimalDual

QKV = ("q_proj", "k_proj", "v_proj")


def plain():
    return words.model()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "trained biases"),
        ({"lora_bias": True}, "trained biases"),
        ({"trainable_token_indices": [3]}, "trained token rows"),
        ({"target_modules": ["embed_tokens"]}, "is an embedding"),
    ],
)
def test_adapters_of_another_kind(settings, reason):
    assert reason in plain_layers(adapted(plain(), QKV, start=True, **settings))


def test_full_fine_tuning():
    assert "all weights are trained" in plain_layers(plain())


def test_several_adapters():
    model = adapted(plain(), QKV)
    model.add_adapter("second", LoraConfig(r=2, target_modules=list(QKV)))
    assert "several adapters" in plain_layers(model)


def test_a_merged_adapter():
    model = adapted(plain(), QKV)
    model.merge_adapter()
    assert "merged" in plain_layers(model)


def test_something_else_that_is_trained():
    model = adapted(plain(), QKV)
    model.get_base_model().model.norm.weight.requires_grad_()
    assert "1 trained tensors are not LoRA factors" in plain_layers(model)


def first(model):
    return model.get_base_model().model.layers[0].self_attn.q_proj


def replaced(model):
    first(model).forward = lambda x: x


def subclass(model):
    first(model).__class__ = type("FastLinear", (Linear,), {})


def after(model):
    first(model).register_forward_hook(lambda *_: None)


def before(model):
    first(model).register_forward_pre_hook(lambda *_: None)


def inside(model):
    first(model).lora_A["default"].register_forward_hook(lambda *_: None)


def backward(model):
    first(model).register_full_backward_hook(lambda *_: None)


def on_gradient(model):
    first(model).lora_B["default"].weight.register_hook(lambda g: 2 * g)


def accumulated(model):
    first(model).lora_B["default"].weight.register_post_accumulate_grad_hook(lambda p: None)


def frozen(model):
    first(model).lora_A["default"].weight.requires_grad_(False)


def another_dropout(model):
    first(model).lora_dropout["default"] = nn.AlphaDropout(0.1)


def other_factor(model):
    first(model).lora_A["default"].__class__ = type("Rounded", (nn.Linear,), {})


def kernels(model):
    model.get_base_model().model.layers[0].self_attn.apply_qkv = lambda *_: None


def switched_off(model):
    first(model).enable_adapters(False)


def quantised(model):
    first(model).base_layer.__class__ = type("Linear4bit", (nn.Linear,), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, "not PEFT's own"),
        (subclass, "not PEFT's own (FastLinear)"),
        (after, "has hooks"),
        (before, "has hooks"),
        (inside, "has hooks"),
        (backward, "has hooks"),
        (on_gradient, "gradient hooks"),
        (accumulated, "gradient hooks"),
        (frozen, "are frozen"),
        (another_dropout, "another kind (AlphaDropout)"),
        (other_factor, "not plain linear maps (Rounded)"),
        (kernels, "its own LoRA kernels"),
        (quantised, "is a Linear4bit"),
        (switched_off, ""),
    ],
)
def test_layers_that_do_more_than_pefts(change, reason):
    model = adapted(plain(), QKV)
    assert not isinstance(plain_layers(model), str)
    change(model)
    found = plain_layers(model)
    assert isinstance(found, str)
    assert reason in found
    assert "defense" not in found


def test_rank_stabilised_lora_is_exact():
    model = adapted(plain(), QKV, use_rslora=True)
    assert first(model).scaling["default"] == pytest.approx(4 / 2**0.5)
    run, groups = passes(model), [encoded_rows(encoded((5, 8))), encoded_rows(encoded((6,), seed=1))]
    for a, b in zip(packed(run, groups)[1], own(model, run, groups)[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return build(tmp_path_factory.mktemp("declined"), step="fused")


ARGUMENTS = [
    ({"packing": True}, "packing"),
    ({"padding_free": True}, "padding_free"),
    ({"loss_type": "dft"}, "'dft' is not nll"),
    ({"label_smoothing_factor": 0.1}, "label smoothing"),
    ({"neftune_noise_alpha": 5.0}, "NEFTune"),
    ({"activation_offloading": True}, "activation offloading"),
    ({"use_liger_kernel": True}, "Liger"),
]


@pytest.mark.parametrize(("changed", "reason"), ARGUMENTS)
def test_arguments_that_change_the_task_loss(trainer, monkeypatch, changed, reason):
    assert why_not(trainer.run) is None
    for name, value in changed.items():
        monkeypatch.setattr(trainer.args, name, value)
    assert reason in joint_pass(trainer.run)
    with pytest.raises(UnsupportedError, match=reason.replace("'", ".")):
        choose_engine(trainer.run)


def test_losses_and_batches_of_ones_own(trainer, monkeypatch):
    monkeypatch.setattr(trainer, "compute_loss_func", lambda *_: 0.0)
    assert "compute_loss_func" in why_not(trainer.run)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "batch_keys", frozenset({"input_ids", "attention_mask", "labels", "token_weights"}))
    assert "token_weights" in why_not(trainer.run)
    monkeypatch.setattr(trainer, "batch_keys", frozenset({"input_ids", "labels"}))
    assert "more or less than attention_mask, input_ids, labels: attention_mask" in why_not(trainer.run)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    assert "FSDP" in why_not(trainer.run)
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "compute_loss", lambda *_: 0.0)
    assert "compute_loss is replaced" in why_not(trainer.run)
    monkeypatch.undo()
    assert why_not(trainer.run) is None


class Above(hf.SafeSFTTrainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class OwnLoss(hf.SafeSFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


class StepBelow(t.Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class Below(hf.SafeSFTTrainer, StepBelow):
    pass


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Above, None), (OwnLoss, "OwnLoss has its own compute_loss"), (Below, "StepBelow has its own training_st")],
)
def test_a_trainer_whose_loss_or_step_would_be_passed_over(trainer, monkeypatch, kind, reason):
    monkeypatch.setattr(trainer, "__class__", kind)
    found = why_not(trainer.run)
    assert found is None if reason is None else reason in found


def test_a_defense_with_a_loss_of_its_own(trainer, monkeypatch):
    monkeypatch.setattr(type(trainer.defense), "extra_loss", lambda *_: None, raising=False)
    assert "its own extra_loss" in why_not(trainer.run)
    assert Defense.extra_loss is not type(trainer.defense).extra_loss


def test_a_defense_whose_own_terms_are_joint_may_have_a_loss_for_two_passes_and_its_heirs_may_not(trainer, monkeypatch):
    class Own(Defense):
        name, packs = "own", True

        @two_pass_only
        def extra_loss(self, run, model, inputs):
            return None

    class Heir(Own):
        def extra_loss(self, run, model, inputs):
            return torch.ones(())

    assert PrimalDual.joint_terms
    for kind, reason in ((PrimalDual, None), (Own, None), (Heir, "its own extra_loss")):
        monkeypatch.setattr(trainer, "defense", object.__new__(kind))
        found = why_not(trainer.run)
        assert found is None if reason is None else reason in found


def test_auto_says_why_and_goes_on_with_two_passes(trainer, monkeypatch, caplog):
    monkeypatch.setattr(trainer.args, "step", "auto")
    assert isinstance(choose_engine(trainer.run), TwoPassEngine)
    assert not caplog.records  # on the CPU two passes are the rule
    assert trainer.run.step_declined is None
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    monkeypatch.setattr(trainer.args, "loss_type", "dft")
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert isinstance(choose_engine(trainer.run), TwoPassEngine)
    assert "two passes a step instead of one: loss_type 'dft' is not nll" in caplog.text
    assert trainer.run.step_declined == "loss_type 'dft' is not nll"


def test_fused_is_refused_by_the_models_reason(tmp_path):
    trainer = build(tmp_path, step="fused", given={"peft_config": words.lora(use_dora=True)})
    with pytest.raises(
        UnsupportedError, match=r"step: fused is not possible: the fused step works on plain LoRA.*DoRA"
    ):
        trainer.train()


def test_one_process_that_cannot_keeps_all_from_it(trainer, monkeypatch):
    from holdfast.training import fused_setup

    assert isinstance(joint_pass(trainer.run), JointPass)
    monkeypatch.setattr(fused_setup, "gather_objects", lambda own: [own, "not here"])
    assert joint_pass(trainer.run) == "not here"


def test_graphs_are_refused_without_a_gpu(trainer, monkeypatch):
    monkeypatch.setattr(trainer.args, "step_graphs", "on")
    with pytest.raises(UnsupportedError, match="CUDA graphs need a GPU"):
        joint_pass(trainer.run)


def test_the_longest_row(trainer, monkeypatch):
    assert longest_row(trainer.args) == 32
    monkeypatch.setattr(trainer.args, "dataset_kwargs", {"skip_prepare_dataset": True})
    assert longest_row(trainer.args) is None


class Weighted:
    """A collator that adds a column nobody knows."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, rows, *args, **kwargs):
        batch = self.inner(rows, *args, **kwargs)
        return {**batch, "token_weights": torch.ones_like(batch["labels"])} if self.adds else batch  # type: ignore[attr-defined]


@pytest.mark.parametrize("adds", [False, True])
def test_a_collator_of_your_own_may_make_plain_batches_alone(tmp_path, adds):
    trainer = build(tmp_path, step="fused", max_steps=1, remove_unused_columns=False)
    trainer.data_collator = Weighted(trainer.data_collator)
    trainer.data_collator.adds = adds
    if not adds:
        trainer.train()
        assert trainer.run.engine.fused
        return
    with pytest.raises(UnsupportedError, match="token_weights"):
        trainer.train()


def test_a_defense_that_hooks_into_layers_is_not_packed(tmp_path, monkeypatch):
    trainer = build(tmp_path, given={"defense": "antibody"})
    monkeypatch.setattr(trainer.args, "step", "fused")
    with pytest.raises(UnsupportedError, match="defense 'antibody' changes the loss"):
        choose_engine(trainer.run)
    monkeypatch.setattr(trainer.args, "step", "auto")
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    assert isinstance(choose_engine(trainer.run), TwoPassEngine)


def test_plain_training_without_a_safety_set_is_packed_too(tmp_path, caplog):
    given = {"defense": "sft", "safety_dataset": None, "constraint": None}
    with caplog.at_level(logging.INFO, "holdfast"):
        trainer = build(tmp_path, given=given, step="fused", max_steps=1)
        trainer.train()
    assert trainer.run.engine.fused
    assert "packed task rows" in caplog.text
