"""Replay and KL anchor against a literal transcription: whole logits, the term in the loss, one batch, plain SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.data.encode import collate
from holdfast.data.streams import StepStream
from tests import tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

RATE, WEIGHT = 0.1, 0.7
OPTIONS = {
    "optim": "sgd", "learning_rate": RATE, "max_grad_norm": 0.0, "weight_decay": 0.0, "max_steps": 5,
    "gradient_accumulation_steps": 2, "safety_batch_size": 5, "safety_micro_batch_size": 2,
}  # fmt: skip
Batch = dict[str, torch.Tensor]


STARTS: dict[str, Callable[[], Any]] = {
    "fresh adapter": tiny.fresh, "continued adapter": tiny.continued, "all weights": tiny.model,
}  # fmt: skip


def observed(folder, start: str, defense: Any, **options: Any):
    """A trainer, its task micro-batches by step, the weights after each step, and its rows."""
    given = {"defense": defense, "train_dataset": tiny.dataset(16, seed=1, start="w1")}
    if start != "fresh adapter":
        given |= {"model": STARTS[start](), "peft_config": None}
    trainer = build(folder, given=given, **{**OPTIONS, **options})
    seen: dict[str, list[Any]] = {"task": [], "path": [], "rows": []}
    step = trainer.training_step

    def noted(model, inputs, *args, **kwargs):
        while len(seen["task"]) <= trainer.state.global_step:
            seen["task"].append([])
        seen["task"][-1].append({name: inputs[name].clone() for name in ("input_ids", "attention_mask", "labels")})
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = noted
    trainer.step_listeners.append(lambda row: seen["path"].append(weights(trainer)))
    trainer.step_listeners.append(seen["rows"].append)
    return trainer, seen


def logits_of(model: Any, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]


def nll(model: Any, batch: Batch) -> torch.Tensor:
    """Sum over the scored tokens."""
    return torch.nn.functional.cross_entropy(
        logits_of(model, batch).transpose(1, 2), batch["labels"][:, 1:], reduction="sum"
    )


def tokens(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def kl(model: Any, model_0: Any, batch: Batch) -> torch.Tensor:
    """Sum over the scored tokens of `sum_v p0(v) (log p0(v) - log p(v))`."""
    with torch.no_grad():
        p_0 = torch.softmax(logits_of(model_0, batch), -1)
    p = torch.softmax(logits_of(model, batch), -1)
    total = torch.zeros(())
    for i, j in (batch["labels"][:, 1:] != -100).nonzero().tolist():
        total = total + (p_0[i, j] * (p_0[i, j].log() - p[i, j].log())).sum()
    return total


def at(start: str, values: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of its own with these trained weights, and its trained parameters."""
    model = STARTS[start]()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert params.keys() == values.keys()
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(values[name])
    return model, params


def transcription(trainer: Any, start: str, theta_0: dict, task: list[list[Batch]], term: str, weight: float):
    """Weights after each step of SGD, and the term at each step."""
    (model, params), (model_0, _) = at(start, theta_0), at(start, theta_0)
    draws = StepStream(len(trainer.run.data.safe), trainer.args.safety_batch_size, trainer.args.stream_seed, term)
    path, terms = [], []
    for t, micros in enumerate(task):
        batch = collate([trainer.run.data.safe[i] for i in draws.indices(t)], pad_token_id=0)
        side = (nll(model, batch) if term == "mix" else kl(model, model_0, batch)) / tokens(batch)
        loss = sum(nll(model, m) for m in micros) / sum(tokens(m) for m in micros) + weight * side
        for p, g in zip(params.values(), torch.autograd.grad(loss, list(params.values())), strict=True):
            p.data -= RATE * g
        path.append({n: p.detach().clone() for n, p in params.items()})
        terms.append(float(side.detach()))
    return path, terms


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(
    ("term", "start"), [("mix", "fresh adapter"), *(("kl", start) for start in STARTS)], ids=lambda x: x
)
def test_trajectory_is_the_transcription(tmp_path, term, start):
    trainer, seen = observed(tmp_path, start, {"name": term, "weight": WEIGHT})
    theta_0 = weights(trainer)
    trainer.train()
    assert {len(micros) for micros in seen["task"]} == {2}
    path, terms = transcription(trainer, start, theta_0, seen["task"], term, WEIGHT)
    for found, wanted in zip(seen["path"], path, strict=True):
        assert furthest(found, wanted) < 2e-6
    logged = [row["safe_loss" if term == "mix" else "kl"] for row in seen["rows"]]
    assert logged == pytest.approx(terms, rel=1e-4, abs=2e-6)
    without, _ = transcription(trainer, start, theta_0, seen["task"], term, 0.0)
    assert furthest(seen["path"][-1], without[-1]) > 2e-5  # what the comparison can see


def test_divergence_and_its_gradient_are_zero_at_theta_0(tmp_path):
    """The first step is that of plain SFT, whatever the weight."""
    start = "all weights"
    anchored, seen = observed(tmp_path / "kl", start, {"name": "kl", "weight": 50.0}, max_steps=1)
    anchored.train()
    plain, _ = observed(tmp_path / "sft", start, "sft", max_steps=1)
    plain.train()
    assert abs(seen["rows"][0]["kl"]) < 1e-6
    assert furthest(weights(anchored), weights(plain)) < 1e-5


def test_a_heavy_anchor_keeps_the_model_where_it_was_on_safe_data(tmp_path):
    found = {}
    for weight in (0.0, 5.0):
        options = {"max_steps": 12, "learning_rate": 0.05}
        trainer, seen = observed(tmp_path / str(weight), "fresh adapter", {"name": "kl", "weight": weight}, **options)
        trainer.train()
        found[weight] = seen["rows"][-1]["kl"]
    assert 0 < found[5.0] < found[0.0] / 2


def test_weight_zero_is_plain_sft_bit_for_bit(tmp_path):
    """With dropout: the side pass leaves the random state alone."""
    trained = {}
    for name in ("mix", "kl", "sft"):
        defense = name if name == "sft" else {"name": name, "weight": 0.0}
        given = {"defense": defense, "peft_config": tiny.lora(0.2)}
        trainer = build(tmp_path / name, given=given, max_steps=3, gradient_accumulation_steps=2)
        trainer.train()
        trained[name] = weights(trainer)
    assert same(trained["mix"], trained["sft"])
    assert same(trained["kl"], trained["sft"])
