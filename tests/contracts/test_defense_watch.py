"""The contract's instruments see what they are there to see: a defense that breaks each promise."""

from __future__ import annotations

import pytest
import torch

from holdfast.training.hooks import DEFENSES, Defense
from tests.contracts.defense_cases import Case, Watch, build, hooks_of


class Careless(Defense):
    """Moves weights and random numbers, reads what it does not declare, and leaves hooks behind."""

    name = "careless"
    summary = "breaks every promise"
    passes = "1 forward + backward"

    def attach(self, run):
        module = next(m for m in run.model.modules() if isinstance(m, torch.nn.Linear))
        module.register_forward_hook(lambda *_: None)
        module.weight.register_post_accumulate_grad_hook(lambda *_: None) if module.weight.requires_grad else None

    def micro_step(self, run, inputs, items):
        loss = run.engine.accumulate(inputs, items, {})
        weight = next(p for p in run.model.parameters() if p.requires_grad)
        with torch.no_grad():
            weight.copy_((weight + 1.0) - 1.0)  # adding a step again, where a copy should be put back
        return loss

    def on_gradient(self, run):
        torch.rand(1)
        assert run.data.harmful is not None


@pytest.fixture
def careless(monkeypatch) -> Case:
    list(DEFENSES)  # the folder is scanned before the entry is made, so that taking it out leaves nothing
    monkeypatch.setitem(DEFENSES._entries, "careless", Careless)
    return Case("careless", "finetune")


def test_a_careless_defense_is_noticed(careless, tmp_path):
    watch = Watch()
    trainer = build(tmp_path, careless, watch=watch, max_steps=1)
    before = hooks_of(trainer.model)
    trainer.train()
    assert watch.left_changed == {"micro_step"}
    assert watch.moved_random_state == {"on_gradient"}
    assert watch.reads == {"harmful"}
    assert hooks_of(trainer.model) == before + 1


def test_what_the_trainer_reads_during_a_hook_is_not_counted(tmp_path):
    watch = Watch()
    trainer = build(tmp_path, Case("sft", "finetune"), watch=watch, max_steps=1)
    trainer.train()
    assert trainer.safety
    assert watch.reads == watch.left_changed == watch.moved_random_state == set()
    assert "on_gradient" in watch.called
