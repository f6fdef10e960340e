"""SafeGrad against a literal transcription: two models, one row at a time, plain autograd, SGD by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from holdfast.core.event_log import read
from holdfast.data.encode import collate
from holdfast.scoring.completion import deterministic
from holdfast.training.side_pass import token_mean_kl
from holdfast_lab.defenses.safegrad import SafeGrad, kl_everywhere
from tests import tiny
from tests.unit.constraint.literal import adapted
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 4}


STARTS = {
    "fresh adapter": {},
    "continued adapter": {"model": lambda: adapted(trained=0.2), "peft_config": None},
    "all parameters": {"peft_config": None},
    "trained head": {"peft_config": lambda: tiny.lora(modules_to_save=["lm_head"])},
}


def given(start: str, **options) -> dict:
    chosen = {k: v() if callable(v) else v for k, v in STARTS[start].items()}  # type: ignore[attr-defined]
    return {**chosen, "defense": SafeGrad(SafeGrad.Config(**options))}


def watched(trainer):
    """Train; the start, and of every step its micro-batches and its safe rows."""
    start, steps, defense = copy.deepcopy(trainer.model), [], trainer.defense
    for module in start.modules():
        module.__dict__.pop("forward", None)  # TRL's patch, which would run the original
    chosen, projected = defense.choose_batch, defense.on_gradient
    inputs = []

    def choose(run, batch, items):
        inputs.append({k: batch[k].clone() for k in ("input_ids", "attention_mask", "labels")})
        return chosen(run, batch, items)

    def on_gradient(run):
        guide = defense.guide(run)
        steps.append((list(inputs), [guide[i] for i in run.data.draw(guide, "safegrad")]))
        inputs.clear()
        projected(run)

    defense.choose_batch, defense.on_gradient = choose, on_gradient
    trainer.train()
    return start, steps


def task_loss(model, batches) -> Tensor:
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            length = int(mask.sum())
            log_p = torch.log_softmax(model(input_ids=ids[None, :length]).logits[0].double(), -1)
            for t in range(1, length):
                if labels[t] != -100:
                    total, tokens = total - log_p[t - 1, labels[t]], tokens + 1
    return total / tokens


def alignment_loss(model, reference, rows, positions: str) -> Tensor:
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        ids = torch.tensor([row.input_ids])
        q = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
        with torch.no_grad():
            p = torch.log_softmax(reference(input_ids=ids).logits[0].double(), -1)
        for t in range(1, len(row.input_ids)):
            answered = row.labels[t] != -100
            tokens += answered
            if answered or positions == "all":
                total = total + (p[t - 1].exp() * (p[t - 1] - q[t - 1])).sum()
    return total / tokens


def flat_gradient(loss: Tensor, named: dict[str, Tensor]) -> Tensor:
    pieces = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = [torch.zeros_like(p) if g is None else g for g, p in zip(pieces, named.values(), strict=True)]
    return torch.cat([g.flatten() for g in found]).double()


def literal(start, steps, *, rate: float, rho: float, positions: str) -> tuple[dict[str, Tensor], list[float]]:
    """Trained weights and the coefficients c."""
    model, reference = copy.deepcopy(start).eval(), start.eval()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    coefficients = []
    for batches, rows in steps:
        g_u = flat_gradient(task_loss(model, batches), named)
        g_a = flat_gradient(alignment_loss(model, reference, rows, positions), named)
        d, n2 = float(g_u @ g_a), float(g_a @ g_a)
        c = d / n2 if d < 0 and n2 > 1e-9 else 0.0
        coefficients.append(c)
        g = (g_u - c * g_a) + rho * g_a
        with torch.no_grad():
            for p, piece in zip(named.values(), g.split([p.numel() for p in named.values()]), strict=True):
                p.sub_(rate * piece.view_as(p))
    return {name: p.detach() for name, p in named.items()}, coefficients


CASES = {
    "fresh adapter": {"start": "fresh adapter"},
    "rho 0": {"start": "fresh adapter", "rho": 0.0},
    "all positions": {"start": "fresh adapter", "positions": "all"},
    "continued adapter": {"start": "continued adapter"},
    "all parameters": {"start": "all parameters", "rate": 0.05},
    "trained head": {"start": "trained head"},
}


@pytest.mark.parametrize("case", CASES)
def test_four_steps_are_the_literal_ones(tmp_path, case):
    options = {"rho": 1.0, "positions": "completion", **CASES[case]}
    start, rate = options.pop("start"), options.pop("rate", 0.5)
    trainer = build(tmp_path, given=given(start, guide=7, **options), **{**SGD, "learning_rate": rate})
    first, steps = watched(trainer)
    expected, coefficients = literal(first, steps, rate=rate, **options)
    found = weights(trainer)
    moved = {name: p.detach() for name, p in first.named_parameters()}
    scale = max(float((expected[name] - moved[name]).abs().max()) for name in expected)
    assert scale > 0.01
    for name, theta in expected.items():
        torch.testing.assert_close(found[name], theta, rtol=0, atol=2e-4 * scale)
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["coefficient"] for row in rows] == pytest.approx(coefficients, rel=1e-3, abs=1e-6)
    assert coefficients[0] == 0.0
    assert min(coefficients) < -0.01, "some step was in conflict"


def test_the_first_step_is_plain_sft_with_dropout_too(tmp_path):
    """At theta_0 the KL and its gradient are exactly zero: the safe pass has no dropout and leaves the random state."""
    options = {"given": {"peft_config": tiny.lora(0.2)}, "max_steps": 1}
    plain = build(tmp_path / "a", **{**options, "given": {**options["given"], "defense": "sft"}})
    plain.train()
    projected = build(tmp_path / "b", **{**options, "given": {**options["given"], "defense": "safegrad"}})
    projected.train()
    assert same(weights(plain), weights(projected))
    row = read(projected.run_dir / "events.jsonl")[0]
    assert (row["kl"], row["coefficient"], row["cosine"]) == (0.0, 0.0, None)


def test_off_is_plain_sft_to_the_bit(tmp_path):
    options = {"given": {"peft_config": tiny.lora(0.2)}, "max_steps": 3, "gradient_accumulation_steps": 2}
    runs = []
    for name, defense in (("a", "sft"), ("b", {"name": "safegrad", **SafeGrad.off})):
        trainer = build(tmp_path / name, **{**options, "given": {**options["given"], "defense": defense}})
        trainer.train()
        runs.append(weights(trainer))
    assert same(*runs)


def test_two_micro_batches_are_one_batch_of_twice_the_rows(tmp_path):
    """The projection is made once, on the accumulated gradient."""
    found = []
    for rows, micro in ((4, 1), (2, 2)):
        options = {**SGD, "per_device_train_batch_size": rows, "gradient_accumulation_steps": micro}
        trainer = build(tmp_path / str(rows), given=given("fresh adapter"), **options)
        trainer.train()
        found.append(weights(trainer))
        assert min(row["coefficient"] for row in read(trainer.run_dir / "events.jsonl")) < 0
    for name, theta in found[0].items():
        torch.testing.assert_close(found[1][name], theta, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kl", [token_mean_kl, kl_everywhere], ids=["completion", "all"])
def test_the_divergence_does_not_depend_on_padding(tmp_path, kl):
    trainer = build(tmp_path, given=given("fresh adapter"), **SGD)
    trainer.train()
    rows = trainer.run.data.safe[:4]
    loss, found = kl(rows, trainer.run.theta_0.active), []
    for multiple in (1, 64):
        batch = collate(rows, 0, multiple)
        with deterministic(trainer.model):
            found.append(loss(trainer.model, batch, [0, 1, 2, 3]).detach())
    assert batch["input_ids"].shape[1] == 64
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)
    assert float(found[0].sum()) > 1e-3
