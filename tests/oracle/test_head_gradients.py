"""Token losses and their gradients against plain autograd of a log-softmax in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from holdfast.scoring import head as module
from holdfast.scoring.head import Head, float32_linear, float32_product, token_kl, token_nll

VOCABULARY, WIDTH, TOKENS = 97, 24, 11
SHAPES = {
    "plain": {},
    "scale": {"scale": 0.25},
    "cap": {"cap": 2.0},
    "bias": {"bias": True},
    "all": {"scale": 3.0, "cap": 4.0, "bias": True},
}


def made_head(*, scale: float = 1.0, cap: float | None = None, bias: bool = False, seed: int = 0) -> Head:
    torch.manual_seed(seed)
    layer = SimpleNamespace(weight=0.7 * torch.randn(VOCABULARY, WIDTH), bias=torch.randn(VOCABULARY) if bias else None)
    text = SimpleNamespace(final_logit_softcapping=cap, logit_scale=scale)
    config = SimpleNamespace(get_text_config=lambda: text)
    return Head(SimpleNamespace(get_output_embeddings=lambda: layer, config=config))


def literal_log_probabilities(head: Head, hidden: Tensor) -> Tensor:
    """The model's formula in float64."""
    logits = hidden @ head.weight.double().T
    if head.bias is not None:
        logits = logits + head.bias.double()
    logits = logits * head.scale
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    return torch.log_softmax(logits, -1)


def draws(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states now and before, targets, and what arrives from above for each token."""
    torch.manual_seed(1)
    hidden = torch.randn(tokens, WIDTH)
    before = hidden + 0.3 * torch.randn(tokens, WIDTH)
    return hidden, before, torch.randint(0, VOCABULARY, (tokens,)), torch.randn(tokens)


def compared(head: Head, kind: str, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and gradients: ours, then the literal ones."""
    hidden, before, targets, upstream = draws(tokens)
    ours, theirs = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    log_p = literal_log_probabilities(head, theirs)
    if kind == "nll":
        found = token_nll(head, ours, targets)
        expected = -log_p[torch.arange(tokens), targets]
    else:
        found = token_kl(head, ours, head, before)
        log_p0 = literal_log_probabilities(head, before.double())
        expected = (log_p0.exp() * (log_p0 - log_p)).sum(-1)
    assert found.dtype == torch.float32
    (gradient,) = torch.autograd.grad(found, ours, upstream)
    (literal,) = torch.autograd.grad(expected, theirs, upstream.double())
    return found.detach(), gradient, expected.detach(), literal


@pytest.mark.parametrize("chunk", [4, 11, 512], ids=["chunks of 4", "one full chunk", "one chunk"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["nll", "kl"])
def test_losses_and_gradients_are_the_literal_ones(monkeypatch, kind, shape, chunk):
    monkeypatch.setattr(module, "TOKEN_CHUNK", chunk)
    found, gradient, expected, literal = compared(made_head(**SHAPES[shape]), kind)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), literal, rtol=1e-4, atol=1e-5 * float(literal.abs().max()))
    assert float(literal.abs().max()) > 0.05


@pytest.mark.parametrize("kind", ["nll", "kl"])
def test_no_tokens_give_no_losses_and_an_empty_gradient(kind):
    found, gradient, *_ = compared(made_head(), kind, tokens=0)
    assert found.shape == (0,)
    assert gradient.shape == (0, WIDTH)


@pytest.mark.parametrize("kind", ["nll", "kl"])
def test_without_a_gradient_the_losses_are_the_same_to_the_bit(kind):
    """The reference is measured without, training with a gradient; their difference at theta_0 is zero."""
    head, (hidden, before, targets, _) = made_head(), draws()

    def losses(h: Tensor) -> Tensor:
        return token_nll(head, h, targets) if kind == "nll" else token_kl(head, h, head, before)

    with torch.no_grad():
        measured = losses(hidden)
    trained = losses(hidden.clone().requires_grad_())
    assert trained.grad_fn is not None
    assert torch.equal(measured, trained.detach())


def test_the_reference_itself_has_no_divergence_and_exactly_no_gradient():
    head, (hidden, *_) = made_head(), draws()
    ours = hidden.clone().requires_grad_()
    kl = token_kl(head, ours, head, hidden)
    assert not kl.any()
    assert not torch.autograd.grad(kl.sum(), ours)[0].any()


