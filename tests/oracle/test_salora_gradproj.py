"""The one-direction gradient filter against a literal transcription, and what a projection must satisfy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from holdfast.core.event_log import read
from holdfast_lab.defenses.salora_gradproj import SaLoRAGradientProjection
from tests import tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 3}


def defense(**options) -> SaLoRAGradientProjection:
    return SaLoRAGradientProjection(SaLoRAGradientProjection.Config(**options))


def flat(vector) -> Tensor:
    return torch.cat([g.detach().flatten() for g in vector]).double()


def watched(trainer) -> tuple[list[Tensor], list[Tensor]]:
    """Train; the gradients before and after the projection."""
    before, after = [], []
    projected = trainer.defense.on_gradient

    def on_gradient(run):
        before.append(flat(run.space().task_gradient()))
        projected(run)
        after.append(flat(run.space().task_gradient()))

    trainer.defense.on_gradient = on_gradient
    trainer.train()
    return before, after


def literal_direction(model, rows) -> Tensor:
    """Gradient of the mean NLL over all completion tokens, one row at a time, with norm 1."""
    model.eval()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        log_p = torch.log_softmax(model(input_ids=torch.tensor([row.input_ids])).logits[0].double(), -1)
        for t in range(1, len(row.input_ids)):
            if row.labels[t] != -100:
                total, tokens = total - log_p[t - 1, row.labels[t]], tokens + 1
    gradient = flat(torch.autograd.grad(total / tokens, [p for p in model.parameters() if p.requires_grad]))
    return gradient / gradient.norm()


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_three_steps_are_the_literal_ones(tmp_path, strength):
    """With dropout in training: the direction is found without, and at theta_0 whatever the step."""
    given = {"defense": defense(strength=strength, rows=None), "peft_config": tiny.lora(0.2)}
    trainer = build(tmp_path, given=given, **SGD, gradient_accumulation_steps=2)
    model = copy.deepcopy(trainer.model)
    for module in model.modules():
        module.__dict__.pop("forward", None)  # TRL's patch, which would run the original
    before, after = watched(trainer)
    u = literal_direction(model, trainer.run.data.safe)
    largest = 0.0
    for g, found in zip(before, after, strict=True):
        torch.testing.assert_close(found, g - strength * (g @ u) * u, rtol=0, atol=1e-5 * float(g.norm()))
        largest = max(largest, float((g @ u).abs() / g.norm()))
    assert largest > 0.01
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["along"] for row in rows] == pytest.approx([float(g @ u) for g in before], rel=1e-3)
    assert [row["cosine"] for row in rows] == pytest.approx([float(g @ u / g.norm()) for g in before], rel=1e-3)


def test_strength_1_leaves_nothing_along_the_direction_and_is_idempotent(tmp_path):
    trainer = build(tmp_path, given={"defense": defense()}, **SGD)
    before, after = watched(trainer)
    u = flat(trainer.defense._direction)  # type: ignore[attr-defined]
    assert float(u.norm()) == pytest.approx(1.0, abs=1e-6)
    for g, found in zip(before, after, strict=True):
        assert abs(float(found @ u)) <= 1e-6 * float(g.norm())
        assert abs(float(g @ u)) > 1e-3 * float(g.norm())
        assert float(found.norm()) <= float(g.norm())
    trainer.run.space().add_to_gradient([trainer.defense._direction], [3.0])  # type: ignore[attr-defined]
    again = []
    for _ in range(2):
        type(trainer.defense).on_gradient(trainer.defense, trainer.run)
        again.append(flat(trainer.run.space().task_gradient()))
    torch.testing.assert_close(again[0], again[1], rtol=0, atol=1e-6)


def test_strength_0_is_plain_sft_to_the_bit(tmp_path):
    found = []
    for name, choice in (("a", "sft"), ("b", {"name": "salora_gradproj", **SaLoRAGradientProjection.off})):
        given = {"defense": choice, "peft_config": tiny.lora(0.2)}
        trainer = build(tmp_path / name, given=given, gradient_accumulation_steps=2)
        trainer.train()
        found.append(weights(trainer))
    assert same(*found)


def test_a_fresh_adapter_s_direction_lies_in_the_b_factors(tmp_path):
    """B = 0 makes the gradient of A zero."""
    trainer = build(tmp_path, given={"defense": defense()}, **{**SGD, "max_steps": 1})
    trainer.train()
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    pieces = dict(zip([names[id(p)] for p in trainer.run.space().params], trainer.defense._direction, strict=True))  # type: ignore[attr-defined]
    assert any("lora_A" in name for name in pieces)
    for name, piece in pieces.items():
        assert bool(piece.any()) == ("lora_B" in name), name
