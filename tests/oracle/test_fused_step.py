"""The fused step against two passes: the same gradients, degradations and steps, wherever both can run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core.units import KL_UNITS, UNITS
from holdfast.fused import delta_rule
from holdfast.training.fused_engine import FusedEngine
from holdfast.training.safety import SafetySet
from tests import hybrid, rounding, tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import weights

ALL_ACTIVE = {"tau": 0.05, "alpha": 0.05, "beta": 5.0, "allow_infeasible_start": True}
SOME_ACTIVE = {"tau": 0.05, "alpha": 0.05, "beta": 20.0}  # rows with D < 0 are flat


class Watch:
    """Gradients as the defense sees them: the task's and the constraints', with degradations, at every step."""

    def __init__(self, trainer: hf.SafeSFTTrainer) -> None:
        self.task: list[list[torch.Tensor]] = []
        self.side: list[list[torch.Tensor]] = []
        self.degradations: list[torch.Tensor] = []
        inner = trainer.defense.on_gradient

        def on_gradient(run: Any) -> None:
            self.task.append([p.grad.detach().clone() for p in run.space().params])
            if "measure" not in vars(run.engine):  # the engine is made at the first step, and may be left
                run.engine.measure = self.noted(run.engine.measure)
            inner(run)

        trainer.defense.on_gradient = on_gradient

    def noted(self, measure: Any) -> Any:
        def measured(terms: Any) -> Any:
            found = measure(terms)
            for one in found.values():
                self.side.append([g.clone() for g in one.gradient])
                self.degradations.append(one.degradations)
            return found

        return measured


def trained(folder: Any, step: str, **options: Any) -> tuple[Watch, dict[str, torch.Tensor], hf.SafeSFTTrainer]:
    given = options.pop("given", {})
    if "constraint" not in given:
        given["constraint"] = hf.ChanceConstraint(
            **options.pop("limit", ALL_ACTIVE), unit=options.pop("unit", "nll_token"), first_k=2
        )  # completions have up to seven tokens
    trainer = build(folder / step, given=given, step=step, **options)
    watch = Watch(trainer)
    trainer.train()
    assert trainer.run.engine.fused == (step == "fused")
    assert trainer.run.engine_name == step
    return watch, weights(trainer), trainer


def close(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]], tolerance: float) -> None:
    assert len(a) == len(b) > 0
    assert any(t.any() for t in b[-1])
    for xs, ys in zip(a, b, strict=True):
        x, y = torch.cat([t.flatten() for t in xs]).double(), torch.cat([t.flatten() for t in ys]).double()
        assert (x - y).norm() <= tolerance * y.norm()


def both(folder: Any, *, tolerance: float = rounding.FLOAT32, **options: Any) -> tuple[Watch, Watch]:
    make = options.pop("make", dict)
    fused, after, _ = trained(folder, "fused", given=make(), **options)
    two, expected, _ = trained(folder, "two_pass", given=make(), **options)
    close(fused.task, two.task, tolerance)
    close(fused.side, two.side, tolerance)
    for d, e in zip(fused.degradations, two.degradations, strict=True):
        torch.testing.assert_close(d, e, rtol=0, atol=2e-6)
    assert after.keys() == expected.keys()
    for name, value in after.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    return fused, two


@pytest.mark.parametrize("unit", UNITS)
def test_it_is_the_step_of_two_passes_in_every_unit(tmp_path, unit):
    limit = SOME_ACTIVE if unit in KL_UNITS else ALL_ACTIVE  # KL starts at zero, with a zero gradient
    # Its gradient is p - p_0, two numbers that are still nearly equal: float32 leaves six digits of the difference.
    both(
        tmp_path,
        unit=unit,
        tolerance=1e-5 if unit in KL_UNITS else 1e-6,
        limit=limit,
        learning_rate=0.05,
        optim="sgd",
    )


@pytest.mark.parametrize(("step", "unit"), [("fused", "kl_first"), ("two_pass", "nll_first")])
def test_what_follows_the_first_tokens_is_not_passed_over_and_changes_nothing(tmp_path, monkeypatch, step, unit):
    options = {"unit": unit, "limit": SOME_ACTIVE, "learning_rate": 0.05, "optim": "sgd"}
    cut, _, trainer = trained(tmp_path / "cut", step, **options)
    (safety,) = trainer.safety.values()
    assert max(row.n_labels for row in safety.steering_rows) == 2 < max(row.n_labels for row in safety.constraint_set)
    monkeypatch.setattr(SafetySet, "steering_rows", property(lambda self: self.constraint_set))
    whole, _, _ = trained(tmp_path / "whole", step, **options)
    close(cut.side, whole.side, 1e-5)
    for d, e in zip(cut.degradations, whole.degradations, strict=True):
        torch.testing.assert_close(d, e, rtol=0, atol=2e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_is_the_same_under_gradient_checkpointing(tmp_path, reentrant):
    both(
        tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        learning_rate=0.05, optim="sgd",
    )  # fmt: skip


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("unit", ["nll_token", "kl_token"])
def test_it_is_the_same_where_inactive_rows_are_skipped(tmp_path, switch, unit):
    both(
        tmp_path,
        unit=unit,
        skip_inactive_rows=switch,
        limit=SOME_ACTIVE,
        safety_batch_size=8,
        learning_rate=0.1,
        optim="sgd",
    )


def test_it_is_the_same_over_micro_batches(tmp_path):
    both(tmp_path, gradient_accumulation_steps=3, safety_batch_size=4, learning_rate=0.05, optim="sgd")


def test_it_is_the_same_with_more_micro_batches_than_safety_rows(tmp_path):
    both(tmp_path, gradient_accumulation_steps=3, safety_batch_size=2, learning_rate=0.05, optim="sgd")


def test_it_is_the_same_on_a_hybrid_model(tmp_path, monkeypatch):
    calls: list[Any] = []
    rule = delta_rule.gated_delta_rule
    monkeypatch.setattr(delta_rule, "gated_delta_rule", lambda *args: calls.append(len(args)) or rule(*args))

    def make() -> dict[str, Any]:
        return {"model": hybrid.model(), "peft_config": hybrid.lora()}

    both(tmp_path, make=make, learning_rate=0.05, optim="sgd", tolerance=1e-5)
    assert calls  # its mixers by the rule of this project, and not by transformers'


def test_it_is_the_same_where_an_adapter_goes_on_training(tmp_path):
    def make() -> dict[str, Any]:
        return {"model": tiny.continued(), "peft_config": None}

    limit = {"tau": 1e-3, "alpha": 0.05, "beta": 2e3}  # rows at theta_0 are flat: rounding alone gives them no gradient
    fused, _ = both(tmp_path, make=make, unit="kl_token", limit=limit, tolerance=1e-5, learning_rate=0.05, optim="sgd")
    assert float(fused.degradations[-1].max()) > 1e-3


def test_it_is_the_same_where_only_some_steps_measure(tmp_path):
    def make() -> dict[str, Any]:
        return {"defense": {"name": "holdfast", "anchor": True, "every": 4, "reserve": 0.2}}

    limit = {"tau": 0.02, "alpha": 0.2, "beta": 50.0}
    fused, _ = both(tmp_path, make=make, unit="kl_token", limit=limit, tolerance=1e-5, learning_rate=5e-3, max_steps=10)
    assert 3 <= len(fused.side) < len(fused.task) == 10


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"skip_inactive_rows": "on"}], ids=str)
def test_it_is_the_same_where_rows_are_drawn_by_importance(tmp_path, more):
    def make() -> dict[str, Any]:
        return {"defense": {"name": "holdfast", "draw": "importance", "reserve": 0.2}}

    given = {"learning_rate": 0.02, "optim": "sgd", "max_steps": 4, "safety_batch_size": 4, **more}
    both(tmp_path, make=make, limit=SOME_ACTIVE, tolerance=1e-5, **given)  # weights have the rounding of small terms


def test_it_is_the_same_with_several_safety_sets(tmp_path):
    def make() -> dict[str, Any]:
        return {
            "safety_dataset": {"one": tiny.dataset(20, seed=2), "two": tiny.dataset(20, seed=5)},
            "constraint": {
                "one": hf.ChanceConstraint(**SOME_ACTIVE, unit="nll_token"),
                "two": hf.ChanceConstraint(**SOME_ACTIVE, unit="kl_token"),
            },
        }

    both(tmp_path, make=make, learning_rate=0.05, optim="sgd")


@pytest.mark.parametrize("name", ["sft", "mix", "kl", "safegrad", "penalty", "asft", "lisa", "salora"])
@pytest.mark.parametrize("start", ["fresh", "continued"])
def test_packed_rows_leave_other_defenses_as_they_are(tmp_path, name, start, monkeypatch):
    """Their task pass and their side passes; the reference of kl is the adapter off, or the adapter it began with."""
    if start == "continued" and name in ("asft", "lisa", "salora"):
        pytest.skip("needs a fresh adapter, or no reference")
    options = {"lisa": {"align_steps": 1, "finetune_steps": 2, "warmup_share": 0.0}}.get(name, {})
    options |= {"safety_rank": 4, "task_rank": 4} if name == "salora" else {}
    packed = []
    inner = FusedEngine._packed

    def counted(self: Any, rows: Any, loss: Any) -> Any:
        packed.append(len(rows))
        return inner(self, rows, loss)

    monkeypatch.setattr(FusedEngine, "_packed", counted)
    found = {}
    for step in ("fused", "two_pass"):
        given: dict[str, Any] = {
            "defense": {"name": name, **options},
            "constraint": hf.ChanceConstraint(tau=1.0, unit="nll_token"),
        }
        if name == "asft":
            given["unaligned"] = tiny.model(seed=3)
        if start == "continued":
            given |= {"model": tiny.continued(), "peft_config": None}
        trainer = build(tmp_path / step, given=given, step=step, learning_rate=0.05, optim="sgd", safety_batch_size=4)
        trainer.train()
        assert trainer.run.engine.fused == (step == "fused")
        found[step] = weights(trainer)
    assert bool(packed) == (name in ("mix", "kl", "safegrad"))
    for key, value in found["fused"].items():
        torch.testing.assert_close(value, found["two_pass"][key], rtol=1e-4, atol=1e-6)
