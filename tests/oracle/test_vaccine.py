"""Vaccine against a literal transcription of its algorithm, and the properties that follow from its formulas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from torch import nn

from holdfast.core.event_log import read
from holdfast_lab.defenses import vaccine as module
from holdfast_lab.defenses.vaccine import Vaccine
from tests import hybrid, tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

RHO = 0.7
SGD = {"stage": "align", "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 2}
MODELS = {"llama": tiny, "hybrid": hybrid}


def trainer_of(folder, kind="llama", *, rho=RHO, dropout=0.0, defense=None, **options):
    source = MODELS[kind]
    given = {
        "model": source.model(),
        "peft_config": source.lora(dropout),
        "safety_dataset": None,
        "constraint": None,
        "defense": defense or {"name": "vaccine", "rho": rho},
    }
    made = build(folder, given=given, **{**SGD, **options})
    with torch.no_grad():  # B = 0 at the start, where A has no gradient
        draw = torch.Generator().manual_seed(3)
        for name, p in made.model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=draw) * 0.2)
    return made


class Literal:
    """The algorithm as it is written: no hooks, no autograd tricks, one loop per line of the pseudo-code."""

    def __init__(self, kind: str, start: dict[str, torch.Tensor]) -> None:
        source = MODELS[kind]
        self.model = get_peft_model(source.model(), source.lora()).eval()
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(start[name])
        self.eps = self.outputs = None
        for i, layer in enumerate(self.model.get_base_model().model.layers):
            attention = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            attention.forward = self._around(attention.forward, i)

    def _around(self, forward, i):
        def called(*args, **kwargs):
            found = forward(*args, **kwargs)
            h = found if isinstance(found, torch.Tensor) else found[0]
            if self.eps is not None:
                h = h + self.eps[i]
            if h.requires_grad:
                h.retain_grad()
            self.outputs.append(h)  # type: ignore[attr-defined]
            return h if isinstance(found, torch.Tensor) else (h, *found[1:])

        return called

    def loss(self, batch, items):
        self.outputs = []  # type: ignore[assignment]
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        total = 0.0
        for row in range(len(logits)):
            for t in range(logits.shape[1] - 1):
                label = int(batch["labels"][row, t + 1])
                if label != -100:
                    total = total - torch.log_softmax(logits[row, t], -1)[label]  # type: ignore[assignment]
        return total / items

    def step(self, micro_batches, rho, lr):
        items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro_batches)
        gradient = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for batch in micro_batches:
            self.eps = None
            self.model.get_base_model().enable_input_require_grads()  # so that the first output has a gradient
            self.loss(batch, items).backward()
            real = batch["attention_mask"].unsqueeze(-1)
            G = [h.grad * real for h in self.outputs]  # type: ignore[attr-defined]
            N = sum(float((g.double() ** 2).sum()) for g in G) ** 0.5
            self.model.zero_grad()
            self.eps = [rho / len(micro_batches) ** 0.5 * g / (N + 1e-7) for g in G]  # type: ignore[assignment]
            self.loss(batch, items).backward()
            for name, p in self.params.items():
                gradient[name] += p.grad
            self.model.zero_grad()
        with torch.no_grad():
            for name, p in self.params.items():
                p.sub_(gradient[name], alpha=lr)


def recorded(trainer):
    """Every micro-batch that the trainer sees, as it sees it."""
    seen, choose = [], trainer.defense.choose_batch

    def choose_batch(run, inputs, items):
        seen.append({name: tensor.clone() for name, tensor in inputs.items() if isinstance(tensor, torch.Tensor)})
        return choose(run, inputs, items)

    trainer.defense.choose_batch = choose_batch
    return seen


@pytest.fixture
def shifts(monkeypatch):
    """What was added to the hidden states, one dictionary per pass."""
    passes, shifted = [], module.shifted  # type: ignore[attr-defined]

    def spying(mixers, shift):
        here: dict[str, torch.Tensor] = {}
        passes.append(here)

        def spied(name, hidden):
            here[name] = shift(name, hidden)
            return here[name]

        return shifted(mixers, spied)

    monkeypatch.setattr(module, "shifted", spying)
    return passes


def norm(shift: dict[str, torch.Tensor]) -> float:
    return sum(float(s.detach().double().square().sum()) for s in shift.values()) ** 0.5


@pytest.mark.parametrize(("kind", "micros"), [("llama", 1), ("llama", 2), ("hybrid", 1)])
def test_steps_are_those_of_the_algorithm(tmp_path, kind, micros):
    trainer = trainer_of(tmp_path, kind, gradient_accumulation_steps=micros, per_device_train_batch_size=3)
    seen, start = recorded(trainer), weights(trainer)
    literal, sft = Literal(kind, start), Literal(kind, start)
    trainer.train()
    assert len(seen) == 2 * micros
    for i in range(0, len(seen), micros):
        literal.step(seen[i : i + micros], RHO, SGD["learning_rate"])
        sft.step(seen[i : i + micros], 0.0, SGD["learning_rate"])
    end = weights(trainer)
    for name, theta in literal.params.items():
        torch.testing.assert_close(end[name], theta.detach(), rtol=1e-5, atol=1e-6)
    assert max(float((sft.params[name].detach() - end[name]).abs().max()) for name in end) > 1e-3


@pytest.mark.parametrize("rho", [0.0, 1e-30])
def test_without_strength_the_run_is_sft_bit_for_bit(tmp_path, rho):
    """At 1e-30 both passes happen: the first leaves gradients and dropout's random numbers alone."""
    options = {"dropout": 0.3, "gradient_accumulation_steps": 2, "max_steps": 3}
    ours = trainer_of(tmp_path / "a", rho=rho, **options)
    sft = trainer_of(tmp_path / "b", defense="sft", **{**options, "stage": "finetune"})
    for trainer in (ours, sft):
        torch.manual_seed(5)
        trainer.train()
    assert same(weights(ours), weights(sft))


