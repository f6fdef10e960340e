"""When each hook of a defense is called, what it sees there, and that no registry is needed to use one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.core.event_log import read
from holdfast.defenses.holdfast import Holdfast
from holdfast.training.hooks import DEFENSES, Defense, make_defense
from tests import tiny
from tests.unit.trainers.building import build, same, weights


class Toy(Defense):
    """Writes down every call; `extra` and `shift` make two of the hooks visible in the weights."""

    name = "toy"
    summary = "writes down its calls"
    passes = "1 forward + backward"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        extra: float = 0.0
        shift: float = 0.0

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.calls: list[str] = []
        self.seen: list[Any] = []
        self.norms: dict[str, list[float]] = {"on_gradient": [], "before_step": []}
        self.loaded: dict[str, Any] | None = None

    def _norm(self, run) -> float:
        return sum(float(p.grad.square().sum()) for p in run.model.parameters() if p.grad is not None) ** 0.5

    def attach(self, run):
        assert run.optimizer.param_groups
        self.calls.append("attach")

    def choose_batch(self, run, inputs, items):
        self.calls.append("choose_batch")
        self.seen.append(inputs["input_ids"])
        return inputs, items

    def task_loss(self, run, model, inputs, items, default):
        self.calls.append("task_loss")
        return default()

    def micro_step(self, run, inputs, items):
        self.calls.append("micro_step")
        loss = run.engine.accumulate(inputs, items, {})
        self.calls.append("micro_step done")
        assert not loss.requires_grad
        return loss

    def extra_loss(self, run, model, inputs):
        self.calls.append("extra_loss")
        if not self.config.extra:
            return None
        squares = sum(p.square().sum() for p in model.parameters() if p.requires_grad)
        return self.config.extra * squares / run.args.gradient_accumulation_steps

    def on_gradient(self, run):
        self.calls.append(f"on_gradient {run.progress.step}")
        self.norms["on_gradient"].append(self._norm(run))

    def before_step(self, run):
        self.calls.append("before_step")
        self.norms["before_step"].append(self._norm(run))
        self.before = weights(run)

    def after_step(self, run):
        self.calls.append("after_step")
        assert not same(self.before, weights(run))

    def transform(self, run):
        self.calls.append("transform")
        with torch.no_grad():
            for p in run.model.parameters():
                if p.requires_grad:
                    p.add_(self.config.shift)

    def row(self):
        self.calls.append("row")
        return {"toy_calls": len(self.calls), "event": "toy"}

    def state_dict(self):
        self.calls.append("state_dict")
        return {"calls": len(self.calls)}

    def load_state_dict(self, state):
        self.calls.append("load_state_dict")
        self.loaded = state


MICRO = ["choose_batch", "micro_step", "task_loss", "extra_loss", "micro_step done"]


def step(number: int) -> list[str]:
    return [*MICRO, *MICRO, f"on_gradient {number}", "before_step", "after_step", "row"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy = Toy()
    options = {
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_grad_norm": 0.1,
    }
    trainer = build(folder, given={"defense": toy}, **options)
    trainer.train()
    return folder, options, trainer, toy


def test_order_of_calls_with_two_micro_batches_a_step(finished):
    *_, toy = finished
    assert toy.calls == ["attach", *step(0), *step(1), "state_dict", "transform"]
    assert "toy" not in DEFENSES


def test_rows_reach_the_event_log_and_the_metrics(finished):
    _, _, trainer, _ = finished
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["toy_calls"] for row in rows] == [15, 29]
    assert {"step", "loss", "learning_rate", "seconds", "event"} <= rows[0].keys()
    assert any("safety/toy_calls" in row for row in trainer.state.log_history)


def test_gradients_are_seen_before_and_after_clipping(finished):
    *_, toy = finished
    assert min(toy.norms["on_gradient"]) > 0.1
    assert max(toy.norms["before_step"]) <= 0.1 * (1 + 1e-4)


def test_state_comes_back_on_resume(finished):
    folder, options, _, toy = finished
    again = Toy()
    trainer = build(folder, given={"defense": again}, **{**options, "max_steps": 2})
    trainer.args.max_steps = 4
    trainer.fingerprint = lambda: _fingerprint(trainer, 2)
    trainer.train(resume_from_checkpoint=True)
    assert again.loaded == {"calls": toy.calls.index("state_dict") + 1}
    assert again.calls[:2] == ["attach", "load_state_dict"]
    assert again.calls[2:-2] == [*step(2), *step(3)]


def _fingerprint(trainer, steps: int):
    """The run's fingerprint as it was when it had this many steps to go."""
    longer, trainer.args.max_steps = trainer.args.max_steps, steps
    try:
        return type(trainer).fingerprint(trainer)
    finally:
        trainer.args.max_steps = longer


