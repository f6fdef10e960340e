"""Steps of DPO and GRPO under a violated constraint, against float64 autograd and a quadratic-programme solver.

The oracle has the trainer's weights before each step and nothing else of it: losses, degradations and gradients are
computed row by row with logits. With s_nom = -lr grad f, and v and h the constraint's value and gradient, the step is

    min 1/2 |s - s_nom|^2   s.t.  h . s <= -gamma v.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import TrainerCallback

import holdfast as hf
from holdfast.core.event_log import read
from tests import tiny
from tests.oracle.test_filter_qp import solve
from tests.unit.trainers import preferring

RATE, LR, BETA = 0.3, 2.0, 0.1
CONSTRAINT = hf.ChanceConstraint(tau=0.002, beta=500.0, alpha=0.05, unit="kl_token")
FILTER = {"name": "holdfast", "rate": RATE, "metric": "identity", "estimator": "batch", "trust_region": 1e6}
WHOLE = {  # every step sees all four task rows, in two micro-batches, and all six safety rows
    "optim": "sgd", "learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0,
    "safety_batch_size": 6, "safety_micro_batch_size": 4, "max_steps": 4,
}  # fmt: skip


class Watch(TrainerCallback):
    """The weights before and after every step, and the replies it was computed on."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.steps: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]] = []

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.trainer.model.named_parameters() if p.requires_grad}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.before = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append((self.before, self._now(), getattr(self.trainer, "_buffered_inputs", None)))


class Oracle:
    """The same model in float64."""

    def __init__(self, trainer: Any, folder: Any) -> None:
        self.model = get_peft_model(preferring.start(folder), tiny.lora()).double()
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.safety = [(e.input_ids, e.labels) for e in trainer.safety["safety"].constraint_set]
        self.pairs = list(trainer.train_dataset)

    def put(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(weights[name])

    def log_probs(self, ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(self.model(input_ids=torch.tensor([ids])).logits[0], -1)

    def reply(self, prompt: list[int], reply: list[int]) -> torch.Tensor:
        """Log-probability of each token of a reply."""
        found = self.log_probs([*prompt, *reply])[len(prompt) - 1 : -1]
        return found.gather(1, torch.tensor(reply)[:, None])[:, 0]

    def dpo(self, _: Any) -> torch.Tensor:
        losses = []
        for row in self.pairs:
            prompt, chosen, rejected = row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]
            margin = self.reply(prompt, chosen).sum() - self.reply(prompt, rejected).sum()
            with torch.no_grad(), self.model.disable_adapter():
                reference = self.reply(prompt, chosen).sum() - self.reply(prompt, rejected).sum()
            losses.append(-torch.nn.functional.logsigmoid(BETA * (margin - reference)))
        return torch.stack(losses).mean()

    def grpo(self, micro_batches: Any) -> torch.Tensor:
        """Advantage-weighted log-probabilities: where the replies are the model's own, ratios are one."""
        losses = []
        for batch in micro_batches:
            for i, advantage in enumerate(batch["advantages"].double()):
                prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
                reply = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
                losses.append(-advantage * self.reply(prompt, reply).mean())
        return torch.stack(losses).mean()

    def constraint(self, _: Any) -> torch.Tensor:
        """g: the mean ramp over the mean KL of each safety reply, minus alpha."""
        terms = []
        for ids, labels in self.safety:
            scored = [i - 1 for i, label in enumerate(labels) if i > 0 and label != -100]
            now = self.log_probs(list(ids))[scored]
            with torch.no_grad(), self.model.disable_adapter():
                then = self.log_probs(list(ids))[scored]
            degradation = (then.exp() * (then - now)).sum(-1).mean()
            terms.append((1 + CONSTRAINT.beta * (degradation - CONSTRAINT.tau)).clamp(min=0))
        return torch.stack(terms).mean() - CONSTRAINT.alpha

    def gradient(self, loss: Any) -> np.ndarray:
        found = torch.autograd.grad(loss, list(self.params.values()))
        return torch.cat([g.reshape(-1) for g in found]).numpy()

    def flat(self, weights: dict[str, torch.Tensor]) -> np.ndarray:
        return torch.cat([weights[name].double().reshape(-1) for name in self.params]).numpy()


def build(method: str, folder: Any, watch: Watch) -> Any:
    task = preferring.pairs(4) if method == "dpo" else Dataset.from_list(list(preferring.prompts(2)))
    own = {
        "train_dataset": task, "safety_dataset": {"constraint": tiny.dataset(6, seed=2)}, "defense": FILTER,
        "peft_config": tiny.lora(), "callbacks": [watch],
    }  # fmt: skip
    loss = {"beta": BETA} if method == "dpo" else {"loss_type": "grpo", "beta": 0.0, "learning_rate": 0.2}
    trainer = preferring.safe(method, folder, own=own, constraint=CONSTRAINT, **{**WHOLE, **loss})
    watch.trainer = trainer
    return trainer


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_the_applied_step_is_the_quadratic_programmes(tmp_path, method):
    watch = Watch()
    trainer = build(method, tmp_path, watch)
    trainer.train()
    oracle, rate = Oracle(trainer, tmp_path), float(trainer.args.learning_rate)
    events = [row["event"] for row in read(trainer.run_dir / "events.jsonl")]
    assert events.count("active") >= 2, events
    for event, (before, after, replies) in zip(events, watch.steps, strict=True):
        oracle.put(before)
        value = oracle.constraint(replies)
        nominal, h = -rate * oracle.gradient(getattr(oracle, method)(replies)), oracle.gradient(value)
        step, v = oracle.flat(after) - oracle.flat(before), float(value.detach())
        rounding = 4 * 2**-24 * float((np.abs(h) * (np.abs(oracle.flat(before)) + np.abs(step))).sum())
        assert h @ step <= -RATE * v + rounding + 1e-6 * abs(v)
        expected = nominal if event == "inactive" else solve(np.ones(len(h)), nominal, h[None], np.array([-RATE * v]))
        assert np.linalg.norm(step - expected) <= 1e-5 * np.linalg.norm(expected)
        assert event == "inactive" or np.linalg.norm(step - nominal) > 1e-2 * np.linalg.norm(nominal)