def test_norm_of_the_perturbation_is_rho_over_a_step(tmp_path, shifts):
    """Six rows in batches of two, two micro-batches a step: the second step has one only."""
    given = {"gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = trainer_of(tmp_path, rho=3.0, **given)
    trainer.train_dataset = trainer.train_dataset.select(range(6))
    trainer.train()
    first, second = shifts[0::2], shifts[1::2]
    assert [norm(s) for s in first] == [0.0] * 3
    assert [norm(s) for s in second] == pytest.approx([3 / 2**0.5, 3 / 2**0.5, 3.0], rel=1e-5)


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_row_is_perturbed_and_no_padding(tmp_path, shifts, kind):
    trainer = trainer_of(tmp_path, kind, max_steps=1, per_device_train_batch_size=4)
    seen = recorded(trainer)
    trainer.train()
    mask = seen[0]["attention_mask"].bool()
    assert not mask.all()
    assert len(shifts[1]) == len(trainer.model.get_base_model().model.layers) >= 2
    for shift in shifts[1].values():
        assert shift.shape == (*mask.shape, 32)
        assert (shift[~mask] == 0).all()
        assert (shift.abs().amax((1, 2)) > 0).all()


@pytest.mark.parametrize("kind", list(MODELS))
def test_small_perturbations_raise_the_loss_by_rho_times_the_norm(tmp_path, kind):
    trainer = trainer_of(tmp_path, kind, rho=1e-3, max_steps=1, per_device_train_batch_size=4)
    trainer.train()
    row = read(trainer.run_dir / "events.jsonl")[0]
    rise = row["loss"] - row["unperturbed_loss"]
    assert rise == pytest.approx(1e-3 * row["hidden_gradient_norm"], rel=0.02)
    assert rise > 0


def test_nothing_is_left_on_the_model(tmp_path):
    """With a learning rate of zero a plain forward afterwards gives the same bits."""
    trainer = trainer_of(tmp_path, learning_rate=0.0, max_steps=1)
    ids = torch.arange(7, 27).view(2, 10)
    hooks = [len(m._forward_hooks) + len(m._backward_hooks) for m in trainer.model.modules()]
    before = trainer.model.eval()(input_ids=ids).logits
    trainer.train()
    assert [len(m._forward_hooks) + len(m._backward_hooks) for m in trainer.model.modules()] == hooks
    assert torch.equal(trainer.model.eval()(input_ids=ids).logits, before)


class Bilinear(nn.Module):
    """Two mixers beside each other, one of which returns a tuple; the loss is linear in both outputs."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.a, self.b = (nn.Linear(3, 5).double() for _ in range(2))
        self.x = torch.randn(2, 4, 3, generator=draw, dtype=torch.float64)
        self.c = torch.randn(2, 2, 4, 5, generator=draw, dtype=torch.float64)

    def per_row(self):
        return (self.c[0] * self.a(self.x)).sum((1, 2)) + (self.c[1] * self.b(self.x)).sum((1, 2))


@pytest.mark.parametrize(("micros", "others"), [(1, 0.0), (4, 0.0), (1, 30.0)])
def test_a_linear_loss_rises_by_rho_times_the_norm_exactly(monkeypatch, micros, others):
    """With several processes N is the norm over all of them: here the others' gradients have the square `others`."""
    toy = Bilinear()
    monkeypatch.setattr(module, "completion_losses", lambda model, *_, **__: SimpleNamespace(total=model.per_row()))
    monkeypatch.setattr(module, "sum_in_place", lambda sums: sums[0][1].add_(others))
    run = SimpleNamespace(
        model=toy,
        args=SimpleNamespace(device="cpu"),
        forward=SimpleNamespace(precision=torch.enable_grad),
        progress=SimpleNamespace(micro_batches=micros),
        data=SimpleNamespace(token_share=lambda batch, items: 6.0),  # of six scored tokens: the summed loss
        engine=SimpleNamespace(accumulate=lambda *_: toy.per_row().sum().detach()),
    )
    defense = Vaccine(Vaccine.Config(rho=2.0))
    defense._mixers = [("a", toy.a), ("b", toy.b)]
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.zeros(2, 4, dtype=torch.long)}
    clean = float(toy.per_row().sum())
    perturbed = float(defense.micro_step(run, batch, None))
    here = float(toy.c.square().sum())
    expected = 2.0 / micros**0.5 * here / (here + others) ** 0.5
    assert perturbed - clean == pytest.approx(expected, rel=1e-6)
    assert toy.a.weight.grad is None
    assert not toy.a._forward_hooks
