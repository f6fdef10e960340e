"""Completion losses against slow, literal computations; and everything that must not move them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests import tiny
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from holdfast.constraint import completion
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.completion import (
    Head,
    adapters_off,
    completion_kl,
    completion_losses,
    deterministic,
    hidden_states,
    require_understood_head,
)
from holdfast.constraint.degradation import degradation, in_unit, require_unit_supported
from holdfast.constraint.passes import Forward
from holdfast.core.errors import UnsupportedError
from holdfast.data.collate import collate
from holdfast.data.encode import Encoded

PAD = 0


def encoded(lengths: list[tuple[int, int]], *, vocabulary: int = 64, seed: int = 0) -> list[Encoded]:
    """Random rows with the given (prompt, completion) lengths."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number, (prompt, reply) in enumerate(lengths):
        ids = torch.randint(3, vocabulary, (prompt + reply,), generator=draw).tolist()
        found.append(Encoded(f"e{number}", tuple(ids), tuple([-100] * prompt + ids[prompt:]), truncated=False))
    return found


ROWS = encoded([(4, 12), (7, 3), (2, 8), (5, 9), (3, 1)])


def literal_nll(model, row: Encoded) -> list[float]:
    """NLL of each completion token: one row, no padding, one token at a time."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.input_ids])).logits[0].float()
    found = []
    for position in range(1, len(row.input_ids)):
        if row.labels[position] != -100:
            found.append(-float(torch.log_softmax(logits[position - 1], -1)[row.labels[position]]))
    return found


def adapted(*, dropout: float = 0.0, trained: float = 0.0, dtype=torch.float32, **kwargs):
    """The tiny model with LoRA; `trained` is the size of a random change of the adapter."""
    model = get_peft_model(tiny.model(dtype=dtype), tiny.lora(dropout, **kwargs))
    return move(model, trained)


def move(model, size: float):
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, generator=draw).to(p.dtype))
    return model


def forward(model, batch_size: int = 8) -> Forward:
    return Forward(model, pad_token_id=PAD, batch_size=batch_size, device=torch.device("cpu"))


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
    found = completion_kl(model, collate(ROWS, PAD)).detach()
    for i, row in enumerate(ROWS):
        ids = torch.tensor([row.input_ids])
        with torch.no_grad():
            now = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
            with model.disable_adapter():
                before = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
        terms = []
        for position in range(1, len(row.input_ids)):
            if row.labels[position] != -100:
                p, q = before[position - 1], now[position - 1]
                terms.append(sum(float(p[v].exp() * (p[v] - q[v])) for v in range(64)))
        assert float(found[i]) == pytest.approx(sum(terms) / len(terms), rel=1e-4, abs=1e-6)
        assert float(found[i]) > 0.01


def test_kl_is_zero_at_the_start():
    assert float(completion_kl(adapted().eval(), collate(ROWS, PAD)).abs().max()) <= 1e-6


def test_kl_reference_uses_the_original_head_when_the_head_is_trained():
    model = adapted(modules_to_save=["lm_head"]).eval()
    head = model.get_base_model().lm_head.modules_to_save["default"]
    batch = collate(ROWS, PAD)
    assert float(completion_kl(model, batch).abs().max()) <= 1e-6
    with torch.no_grad():
        head.weight.mul_(1.5)
    found = completion_kl(model, batch)
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


def test_unit_kl_needs_an_adapter():
    with pytest.raises(UnsupportedError, match="needs an adapter"):
        require_unit_supported(tiny.model(), ChanceConstraint(unit="kl_token"))
    require_unit_supported(adapted(), ChanceConstraint(unit="kl_token"))


@pytest.mark.parametrize("unit", ["nll_token", "nll_sum", "nll_first", "kl_token"])
def test_padding_order_and_neighbours_do_not_move_degradations(unit):
    rows = encoded([(3 + i % 5, 1 + 3 * (i % 7)) for i in range(24)], seed=3)
    start, model, c = adapted(), adapted(trained=0.2), ChanceConstraint(unit=unit)
    reference = torch.zeros(24, dtype=torch.float64)
    if unit != "kl_token":
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
    c = ChanceConstraint()
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


@pytest.mark.parametrize("unit", ["nll_token", "kl_token"])
def test_chunks_change_neither_value_nor_gradient(monkeypatch, unit):
    batch, c = collate(ROWS, PAD), ChanceConstraint(unit=unit)

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = adapted(trained=0.2).eval()
        d = degradation(model, batch, torch.zeros(len(ROWS), dtype=torch.float64), c)
        (d * torch.arange(1.0, 6.0)).sum().backward()
        return d.detach(), [p.grad for p in model.parameters() if p.requires_grad]

    whole, gradient = run()
    recomputed = []
    monkeypatch.setattr(completion, "TOKEN_CHUNK", 4)
    plain = completion.checkpoint
    monkeypatch.setattr(completion, "checkpoint", lambda *a, **k: (recomputed.append(1), plain(*a, **k))[1])
    pieces, other = run()
    assert len(recomputed) == 9  # 33 completion tokens
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-6)
    for a, b in zip(gradient, other, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    assert max(float(g.abs().max()) for g in gradient) > 1e-3


def test_gradient_of_the_degradation_is_the_literal_one():
    model, c = adapted(trained=0.2).eval(), ChanceConstraint()
    params = [p for p in model.parameters() if p.requires_grad]
    d = degradation(model, collate(ROWS, PAD), torch.zeros(len(ROWS), dtype=torch.float64), c)
    ours = torch.autograd.grad(d.mean(), params)
    total = torch.zeros(())
    for row in ROWS:
        logits = model(input_ids=torch.tensor([row.input_ids])).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels[1:])) / len(ROWS)
    for a, b in zip(ours, torch.autograd.grad(total, params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_float32_head_is_at_least_five_times_less_noisy_than_a_bfloat16_head():
    """A bfloat16 base, a change too small to matter: what remains of |D| is rounding, most of it the head's."""
    rows = encoded([(4, 8)] * 64, seed=9)
    batch = collate(rows, PAD)
    ours, theirs, truth = [], [], []
    for size in (0.0, 1e-3):
        model = move(adapted(dtype=torch.bfloat16), size).eval()
        weight = model.get_base_model().lm_head.weight
        with torch.no_grad():
            hidden = hidden_states(model, batch)
            assert hidden.dtype == weight.dtype == torch.bfloat16
            ours.append(completion_losses(model, batch, 8).per_token())
            theirs.append(mean_nll(hidden, weight, batch["labels"]))
            truth.append(mean_nll(hidden.double(), weight.double(), batch["labels"]))
    d_ours, d_theirs, d_true = (x[1] - x[0] for x in (ours, theirs, truth))
    assert float(d_true.abs().max()) < 0.02, "the change is small"
    assert float((d_theirs - d_true).std()) > 5 * float((d_ours - d_true).std())


