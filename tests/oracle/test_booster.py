"""Booster against a literal transcription of its algorithm, and its analytic properties."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.constraint.gradients import ParameterSpace
from holdfast.core.errors import ConfigError
from holdfast.data.encode import collate
from holdfast_lab.defenses.booster import Booster, harmful_drop
from tests import tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

ALIGN = {"stage": "align", "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "weight_decay": 0.0}
ALPHA, LAM = 0.3, 2.0


def run(folder, options: dict[str, Any] | None = None, **arguments: Any):
    chosen = {"name": "booster", "alpha": ALPHA, "lam": LAM, **(options or {})}
    given = {"defense": chosen, "harmful_dataset": tiny.dataset(14, seed=5, start="w3"), "safety_dataset": None}
    return build(folder, given={**given, "constraint": None}, **{**ALIGN, **arguments})


def token_mean(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy over all scored tokens, written out."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (labels != -100)).sum() / (labels != -100).sum()


def gradient(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    params = [p for p in model.parameters() if p.requires_grad]
    model.eval()
    found = torch.autograd.grad(token_mean(model, batch), params)
    model.train()
    return list(found)


def literal_step(
    model: Any, safe: list[dict[str, torch.Tensor]], harmful: dict[str, torch.Tensor], rate: float
) -> None:
    """Algorithm 1 with the explicit parameter list; `safe` are the micro-batches of the step."""
    params = [p for p in model.parameters() if p.requires_grad]
    counts = [int((b["labels"][:, 1:] != -100).sum()) for b in safe]
    g_safe = [torch.zeros_like(p) for p in params]
    for batch, count in zip(safe, counts, strict=True):
        for total, part in zip(g_safe, gradient(model, batch), strict=True):
            total.add_(part, alpha=count / sum(counts))
    g_harm = gradient(model, harmful)
    norm = torch.sqrt(sum(g.double().square().sum() for g in g_harm)) + 1e-7
    start = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, g in zip(params, g_harm, strict=True):
            p.sub_(ALPHA * (g / norm).float())
    g_there = gradient(model, harmful)
    with torch.no_grad():
        for p, before, s, h, t in zip(params, start, g_safe, g_harm, g_there, strict=True):
            p.copy_(before - rate * (s + LAM * (h - t)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_takes_the_steps_of_the_algorithm(tmp_path, accumulation):
    trainer = run(tmp_path, gradient_accumulation_steps=accumulation, max_steps=3)
    other = run(tmp_path / "literal").model  # same seed, same fresh adapter
    seen: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(3)]
    step = trainer.training_step

    def noted(model, inputs, *args, **kwargs):
        kept = {name: inputs[name].clone() for name in ("input_ids", "attention_mask", "labels")}
        seen[trainer.run.progress.step].append(kept)
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = noted
    drawn: list[list[int]] = []
    draw = trainer.run.data.draw
    trainer.run.data.draw = lambda *args: drawn.append(draw(*args)) or drawn[-1]
    trainer.train()
    pad = trainer.processing_class.pad_token_id
    for safe, positions in zip(seen, drawn, strict=True):
        literal_step(other, safe, collate([trainer.run.data.harmful[i] for i in positions], pad), 0.05)
    found, expected = weights(trainer), {n: p.detach() for n, p in other.named_parameters() if p.requires_grad}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6)
    assert all(len(rows) == 2 * accumulation for rows in drawn)


def test_without_weight_it_is_sft_and_with_weight_it_is_not(tmp_path):
    off, on = run(tmp_path / "off", {"lam": 0.0}), run(tmp_path / "on")
    plain = build(tmp_path / "sft", given={"defense": "sft", "safety_dataset": None, "constraint": None}, **ALIGN)
    for trainer in (off, on, plain):
        trainer.train()
    assert same(weights(off), weights(plain))
    assert not same(weights(on), weights(plain))


class Quadratic:
    """A run whose harmful loss is `theta^T H theta / 2`."""

    def __init__(self, hessian: torch.Tensor, theta: torch.Tensor) -> None:
        self.hessian, self.theta = hessian, nn.Parameter(theta.clone())
        self.seen: list[torch.Tensor] = []
        self.engine = self

    def space(self) -> ParameterSpace:
        return ParameterSpace([self.theta])

    def side_gradient(self, rows: Any, loss: Any):
        self.seen.append(self.theta.detach().clone())
        here = self.theta.detach()
        return (here @ self.hessian @ here / 2).reshape(1), [self.hessian @ here]


@pytest.fixture
def quadratic():
    draw = torch.Generator().manual_seed(3)
    root = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    return Quadratic(root @ root.T, torch.randn(6, generator=draw, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 3.0])
def test_on_a_quadratic_the_difference_is_alpha_times_the_hessian(quadratic, alpha):
    """g(theta) - g(theta') = alpha H g / norm(g), exactly, for any length of the step."""
    start = quadratic.theta.detach().clone()
    row: Any = SimpleNamespace(n_labels=1)
    _, here, there = harmful_drop(quadratic, [row], alpha)
    direction = here[0] / (here[0].norm() + 1e-7)
    torch.testing.assert_close(here[0] - there[0], alpha * quadratic.hessian @ direction, rtol=1e-9, atol=1e-12)
    assert torch.equal(quadratic.theta, start)
    moved = (quadratic.seen[1] - quadratic.seen[0]).norm()
    assert float(moved) == pytest.approx(alpha, rel=1e-6)


@pytest.mark.parametrize(
    "options", [{"alpha": 0.0}, {"alpha": float("nan")}, {"lam": -1.0}, {"harmful_batch_size": 0}], ids=str
)
def test_settings_out_of_range(options):
    with pytest.raises(ConfigError):
        Booster.Config(**options)


def test_harmful_pairs_are_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="harmful pairs"):
        build(tmp_path, given={"defense": "booster", "safety_dataset": None, "constraint": None}, **ALIGN)


def test_it_is_for_the_alignment_stage(tmp_path):
    with pytest.raises(ConfigError, match="align stage, this is the finetune stage"):
        run(tmp_path, stage="finetune")
