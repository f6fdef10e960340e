"""Completion losses against slow, literal computations; and everything that must not move them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests import tiny
from tests.unit.constraint.literal import PAD, ROWS, adapted, encoded, forward, literal_nll, move
from transformers import XGLMConfig, XGLMForCausalLM

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.units import KL_UNITS, UNITS
from holdfast.data.encode import Encoded, collate
from holdfast.scoring import head
from holdfast.scoring.completion import (
    adapters_off,
    completion_kl,
    completion_losses,
    deterministic,
    hidden_states,
)
from holdfast.scoring.degradation import degradation, in_unit


def test_token_sum_and_first_equal_the_literal_computation():
    model = tiny.model().eval()
    with torch.no_grad():
        found = completion_losses(model, collate(ROWS, PAD), first_k=8)
    for i, row in enumerate(ROWS):
        nll = literal_nll(model, row)
        assert float(found.total[i]) == pytest.approx(sum(nll), abs=1e-5)
        assert float(found.per_token()[i]) == pytest.approx(sum(nll) / len(nll), abs=1e-6)
        assert float(found.per_first_token()[i]) == pytest.approx(sum(nll[:8]) / min(8, len(nll)), abs=1e-6)
    assert found.tokens.tolist() == [12, 3, 8, 9, 1]
    assert found.first_tokens.tolist() == [8, 3, 8, 8, 1]
    torch.testing.assert_close(found.total, found.per_token() * found.tokens, rtol=0, atol=1e-12)


def test_each_unit_picks_its_own_loss():
    losses = completion_losses(tiny.model().eval(), collate(ROWS, PAD), first_k=2)
    assert torch.equal(in_unit(losses, ChanceConstraint(unit="nll_sum")), losses.total)
    assert torch.equal(in_unit(losses, ChanceConstraint(unit="nll_token")), losses.total / losses.tokens)
    assert torch.equal(in_unit(losses, ChanceConstraint(unit="nll_first")), losses.first / losses.first_tokens)


def test_kl_equals_the_literal_computation():
    model = adapted(trained=0.3).eval()
    with torch.no_grad():
        found = completion_kl(model, collate(ROWS, PAD), first_k=8)
    for i, row in enumerate(ROWS):
        ids = torch.tensor([row.input_ids])
        with torch.no_grad():
            now = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
            with model.disable_adapter():
                before = torch.log_softmax(model(input_ids=ids).logits[0].double(), -1)
        terms = []
        for position in range(1, len(row.input_ids)):
            if row.labels[position] != -100:
                p, q = before[position - 1], now[position - 1]
                terms.append(sum(float(p[v].exp() * (p[v] - q[v])) for v in range(64)))
        assert float(found.per_token()[i]) == pytest.approx(sum(terms) / len(terms), rel=1e-4, abs=1e-6)
        assert float(found.per_first_token()[i]) == pytest.approx(sum(terms[:8]) / len(terms[:8]), rel=1e-4, abs=1e-6)
        assert float(found.per_token()[i]) > 0.01


def test_the_gradient_of_kl_first_is_that_of_the_literal_computation():
    """In float64: what the tokens after the first k do has no part in it."""
    model, constraint = adapted(trained=0.3).eval(), ChanceConstraint(unit="kl_first", first_k=2)
    weights = [p for p in model.parameters() if p.requires_grad]
    d = degradation(model, collate(ROWS, PAD), torch.zeros(len(ROWS)), constraint)
    found = torch.autograd.grad(d.sum(), weights)
    exact, means = model.double(), []
    for row in ROWS:
        ids, at = torch.tensor([row.input_ids]), [p - 1 for p, y in enumerate(row.labels) if p and y != -100][:2]
        with torch.no_grad(), exact.disable_adapter():
            before = torch.log_softmax(exact(input_ids=ids).logits[0, at], -1)
        now = torch.log_softmax(exact(input_ids=ids).logits[0, at], -1)
        means.append((before.exp() * (before - now)).sum(-1).mean())
    expected = torch.stack(means).sum()
    assert d.sum().item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(found, torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-6)


def test_kl_is_zero_at_the_start():
    assert float(completion_kl(adapted().eval(), collate(ROWS, PAD), 1).per_token().abs().max()) <= 1e-6


def test_kl_reference_uses_the_original_head_when_the_head_is_trained():
    model = adapted(modules_to_save=["lm_head"]).eval()
    head = model.get_base_model().lm_head.modules_to_save["default"]
    batch = collate(ROWS, PAD)
    assert float(completion_kl(model, batch, 1).per_token().abs().max()) <= 1e-6
    with torch.no_grad():
        head.weight.mul_(1.5)
    found = completion_kl(model, batch, 1).per_token()
    row = ROWS[0]
    with torch.no_grad():
        now = torch.log_softmax(model(input_ids=torch.tensor([row.input_ids])).logits[0], -1)
        with model.disable_adapter():
            before = torch.log_softmax(model(input_ids=torch.tensor([row.input_ids])).logits[0], -1)
    at = [p - 1 for p in range(1, len(row.labels)) if row.labels[p] != -100]
    expected = (before[at].exp() * (before[at] - now[at])).sum(-1).mean()
    assert float(found[0]) == pytest.approx(float(expected), rel=1e-4)
    assert float(expected) > 0.01


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 6, 7]}], ids=str
)
def test_losses_follow_every_kind_of_trained_weight(options):
    """Our head reads weights itself, so it must see what the adapter made of them."""
    model = adapted(trained=0.2, **options).eval()
    found = completion_losses(model, collate(ROWS, PAD), first_k=8)
    assert float(found.total[0]) == pytest.approx(sum(literal_nll(model, ROWS[0])), abs=1e-4)
    untrained = adapted(**options).eval()
    assert abs(float(found.total[0]) - sum(literal_nll(untrained, ROWS[0]))) > 0.01


def test_adapters_off_is_the_base_model_to_the_bit():
    batch = collate(ROWS, PAD)
    expected = hidden_states(tiny.model().eval(), batch)
    model = adapted(trained=0.3).eval()
    with adapters_off(model):
        assert torch.equal(hidden_states(model, batch), expected)
    assert not torch.equal(hidden_states(model, batch), expected)
    assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("unit", UNITS)
def test_padding_order_and_neighbours_do_not_move_degradations(unit):
    rows = encoded([(3 + i % 5, 1 + 3 * (i % 7)) for i in range(24)], seed=3)
    start, model, c = adapted(), adapted(trained=0.2), ChanceConstraint(unit=unit)
    reference = torch.zeros(24, dtype=torch.float64)
    if unit not in KL_UNITS:
        reference = in_unit(forward(start).losses(rows, c.first_k), c)
    alone = forward(model, 1).degradations(rows, reference, c)
    assert float(alone.abs().max()) > 0.01
    for batch_size, shuffle in ((24, None), (5, 1), (7, 2)):
        found = forward(model, batch_size).degradations(rows, reference, c, shuffle=shuffle)
        assert float((found - alone).abs().max()) < 1e-5
    order = list(reversed(range(24)))
    turned = forward(model).degradations([rows[i] for i in order], reference[order], c)
    assert float((turned - alone[order]).abs().max()) < 1e-5


def test_dropout_does_not_reach_degradations():
    model = adapted(dropout=0.5, trained=0.3).train()
    c = ChanceConstraint(unit="nll_token")
    reference = in_unit(forward(model).losses(ROWS, 8), c)
    assert float(forward(model).degradations(ROWS, reference, c).abs().max()) == 0.0
    assert model.training
    noisy = degradation(model, collate(ROWS, PAD), reference, c).detach()
    assert float(noisy.abs().max()) > 1e-3, "dropout of 0.5 is on outside the measuring context"


def test_deterministic_leaves_random_state_and_modes_alone():
    model = adapted(dropout=0.5).train()
    model.get_base_model().gradient_checkpointing_enable()
    before, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    with deterministic(model):
        torch.rand(3)
        layer = model.get_base_model().model.layers[0]
        assert layer.training, "checkpointing follows the layer's flag"
        assert not any(m.training for m in model.modules() if isinstance(m, torch.nn.Dropout))
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model.modules()] == modes


def test_a_checkpointed_layer_s_own_dropout_is_off_in_forward_and_backward():
    """XGLM's layers apply dropout by their own flag, which must stay up for checkpointing to happen at all."""
    torch.manual_seed(0)
    config = XGLMConfig(
        vocab_size=64, d_model=16, ffn_dim=32, num_layers=2, attention_heads=2, dropout=0.5, layerdrop=0.0
    )
    model, batch, found = XGLMForCausalLM(config).train(), collate(ROWS, PAD), []
    layer, runs = model.model.layers[0], []
    layer.fc1.register_forward_pre_hook(lambda *_: runs.append(1))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        runs.clear()
        function = layer._gradient_checkpointing_func if checkpointing else None
        with deterministic(model):
            losses = completion_losses(model, batch, 8).total
            gradient = torch.autograd.grad(losses.sum(), layer.fc1.weight)[0]
        found.append((losses.detach(), gradient))
        assert len(runs) == 1 + checkpointing
        assert all(m.training for m in model.modules())
    assert layer._gradient_checkpointing_func is function
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize("trained_head", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("unit", ["nll_token", "kl_token"])
def test_chunks_change_neither_value_nor_gradient(monkeypatch, unit, trained_head):
    batch, c = collate(ROWS, PAD), ChanceConstraint(unit=unit)
    options = {"modules_to_save": ["lm_head"]} if trained_head else {}

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = adapted(trained=0.2, **options).eval()
        d = degradation(model, batch, torch.zeros(len(ROWS), dtype=torch.float64), c)
        (d * torch.arange(1.0, 6.0)).sum().backward()
        return d.detach(), [p.grad for p in model.parameters() if p.requires_grad]

    whole, gradient = run()
    recomputed, sizes = [], []
    monkeypatch.setattr(head, "TOKEN_CHUNK", 4)
    plain, linear = head.checkpoint, head.float32_linear  # type: ignore[attr-defined]
    monkeypatch.setattr(head, "checkpoint", lambda *a, **k: (recomputed.append(1), plain(*a, **k))[1])
    monkeypatch.setattr(head, "float32_linear", lambda h, *a: (sizes.append(len(h)), linear(h, *a))[1])
    pieces, other = run()
    assert len(recomputed) == (9 if trained_head else 0)  # 33 completion tokens; a frozen head computes nothing twice
    assert max(sizes) == 4
    if not trained_head:
        assert len(sizes) == 9 * (2 if unit == "kl_token" else 1)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-6)
    for a, b in zip(gradient, other, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    assert max(float(g.abs().max()) for g in gradient) > 1e-3


def test_gradient_of_the_degradation_is_the_literal_one():
    model, c = adapted(trained=0.2).eval(), ChanceConstraint(unit="nll_token")
    params = [p for p in model.parameters() if p.requires_grad]
    d = degradation(model, collate(ROWS, PAD), torch.zeros(len(ROWS), dtype=torch.float64), c)
    ours = torch.autograd.grad(d.mean(), params)
    total = torch.zeros(())
    for row in ROWS:
        logits = model(input_ids=torch.tensor([row.input_ids])).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels[1:])) / len(ROWS)
    for a, b in zip(ours, torch.autograd.grad(total, params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_measuring_no_examples_gives_no_degradations():
    assert forward(tiny.model()).degradations([], torch.empty(0), ChanceConstraint(unit="nll_token")).shape == (0,)


def test_mean_degradation_of_samples_is_the_sequence_kl():
    """E over y ~ pi_0 of log pi_0(y) - log pi(y) is the KL of the sequences, sampled and exact alike."""
    model = get_peft_model(
        tiny.model(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    ).eval()
    move(model, 0.25)
    prompt, length, count = [5, 9, 11], 3, 3000
    ids = torch.tensor([prompt] * count)
    draw = torch.Generator().manual_seed(1)
    kl = torch.zeros(count, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(length):
            now = torch.log_softmax(model(input_ids=ids).logits[:, -1].double(), -1)
            with model.disable_adapter():
                before = torch.log_softmax(model(input_ids=ids).logits[:, -1].double(), -1)
            kl += (before.exp() * (before - now)).sum(-1)
            ids = torch.cat([ids, torch.multinomial(before.exp(), 1, generator=draw)], 1)
    rows = [Encoded(str(i), tuple(r), (-100, -100, -100, *r[3:]), truncated=False) for i, r in enumerate(ids.tolist())]
    c = ChanceConstraint(unit="nll_sum")
    with adapters_off(model):
        reference = forward(model, 1000).losses(rows, 8).total
    d = forward(model, 1000).degradations(rows, reference, c)
    difference = d - kl  # paired: its mean is zero, and its spread is the Monte Carlo error
    assert abs(float(difference.mean())) <= 3 * float(difference.std()) / count**0.5
    assert float(kl.mean()) > 10 * float(difference.std()) / count**0.5