@pytest.mark.parametrize("kind", ["nll", "kl"])
@pytest.mark.parametrize("chunk", [4, 512], ids=["chunks of 4", "one chunk"])
def test_a_trained_head_gets_its_own_gradient(monkeypatch, kind, chunk):
    """The fused function has none for the weight, so it must not be used; p_0 gets none in any case."""
    monkeypatch.setattr(module, "TOKEN_CHUNK", chunk)
    monkeypatch.setattr(module.FusedTokenLoss, "apply", None)
    head, (hidden, before, targets, upstream) = made_head(), draws()
    head_0 = made_head(seed=2)
    for one in (head, head_0):
        one.weight.requires_grad_()
    ours = hidden.clone().requires_grad_()
    weight, theirs = head.weight.detach().double().requires_grad_(), hidden.double().requires_grad_()
    log_p = torch.log_softmax(theirs @ weight.T, -1)
    if kind == "nll":
        found, expected = token_nll(head, ours, targets), -log_p[torch.arange(TOKENS), targets]
    else:
        found = token_kl(head, ours, head_0, before)
        log_p0 = literal_log_probabilities(head_0, before.double()).detach()
        expected = (log_p0.exp() * (log_p0 - log_p)).sum(-1)
    gradients = torch.autograd.grad(found, [ours, head.weight, head_0.weight], upstream, allow_unused=True)
    literal = torch.autograd.grad(expected, [theirs, weight], upstream.double())
    for a, b in zip(gradients, literal, strict=False):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    assert gradients[2] is None


def test_keep_cuts_a_trained_head_off_its_weights():
    head = made_head(bias=True)
    frozen = head.weight
    head.keep()
    assert head.weight is frozen
    head.weight.requires_grad_()
    trained = head.weight
    head.keep()
    with torch.no_grad():
        trained.zero_()
    assert not head.trained
    assert head.weight.any()


def test_there_is_no_second_derivative():
    head, (hidden, _, targets, _) = made_head(), draws()
    ours = hidden.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(token_nll(head, ours, targets).square().sum(), ours, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def half_head(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A bfloat16 weight whose rows share a component, states now and a little before: what cancels most."""
    torch.manual_seed(seed)
    weight = 0.05 * torch.randn(4000, 256) + 0.05 * torch.randn(256)
    hidden = 2 * torch.randn(20, 256)
    return weight.bfloat16(), hidden.bfloat16(), (hidden + 0.02 * torch.randn(20, 256)).bfloat16()


def logit_gradients(weight: Tensor, hidden: Tensor, before: Tensor) -> dict[str, Tensor]:
    p, p_0 = (torch.softmax(h.double() @ weight.double().T, -1) for h in (hidden, before))
    return {"nll": p - torch.nn.functional.one_hot(torch.arange(20), 4000), "kl": p - p_0}


def error(found: Tensor, expected: Tensor) -> float:
    """Largest relative error of a token's gradient."""
    return float(((found.double().cpu() - expected.cpu()).norm(dim=1) / expected.cpu().norm(dim=1)).max())


@pytest.mark.parametrize("kind", ["nll", "kl"])
def test_two_bfloat16_parts_are_far_more_accurate_than_the_gradient_that_leaves_the_head(monkeypatch, kind):
    """On a CPU the exact product is emulated; the gradient leaves the head in bfloat16."""
    monkeypatch.setattr(module, "_exact_mm", lambda a, b: a.float() @ b.float())
    weight, *states = half_head()
    d = logit_gradients(weight, *states)[kind]
    expected = d @ weight.double()
    two = error(module._two_part_product(d.float(), weight), expected)
    one = error(d.bfloat16().float() @ weight.float(), expected)
    assert two < 1e-5
    assert two < one / 50
    assert two < error(expected.bfloat16(), expected) / 100


def test_weights_of_other_types_are_converted_block_by_block(monkeypatch):
    monkeypatch.setattr(module, "VOCABULARY_BLOCK", 10)
    torch.manual_seed(0)
    weight, bias, hidden, d = (torch.randn(*s) for s in ((37, 8), (37,), (5, 8), (5, 37)))
    weight, hidden = weight.half(), hidden.half()
    with torch.no_grad():
        logits = float32_linear(hidden, weight, bias)
        back = float32_product(d, weight)
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T + bias.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(back.double(), d.double() @ weight.double(), rtol=0, atol=1e-5)


def test_bfloat16_states_get_bfloat16_gradients_under_autocast():
    weight, hidden, before = half_head()
    head = made_head()
    head.weight = weight
    ours = hidden.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kl = token_kl(head, ours, head, before)
        kl.sum().backward()
    d = -logit_gradients(weight, before, hidden)["kl"]
    assert ours.grad.dtype == torch.bfloat16
    assert error(ours.grad, d @ weight.double()) < 4e-3


@pytest.mark.parametrize("kind", ["nll", "kl"])
def test_autocast_does_not_reach_a_float32_head(kind):
    """It would round both factors of the backward's product to bfloat16: errors of 3e-3."""
    plain, undisturbed, *_ = compared(made_head(), kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, gradient, expected, _ = compared(made_head(), kind)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found, plain)
    assert torch.equal(gradient, undisturbed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", ["nll", "kl"])
def test_the_gpu_s_products_are_as_accurate(kind):
    weight, hidden, before = (t.cuda() for t in half_head())
    d = logit_gradients(weight.cpu(), hidden.cpu(), before.cpu())[kind]
    assert error(float32_product(d.float().cuda(), weight), d @ weight.cpu().double()) < 1e-5
    with torch.no_grad():
        logits = float32_linear(hidden, weight, None)
    torch.testing.assert_close(
        logits.cpu().double(), hidden.cpu().double() @ weight.cpu().double().T, rtol=0, atol=1e-4
    )
