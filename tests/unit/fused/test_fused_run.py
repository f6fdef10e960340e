"""Runs with the fused step: what is logged, evaluated, saved and discarded is what two passes would have."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests import tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights
from transformers import TrainerCallback
from trl import SFTTrainer

import holdfast as hf
from holdfast.core.errors import UnsupportedError
from holdfast.training import side_pass
from holdfast.training.steering import looks_first
from holdfast.training.step import Measured

ACTIVE = {"tau": 0.05, "alpha": 0.05, "beta": 5.0, "allow_infeasible_start": True, "unit": "nll_token"}
SOME = {"tau": 0.05, "alpha": 0.05, "beta": 20.0, "unit": "nll_token"}
SLACK = {"tau": 1e6, "beta": 10.0, "unit": "nll_token"}
FAST = {"learning_rate": 0.05, "optim": "sgd", "logging_steps": 1}


def made(folder, step, *, limit=ACTIVE, given=None, **options):
    given = {"constraint": hf.ChanceConstraint(**limit), **(given or {})}
    return build(folder, given=given, step=step, **{**FAST, **options})


def both(folder, prepare=lambda trainer: None, **options):
    found = []
    for step in ("fused", "two_pass"):
        given = options.get("given", dict)
        trainer = made(folder / step, step, **{**options, "given": given()})
        prepare(trainer)
        trainer.train()
        assert trainer.run.engine.fused == (step == "fused")
        found.append(trainer)
    return found


def close(a, b, tolerance=1e-5):
    x, y = (torch.cat([t.flatten() for t in weights(trainer).values()]) for trainer in (a, b))
    assert (x - y).norm() <= tolerance * y.norm()


LOGGED = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm", "train_loss", "total_flos", "eval_loss")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_logged_and_evaluated_is_the_same(tmp_path, accumulation):
    """Evaluations in between put the model into evaluation mode, and count no task tokens."""
    fused, two = both(
        tmp_path, given=lambda: {"eval_dataset": tiny.dataset(5, seed=9)}, eval_strategy="steps", eval_steps=2,
        max_steps=5, gradient_accumulation_steps=accumulation, gradient_checkpointing=True,
    )  # fmt: skip
    rows, expected = fused.state.log_history, two.state.log_history
    assert [sorted(row) for row in rows] == [sorted(row) for row in expected]
    seen = set()
    for row, other in zip(rows, expected, strict=True):
        for name in row:
            if not name.endswith(("runtime", "per_second")):
                seen.add(name)
                assert row[name] == pytest.approx(other[name], rel=2e-4, abs=1e-5), name
    assert seen.issuperset(LOGGED)
    assert fused.state.total_flos == two.state.total_flos > 0
    assert fused.model.training == two.model.training
    close(fused, two)


def test_floating_point_operations_are_the_trainers_own(tmp_path):
    trainer = made(tmp_path, "two_pass")
    for shape in ((2, 7), (3, 5), (2, 7)):
        batch = {"input_ids": torch.ones(shape, dtype=torch.long)}
        assert trainer.floating_point_ops(batch) == SFTTrainer.floating_point_ops(trainer, batch) > 0


def test_dropout_changes_the_task_gradient_and_not_the_constraints(tmp_path):
    sides, tasks = [], []
    for rate, seed in ((0.5, 1), (0.5, 2), (0.0, 1)):
        trainer = made(tmp_path / f"{rate}{seed}", "fused", given={"peft_config": tiny.lora(rate)}, max_steps=1)
        inner = trainer.defense.on_gradient

        def on_gradient(run, inner=inner):
            tasks.append(torch.cat([p.grad.flatten() for p in run.space().params]))
            sides.append(torch.cat([g.flatten() for g in run.engine.measure({"safety": None})["safety"].gradient]))
            inner(run)

        trainer.defense.on_gradient = on_gradient
        for name, p in trainer.model.named_parameters():  # with B = 0 no mask reaches the constraint anyway
            if "lora_B" in name:
                p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1
        engine = trainer.run.engine
        micro = engine.accumulate
        engine.accumulate = lambda *a, micro=micro, seed=seed, **k: (torch.manual_seed(seed), micro(*a, **k))[1]
        trainer.train()
    assert torch.allclose(sides[0], sides[1], rtol=1e-5, atol=1e-7)
    assert torch.allclose(sides[0], sides[2], rtol=1e-5, atol=1e-7)
    assert sides[0].any()
    assert (tasks[0] - tasks[1]).norm() > 0.05 * tasks[0].norm()


def test_skipping_with_dropout_measures_without(tmp_path):
    """The rows looked at first are the constraint's, and come first in that pass's layout."""
    found = []
    for switch in ("on", "off"):
        trainer = made(
            tmp_path / switch, "fused", skip_inactive_rows=switch, given={"peft_config": tiny.lora(0.5)}, max_steps=3
        )
        trainer.train()
        found.append([row["g"] for row in _events(trainer)])
        found.append(weights(trainer))
    assert found[0][0] == pytest.approx(found[2][0], abs=1e-6)


def test_a_model_handed_over_in_evaluation_mode_is_checkpointed(tmp_path):
    calls = {}
    for checkpointing in (False, True):
        model = tiny.model().eval()
        trainer = made(
            tmp_path / str(checkpointing), "fused", given={"model": model}, max_steps=2,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        trainer.model.eval()
        seen = calls[checkpointing] = []
        layer = trainer.model.get_base_model().model.layers[0]
        layer.self_attn.register_forward_pre_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
        trainer.train()
    with_gradient = sum(calls[False])
    assert with_gradient > 2  # the steps, and the trial of packed rows before them
    assert len(calls[True]) == len(calls[False]) + with_gradient  # once more in each backward


# -- skipping inactive rows -------------------------------------------------------------------------------------------


def _events(trainer):
    return [json.loads(line) for line in (trainer.run_dir / "events.jsonl").read_text().splitlines()]


def test_automatic_skipping_goes_on_and_off_with_the_share_of_inactive_rows(tmp_path):
    trainer = made(tmp_path, "fused", limit=SLACK, max_steps=20)
    skips, inner = [], trainer.run.engine.joint
    run = inner.run
    inner.run = lambda *a, skip, **k: (skips.append(skip), run(*a, skip=skip, **k))[1]
    trainer.train()
    # Every row is flat: 1 - 0.9^n passes 0.75 after 14 steps.
    assert skips == [False] * 14 + [True] * 6
    defense = trainer.defense
    assert defense._inactive == pytest.approx(1 - 0.9**20)
    state = defense.state_dict()
    defense._inactive = 0.0
    defense.load_state_dict(state)
    run = trainer.run
    assert looks_first(run.args, defense._inactive)
    zero = [torch.zeros_like(p) for p in run.space().params]
    run.engine.measure = lambda terms: {name: Measured(torch.zeros(0), torch.zeros(0), zero) for name in terms}
    for steering in defense._steering.values():
        steering.inactive, steering.estimate = 0.0, lambda *_: (-1.0, -1.0)
    defense.on_gradient(run)
    assert looks_first(run.args, defense._inactive)
    for _ in range(2):
        defense.on_gradient(run)
    assert not looks_first(run.args, defense._inactive)
    del state["inactive"]  # a checkpoint of an earlier version
    defense.load_state_dict(state)
    assert not looks_first(run.args, defense._inactive)


def test_automatic_skipping_takes_the_step_of_none(tmp_path):
    found = []
    for switch in ("auto", "off"):
        trainer = made(
            tmp_path / switch, "fused", limit={**SOME, "tau": 0.2}, max_steps=20, skip_inactive_rows=switch,
            safety_batch_size=6, learning_rate=0.02,
        )  # fmt: skip
        trainer.train()
        found.append(trainer)
    assert found[0].defense._inactive > 0.75
    close(*found)
    for a, b in zip(_events(found[0]), _events(found[1]), strict=True):
        assert a["event"] == b["event"]
        assert a["g"] == pytest.approx(b["g"], abs=1e-5)


@pytest.mark.parametrize("step", ["fused", "two_pass"])
def test_the_filters_averages_move_on_without_an_active_row(tmp_path, step):
    trainer = made(tmp_path, step, limit=SLACK, max_steps=1, optim="adamw_torch")
    trainer.train()
    memory = trainer.defense._filter._memory
    memory.averages[0][0].fill_(1.0)
    before = memory.steps
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[1]])
    trainer.training_step(trainer.model, batch)
    assert memory.steps == before + 1
    assert torch.allclose(memory.averages[0][0], torch.full_like(memory.averages[0][0], 0.9))


def test_two_passes_run_no_backward_for_flat_rows_and_take_the_same_step(tmp_path, monkeypatch):
    counted, inner = [], torch.Tensor.backward

    def backward(self, *args, **kwargs):
        counted.append(1)
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(side_pass.torch.Tensor, "backward", backward)  # type: ignore[attr-defined]
    lazy = made(tmp_path / "lazy", "two_pass", limit=SLACK, max_steps=3, safety_micro_batch_size=1)
    lazy.train()
    assert len(counted) == 3  # the task's
    monkeypatch.setattr(side_pass, "slope", lambda weight, d: torch.ones_like(d))
    full = made(tmp_path / "full", "two_pass", limit=SLACK, max_steps=3, safety_micro_batch_size=1)
    full.train()
    assert len(counted) == 3 + 3 + 3 * 2
    assert same(weights(lazy), weights(full))
    assert [row["g"] for row in _events(lazy)] == [row["g"] for row in _events(full)]


# -- numbers that are not finite --------------------------------------------------------------------------------------


class Spoil(TrainerCallback):
    """At one step the embedding of <unk>, a token of one data set alone, is not a number."""

    def __init__(self, step):
        self.step, self.grads = step, []

    def on_step_begin(self, args, state, control, model=None, **_):
        weight = model.get_input_embeddings().weight
        if state.global_step == self.step:
            self.kept = weight.data[2].clone()
            weight.data[2] = math.nan
        elif state.global_step == self.step + 1:
            weight.data[2] = self.kept


@pytest.mark.parametrize("where", ["task", "safety"])
@pytest.mark.parametrize("switch", ["off", "on"])
def test_a_step_that_is_not_finite_is_discarded_as_by_two_passes(tmp_path, where, switch):
    def given():
        task, safety = ("unknown", "w0") if where == "task" else ("w1", "unknown")
        return {
            "train_dataset": tiny.dataset(12, seed=1, start=task),
            "safety_dataset": tiny.dataset(20, seed=2, start=safety),
            "callbacks": [Spoil(2)],
        }

    fused, two = both(
        tmp_path, given=given, max_steps=4, optim="adamw_torch", learning_rate=5e-3, skip_inactive_rows=switch,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    rows, expected = _events(fused), _events(two)
    assert [row["event"] == "nonfinite" for row in expected] == [False, False, True, False]
    assert [row["event"] for row in rows] == [row["event"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row["g"] == (None if other["g"] is None else pytest.approx(other["g"], abs=1e-5))
        assert row["loss"] == (None if other["loss"] is None else pytest.approx(other["loss"], rel=1e-5))
    ours, theirs = (trainer.defense._filter._memory for trainer in (fused, two))
    assert ours.steps == theirs.steps
    for a, b in zip(ours.averages[0], theirs.averages[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6)
    close(fused, two, 1e-4)


def test_a_run_that_broke_off_in_mid_step_leaves_nothing_to_the_next(tmp_path):
    trainer = build(tmp_path, step="fused", gradient_accumulation_steps=2, max_steps=2)
    inner, seen = trainer.defense.micro_step, []

    def broken(run, inputs, items):
        found = inner(run, inputs, items)
        if not seen:
            seen.append("broken")
            raise KeyboardInterrupt
        seen.append(run.progress.micro)
        return found

    trainer.defense.micro_step = broken
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.run.progress.micro = 1  # where the first half of a step was done
    trainer.train()
    assert seen == ["broken", 0, 1, 0, 1]


def test_a_column_of_the_collator_is_seen_though_the_defense_takes_another_batch_first(tmp_path):
    """Lisa begins with safe pairs; the task's batches come later, with what their collator adds."""
    trainer = build(tmp_path, given={"defense": {"name": "lisa", "align_steps": 2, "finetune_steps": 2}}, step="fused")
    inner = trainer.data_collator
    trainer.data_collator = lambda rows: {**inner(rows), "token_weights": torch.ones(len(rows))}
    with pytest.raises(UnsupportedError, match="token_weights"):
        trainer.train()