def mean_nll(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean NLL of each row, all in the dtype of `hidden`."""
    labels, mask = labels[:, 1:], labels[:, 1:] != -100
    log_p = torch.log_softmax(hidden[:, :-1] @ weight.T, -1)
    picked = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked.double() * mask).sum(1) / mask.sum(1)


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
ARCHITECTURES = {
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0)),
    "cohere scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "granite scaling": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_soft_cap_and_logit_scale_are_part_of_the_head(monkeypatch, name):
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    require_understood_head(model, collate(ROWS, PAD))
    found = completion_losses(model, collate(ROWS, PAD), 8)
    for i, row in enumerate(ROWS):
        assert float(found.total[i]) == pytest.approx(sum(literal_nll(model, row)), abs=1e-4)
    bare = Head(model)
    bare.cap, bare.scale = None, 1.0
    monkeypatch.setattr(completion, "Head", lambda _: bare)
    with pytest.raises(UnsupportedError, match="differ from its own logits"):
        require_understood_head(model, collate(ROWS, PAD))


def test_a_head_that_does_more_is_refused():
    model = tiny.model().eval()
    own = model.forward

    def alien(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = output.logits * 1.3
        return output

    require_understood_head(model, collate(ROWS, PAD))
    model.forward = alien
    with pytest.raises(UnsupportedError, match="differ from its own logits") as caught:
        require_understood_head(model, collate(ROWS, PAD))
    assert "report this architecture" in caught.value.remedy


def test_a_model_without_output_embedding_is_refused():
    model = SimpleNamespace(get_output_embeddings=lambda: None)
    with pytest.raises(UnsupportedError, match="no output embedding"):
        Head(model)


def test_measuring_no_examples_gives_no_degradations():
    assert forward(tiny.model()).degradations([], torch.empty(0), ChanceConstraint()).shape == (0,)


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
