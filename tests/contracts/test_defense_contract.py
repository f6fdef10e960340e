"""What every registered defense promises, in every stage in which it acts. A new defense is tested by being registered.

Two processes: `test_defense_contract_ddp`.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import FrozenInstanceError, asdict, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import TrainerCallback

import holdfast as hf
from holdfast.core.errors import ConfigError
from holdfast.core.event_log import read
from holdfast.runs.config import config_from_dict
from holdfast.runs.config.resolve import defense
from holdfast.training.hooks import DEFENSES, make_defense
from tests import hybrid, tiny
from tests.contracts.defense_cases import (
    AT_WORK,
    CASES,
    HARD,
    PLAIN,
    Case,
    Watch,
    build,
    dataset,
    hooks_of,
    largest_difference,
    off,
    one_layer,
    side_data,
    stages_of,
    trained,
)
from tests.unit.trainers.building import same, weights

TOLERANCE = 1e-6
TWO_STEPS = {**HARD, "max_steps": 2, "gradient_accumulation_steps": 1}
FEW = {"safety_dataset": dataset(10, 2, "w0")}  # where a forward is slow and figures are only asked to be finite
PLAIN_STEPS = {**PLAIN, "dropout": 0.0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

IDS = torch.arange(7, 31).reshape(2, 12)


def logits(model: Any) -> torch.Tensor:
    training = model.training
    with torch.no_grad():
        found = model.eval()(input_ids=IDS).logits
    model.train(training)
    return found


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def finished(trainer: hf.SafeSFTTrainer, **more: Any) -> SimpleNamespace:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read(trainer.run_dir / "events.jsonl")]
    return SimpleNamespace(weights=weights(trainer), hooks=hooks_of(trainer.model), rows=rows, **more)


def frozen(trainer: hf.SafeSFTTrainer) -> dict[str, torch.Tensor]:
    held = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    return {**held, **{name: b.detach().clone() for name, b in trainer.model.named_buffers()}}


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request) -> Case:
    return request.param


@pytest.fixture(scope="module")
def at_work(case, tmp_path_factory) -> SimpleNamespace:
    """The defense at work: dropout, AdamW, weight decay, two micro-batches a step, only the side data it declares."""
    watch, others = Watch(), frozenset(side_data(one_layer())) - case.needs
    trainer = build(tmp_path_factory.mktemp("at_work"), case, watch=watch, without=others, **HARD)
    before, start = frozen(trainer), logits(trainer.model)
    trainer.train()
    return finished(trainer, watch=watch, frozen=(before, frozen(trainer)), start=start)


@pytest.fixture(scope="module")
def sft(tmp_path_factory) -> SimpleNamespace:
    """Plain SFT with the same settings."""
    return finished(trained(tmp_path_factory.mktemp("sft"), Case("sft", "finetune"), **HARD))


@pytest.fixture(scope="module")
def plain_sft(tmp_path_factory) -> SimpleNamespace:
    """Plain SFT under SGD without dropout: packed rows are computed by other kernels, and draw other masks."""
    return finished(trained(tmp_path_factory.mktemp("plain_sft"), Case("sft", "finetune"), **PLAIN_STEPS))


@pytest.fixture(scope="module")
def plain(case, tmp_path_factory) -> SimpleNamespace:
    """The same under SGD without dropout, in one micro-batch and two layers: what arithmetic is compared with."""
    folder = tmp_path_factory.mktemp("plain")
    trainer = trained(folder, case, model=tiny.model(), dropout=0.0, **PLAIN)
    trainer.save_model(str(folder / "adapter"))
    return finished(trainer, end=logits(trainer.model), adapter=folder / "adapter")


# -- strength ----------------------------------------------------------------------------------------------------------


def test_without_strength_it_is_plain_sft(case, sft, plain_sft, tmp_path, record_property):
    if case.cls.off is None:
        pytest.skip("has no such setting: see the next test")
    settings, expected = (PLAIN_STEPS, plain_sft) if case.step == "fused" else (HARD, sft)
    found = trained(tmp_path, case, **off(case), **settings)
    record_property("bit_identical", same(weights(found), expected.weights))
    assert found.run.engine.fused == (case.step == "fused")
    assert largest_difference(weights(found), expected.weights) <= TOLERANCE


def test_it_starts_as_the_plain_model(at_work):
    """Before the first step the model computes what it computes without any defense."""
    assert_close(at_work.start, logits(one_layer()))


def test_with_strength_it_is_not(case, at_work, sft):
    if case.name == "sft":
        assert case.step == "fused" or same(at_work.weights, sft.weights)
    else:
        assert at_work.weights.keys() != sft.weights.keys() or not same(at_work.weights, sft.weights)


# -- what it leaves behind ---------------------------------------------------------------------------------------------


def test_every_hook_restores_the_weights_bit_for_bit(case, at_work):
    assert at_work.watch.left_changed == set()
    own_loss = {"task_loss"} if case.step != "fused" else set()  # a fused step computes it with the constraints'
    assert {"choose_batch", "micro_step", "on_gradient", "before_step"} | own_loss <= at_work.watch.called


def test_no_hook_moves_the_random_state(at_work):
    assert at_work.watch.moved_random_state == set()


def test_the_frozen_base_stays_as_it_is(at_work):
    before, after = at_work.frozen
    assert same(before, after)


def test_no_hook_is_left_on_the_model(at_work, sft):
    assert at_work.hooks == sft.hooks


# -- the run -----------------------------------------------------------------------------------------------------------


def test_neither_two_micro_batches_for_one_nor_gradient_checkpointing_change_anything(case, plain, tmp_path):
    half = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    if not case.cls.linear:
        assert "micro-batch" in (inspect.getdoc(sys.modules[case.cls.__module__]) or ""), "the docstring defines it"
        half = {}
    settings = {**PLAIN, **half, "gradient_checkpointing": True}
    found = trained(tmp_path, case, model=tiny.model(), dropout=0.0, **settings)
    assert largest_difference(weights(found), plain.weights) <= TOLERANCE


class DiedError(RuntimeError):
    """Stands for the end of the process."""


class DieAfterSave(TrainerCallback):
    """Ends the run after its first checkpoint, having noted what the model computes."""

    def on_save(self, args, state, control, model=None, **kwargs):
        self.logits = logits(model)
        raise DiedError


def test_a_resumed_run_with_evaluations_between_is_bit_identical_and_its_checkpoint_is_an_adapter(
    case, at_work, tmp_path
):
    evaluating = {**HARD, "eval_strategy": "steps", "eval_steps": 1}
    given = {"eval_dataset": tiny.dataset(4, seed=8, start="w1")}
    torch.manual_seed(987)  # whatever the state of the process
    dying, end = build(tmp_path, case, given=given, **evaluating, save_strategy="steps", save_steps=2), DieAfterSave()
    dying.add_callback(end)
    with pytest.raises(DiedError):
        dying.train()
    saved = tmp_path / "run" / "checkpoint-2"
    assert_close(logits(PeftModel.from_pretrained(one_layer(), saved)), end.logits)
    going_on = build(tmp_path, case, given=given, **evaluating)
    going_on.train(resume_from_checkpoint=True)
    found = finished(going_on)
    assert same(found.weights, at_work.weights)
    assert found.rows == at_work.rows


def test_the_written_adapter_is_what_was_trained(plain):
    assert_close(logits(PeftModel.from_pretrained(tiny.model(), plain.adapter)), plain.end)
    assert float((plain.end - logits(tiny.model())).abs().max()) > 1e-3


def test_bfloat16_stays_finite(case, tmp_path):
    model = tiny.model(dtype=torch.bfloat16, layers=1)
    found = trained(tmp_path, case, model=model, given=FEW, **TWO_STEPS, bf16=True)
    assert found.state.global_step == 2
    assert all(torch.isfinite(w).all() and w.dtype == torch.float32 for w in weights(found).values())


def test_hybrid_attention(case, tmp_path):
    given = {**FEW, "peft_config": hybrid.lora(0.1)}
    found = trained(tmp_path, case, model=hybrid.model(), given=given, **TWO_STEPS)
    assert found.state.global_step == 2
    assert all(torch.isfinite(w).all() for w in weights(found).values())


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_frozen_and_survive_json_and_yaml(case):
    cls = case.cls
    for config in (cls.Config(), cls.Config(**cls.paper)):
        values = asdict(config)
        assert cls.Config(**json.loads(json.dumps(values))) == config
        assert cls.Config(**yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(values))))) == config
        for field in fields(config):
            with pytest.raises(FrozenInstanceError):
                setattr(config, field.name, values[field.name])


def test_settings_by_name(case):
    cls = case.cls
    assert make_defense(case.name).config == cls.Config()
    assert make_defense({"name": case.name, "preset": "paper"}).config == cls.Config(**cls.paper)
    for options in (cls.paper, cls.off or {}, AT_WORK.get(case.name, {})):
        assert set(options) <= {f.name for f in fields(cls.Config)}
        make_defense({"name": case.name, **options})
    with pytest.raises(ConfigError, match="no option 'no_such_option'"):
        make_defense({"name": case.name, "no_such_option": 1})


def test_a_run_file_may_name_it(case, tmp_path):
    side = {"harmful": {"data": "harmful.jsonl"}, "unaligned": "before"}
    raw = {
        "model": "aligned", "task": {"data": "task.jsonl"}, "safety": {"data": "safety.jsonl"}, "stage": case.stage,
        "defense": {"name": case.name, "preset": "paper"}, "output_dir": "out",
        **{need: value for need, value in side.items() if need in case.needs},
    }  # fmt: skip
    config = config_from_dict(raw, folder=tmp_path)
    assert defense(config).config == case.cls.Config(**case.cls.paper)


def test_it_describes_itself(case):
    cls = case.cls
    assert DEFENSES[case.name].name == case.name
    assert cls.stages
    assert set(cls.stages) <= {"align", "finetune", "posthoc"}
    assert cls.summary
    assert "\n" not in cls.summary
    assert cls.passes
    assert cls.reference or case.name == "sft"
    assert case.needs <= cls.needs <= {"safety", "harmful", "unaligned"}
    assert json.loads(json.dumps(make_defense(case.name).describe()))["name"] == case.name


# -- side data ---------------------------------------------------------------------------------------------------------


def test_declared_side_data_are_demanded_by_name(case, tmp_path):
    words = {"safety": "safety set", "harmful": "harmful pairs", "unaligned": "weights before alignment"}
    for need in sorted(case.needs):
        with pytest.raises(ConfigError, match=words[need]) as caught:
            build(tmp_path, case, without=frozenset({need}))
        assert case.name in caught.value.what
        assert caught.value.remedy


def test_undeclared_side_data_are_not_touched(case, at_work):
    """That the run without them is the run with all of them is what the resumed run above shows."""
    assert at_work.watch.reads <= case.needs


def test_another_stage_is_refused(case, tmp_path):
    for stage in {"align", "finetune"} - set(stages_of(case.cls)):
        with pytest.raises(ConfigError, match="stage"):
            build(tmp_path, case, stage=stage)
