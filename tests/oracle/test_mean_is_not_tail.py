"""Proposition 2.1: a bound on the mean does not bound the tail. Its random variable, and a training run that shows it.

The run: a tiny model answers ten safety prompts as it should. The task teaches another answer to three of them. Under
the mean constraint those three pay for the task and seven hide it; the chance constraint does not let them.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor

import holdfast as hf
from holdfast.core.event_log import read
from tests import tiny
from tests.unit.trainers.building import deep as build

MU, TAU, ALPHA = 0.3, 0.5, 0.1  # as the proposition asks: 0 < mu < tau and alpha tau < mu
CONFLICTING, KEPT, PROMPT = 3, 7, 4


@pytest.mark.parametrize(
    ("mu", "tau", "alpha"), [(MU, TAU, ALPHA), (0.1, 1.5, 0.05), (1.0, 1.01, 0.9)], ids=["run", "rare", "frequent"]
)
def test_the_random_variable_of_the_proof(mu, tau, alpha):
    """Z = tau + eta with probability alpha, else 0: the mean is at most mu, the tail has alpha."""
    eta = (mu / alpha - tau) / 2
    assert eta > 0  # this is where alpha tau < mu is needed
    values, probabilities = np.array([tau + eta, 0.0]), np.array([alpha, 1 - alpha])
    assert (values >= 0).all()
    assert values @ probabilities <= mu
    assert probabilities[values > tau].sum() >= alpha
    # The same by counting: alpha n of n examples. The mean constraint holds, the chance constraint is at its limit.
    n = 1000
    d = np.repeat(values, [round(alpha * n), n - round(alpha * n)])
    assert d.mean() <= mu
    assert (
        hf.ChanceConstraint(tau=tau, alpha=alpha, beta=1e3, unit="nll_token").violation_rate(torch.tensor(d)) >= alpha
    )


def rows(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Safety pairs, those that will conflict first, and the task: other answers to the latter."""
    draw = torch.Generator().manual_seed(100 + seed)

    def words(count: int) -> str:
        return " ".join(tiny.WORDS[i] for i in torch.randint(10, len(tiny.WORDS), (count,), generator=draw).tolist())

    conflicting = [{"prompt": f"w1 {words(PROMPT - 1)} ", "completion": "w8 w8 w8"} for _ in range(CONFLICTING)]
    kept = [{"prompt": f"w2 {words(PROMPT - 1)} ", "completion": words(3)} for _ in range(KEPT)]
    return [*conflicting, *kept], [{**row, "completion": "w9 w9 w9"} for row in conflicting]


def aligned(seed: int, safety: list[dict[str, str]]) -> torch.nn.Module:
    """A model that answers all safety prompts as written, so that no degradation can be negative by much."""
    tokenizer, model = tiny.tokenizer(), tiny.model(seed=seed, layers=1)
    ids = torch.tensor([[*tokenizer(row["prompt"] + row["completion"]).input_ids, 1] for row in safety])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < PROMPT, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model


def degradations(folder, model, safety, task, defense) -> tuple[Tensor, list[bool], list[dict]]:
    """D_i after training under a defense, which of them conflict with the task, and the event log."""
    trainer = build(
        folder,
        given={
            "model": copy.deepcopy(model), "peft_config": None, "train_dataset": Dataset.from_list(task),
            "safety_dataset": {"constraint": safety}, "defense": {"estimator": "batch", **defense},
            "constraint": hf.ChanceConstraint(tau=TAU, alpha=ALPHA, beta=4.0, unit="nll_token"),
        },
        max_steps=24, learning_rate=2e-3, lr_scheduler_type="linear", per_device_train_batch_size=CONFLICTING,
        safety_batch_size=len(safety), safety_micro_batch_size=len(safety), logging_strategy="no",
    )  # fmt: skip
    trainer.train()
    conflicting = [
        row.input_ids[0] == tiny.tokenizer()("w1").input_ids[0] for row in trainer.safety["safety"].constraint_set
    ]
    return trainer.degradations(role="constraint"), conflicting, read(trainer.run_dir / "events.jsonl")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_under_the_mean_constraint_loses_the_tail_and_holdfast_keeps_it(tmp_path, seed):
    safety, task = rows(seed)
    model = aligned(seed, safety)
    options = {"name": "mean_constraint", "epsilon": MU}
    mean, conflicting, log = degradations(tmp_path / "mean", model, safety, task, options)
    assert float(mean.mean()) <= MU + 1e-3  # the constraint of equation (4) holds ...
    assert float(mean.min()) > -0.01  # ... of a nonnegative variable, as the proposition has it ...
    assert {row["event"] for row in log[-5:]} == {"active"}  # ... and has been enforced ...
    rate = float((mean > TAU).double().mean())
    assert rate > ALPHA + 0.1  # ... while more examples than alpha are lost:
    assert (mean > TAU).tolist() == conflicting  # exactly those that the task contradicts
    chance, _, _ = degradations(tmp_path / "chance", model, safety, task, {"name": "holdfast"})
    assert float((chance > TAU).double().mean()) <= ALPHA
    assert log[-1]["loss"] < 0.2 * log[0]["loss"]  # the task was learned meanwhile