def test_extra_loss_adds_its_gradient(tmp_path):
    """SGD: the term c |theta|^2, shared by two micro-batches, moves the first step by -2 c lr theta."""
    options = {
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
    }
    without = build(tmp_path / "a", given={"defense": Toy()}, **options)
    start = weights(without)
    without.train()
    with_term = build(tmp_path / "b", given={"defense": Toy(Toy.Config(extra=0.25))}, **options)
    with_term.train()
    plain, moved = weights(without), weights(with_term)
    for name, theta in start.items():
        torch.testing.assert_close(moved[name] - plain[name], -2 * 0.25 * 0.1 * theta, rtol=1e-3, atol=1e-7)
    assert max(float(theta.abs().max()) for theta in start.values()) > 0.01


def test_extra_loss_stays_out_of_evaluation(tmp_path):
    given = {"eval_dataset": tiny.dataset(6, seed=8, start="w1")}
    toy = Toy(Toy.Config(extra=5.0))
    found = build(tmp_path / "a", given={**given, "defense": toy}).evaluate()["eval_loss"]
    assert found == build(tmp_path / "b", given={**given, "defense": "sft"}).evaluate()["eval_loss"]
    assert "extra_loss" not in toy.calls


def test_transform_changes_the_trained_model_once_and_reaches_the_saved_adapter(tmp_path):
    from safetensors.torch import load_file

    plain = build(tmp_path / "a", given={"defense": Toy()}, max_steps=1)
    plain.train()
    shifted = build(tmp_path / "b", given={"defense": Toy(Toy.Config(shift=1.0))}, max_steps=1)
    shifted.train()
    shifted.save_model(str(tmp_path / "adapter"))
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, theta in weights(plain).items():
        torch.testing.assert_close(weights(shifted)[name], theta + 1.0)
        torch.testing.assert_close(stored[name.replace(".default", "")], theta + 1.0)


def test_choose_batch_replaces_what_is_trained_on(tmp_path):
    class Always(Toy):
        def choose_batch(self, run, inputs, items):
            self.first = getattr(self, "first", inputs)
            return dict(self.first), items

        def extra_loss(self, run, model, inputs):
            self.seen.append(inputs["input_ids"])

    toy = Always()
    build(tmp_path, given={"defense": toy}, max_steps=3).train()
    assert len(toy.seen) == 3
    assert all(torch.equal(x, toy.seen[0]) for x in toy.seen)


def test_defenses_by_name_mapping_and_object():
    toy = Toy()
    assert make_defense(toy) is toy
    assert isinstance(make_defense("holdfast"), Holdfast)
    made = make_defense({"name": "holdfast", "rate": 0.5})
    assert made.config.rate == 0.5
    assert made.describe()["rate"] == 0.5
    assert {"holdfast", "sft"} <= set(DEFENSES)


@pytest.mark.parametrize(
    ("choice", "what", "remedy"),
    [
        ("holdfsat", "unknown defense 'holdfsat'", "did you mean 'holdfast'?"),
        ({"name": "holdfast", "rte": 1}, "no option 'rte'", "did you mean 'rate'?"),
        ({"name": "holdfast", "zzz": 1}, "no option 'zzz'", "known: anchor, decay, draw, dual"),
        ({"name": "sft", "rate": 1}, "no option 'rate'", "it takes no options"),
        ({"rate": 1}, "has no name", "name: holdfast"),
    ],
)
def test_refusals_name_the_nearest(choice, what, remedy):
    with pytest.raises(ConfigError) as caught:
        make_defense(choice)
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert caught.value.exit_code == 2
