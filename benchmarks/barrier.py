"""Does the barrier hold at every step? A small language model, the KL of its own replies, and a task that pulls away.

g is measured on all safety rows after every step; the filter sees four of them a step. For choosing what to try on real
models: `train: {probe_rows: 200}` measures the same there.

    python benchmarks/barrier.py
    python benchmarks/barrier.py --rates 3e-4 1e-3 --seeds 1 2 --options today "trust_region=0.3 reserve=0.4"
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.estimators import make_estimator
from holdfast.constraint.filter import SafetyFilter
from holdfast.constraint.filter_settings import FilterOptions
from holdfast.constraint.gradients import trainable

VOCABULARY, PROMPT, REPLY, ROWS, BATCH, TASK_BATCH = 64, 6, 10, 190, 4, 8
CAUTIOUS = "trust_region=0.3 reserve=0.4 value_decay=0.8 caution=0.3"
WORDS = ("space", "metric", "estimator")


@dataclass
class Toy:
    """A model before fine-tuning, its own replies, and rows of another task."""

    model: LlamaForCausalLM
    replies: Tensor
    reference: Tensor
    task: Tensor


def chains(count: int, draw: torch.Generator, table: Tensor) -> Tensor:
    """Sequences in which each token follows from the one before by a random table of transitions."""
    rows = torch.randint(VOCABULARY, (count, 1), generator=draw)
    for _ in range(PROMPT + REPLY - 1):
        chosen = torch.multinomial(table[rows[:, -1]], 1, generator=draw)
        rows = torch.cat([rows, chosen], dim=1)
    return rows


def transitions(draw: torch.Generator, sharpness: float = 3.0) -> Tensor:
    """A random row-stochastic table."""
    return torch.softmax(sharpness * torch.randn(VOCABULARY, VOCABULARY, generator=draw), dim=1)


def log_probabilities(model: nn.Module, rows: Tensor) -> Tensor:
    """Of every token that may follow, at the reply's positions."""
    logits: Tensor = model(input_ids=rows).logits[:, PROMPT - 1 : -1]
    return torch.log_softmax(logits.double(), dim=-1)


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean NLL of the reply."""
    chosen = log_probabilities(model, rows).gather(-1, rows[:, PROMPT:, None])
    return -chosen.mean()


def make_toy(seed: int) -> Toy:
    """Pretrain on one table of transitions; the task has another for half of the tokens."""
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    first, second = transitions(draw), transitions(draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        optimizer.zero_grad()
        next_token_loss(model, chains(32, draw, first)).backward()
        optimizer.step()
    replies = chains(ROWS, draw, first)
    with torch.no_grad():
        for place in range(PROMPT, PROMPT + REPLY):  # the model's own greedy replies
            replies[:, place] = model(input_ids=replies[:, :place]).logits[:, -1].argmax(-1)
        reference = log_probabilities(model, replies)
    mixed = torch.where(torch.arange(VOCABULARY)[:, None] % 2 == 0, first, second)
    return Toy(model, replies, reference, chains(512, draw, mixed))


def degradations(model: nn.Module, toy: Toy, index: Tensor) -> Tensor:
    """KL per token from the model before, on each reply."""
    now, before = log_probabilities(model, toy.replies[index]), toy.reference[index]
    return (before.exp() * (before - now)).sum(-1).mean(-1)


def run(toy: Toy, options: FilterOptions, *, rate: float, seed: int, steps: int) -> dict[str, float]:
    """Train under the filter; figures of g over all rows, and the task's loss."""
    model = copy.deepcopy(toy.model)
    constraint = ChanceConstraint(tau=0.03, alpha=0.05, beta=33.3, unit="kl_token")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    filt = SafetyFilter(
        optimizer, options.rate, options.space, metric=options.metric, trust_region=options.trust_region,
        gradient_decay=options.gradient_decay, caution=options.caution, dual=options.dual, span=options.span,
    )  # fmt: skip
    decay = options.decay if options.value_decay is None else options.value_decay
    estimator = make_estimator(options.estimator, size=ROWS, start_phi=0.0, decay=decay, span=options.span)
    draw = torch.Generator().manual_seed(1000 + seed)
    order, names, above, shares = Tensor(), Counter[str](), [], []
    for _ in range(steps):
        order = order if len(order) >= BATCH else torch.randperm(ROWS, generator=draw)
        index, order = order[:BATCH], order[BATCH:]
        optimizer.zero_grad()
        chosen = torch.randint(len(toy.task), (TASK_BATCH,), generator=draw)
        next_token_loss(model, toy.task[chosen]).backward()
        terms = constraint.phi(degradations(model, toy, index))
        gradient = [x.float() for x in torch.autograd.grad(terms.mean(), trainable(optimizer))]
        margin = options.reserve * constraint.alpha - constraint.alpha
        batch, estimate = float(terms.detach().mean()) + margin, estimator.update(index, terms.detach()) + margin
        filt.arm([batch], [gradient], [estimate])
        optimizer.step()
        assert filt.last_event is not None
        names[str(filt.last_event.name)] += 1
        shares.append(filt.last_event.step_length)
        with torch.no_grad():
            above.append(float(constraint.value(degradations(model, toy, torch.arange(ROWS)))))
    with torch.no_grad():
        loss = float(next_token_loss(model, toy.task))
    return {
        "above": sum(g > 0 for g in above) / steps, "largest": max(above), "last": above[-1], "loss": loss,
        "length": statistics.mean(shares), "active": names["active"] / steps, "capped": names["capped"] / steps,
        "restoration": names["restoration"] / steps,
    }  # fmt: skip


def parsed(text: str) -> FilterOptions:
    """`caution=1.5 estimator=table` as options; `today` has none."""
    given = dict(part.split("=") for part in text.split() if part != "today")
    values = {name: value if name in WORDS else float(value) for name, value in given.items()}
    return FilterOptions(**values)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description="g over all safety rows after every step, by options of the filter.")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--options", nargs="+", default=["today", CAUTIOUS])
    given = parser.parse_args()
    toys = {seed: make_toy(seed) for seed in given.seeds}
    for text in given.options:
        for rate in given.rates:
            for seed, toy in toys.items():
                found = run(toy, parsed(text), rate=rate, seed=seed, steps=given.steps)
                figures = " ".join(f"{name} {value:+.4f}" for name, value in found.items())
                print(f"{text:70s} {rate:.0e} s{seed} {figures}", flush=True)


if __name__ == "__main__":
    main()
