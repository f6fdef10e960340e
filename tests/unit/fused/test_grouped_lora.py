"""Grouped LoRA gradients against autograd, one group at a time."""

from __future__ import annotations

import pytest
import torch
from tests.unit.fused.comparing import tiny
from transformers import LlamaConfig

from holdfast.fused.grouped_lora import GroupedAdapter, GroupedLora
from holdfast.fused.support import plain_layers

T, IN, OUT, R = 11, 6, 5, 3


def numbers(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(
        dtype
    )


def membership(groups: int, *, none: int = 2) -> torch.Tensor:
    """Tokens dealt to the groups in turn; the last `none` belong to no group."""
    found = torch.zeros(T, groups)
    for t in range(T - none):
        found[t, t % groups] = 1.0
    return found


def layer(base, x, w, a, b, s):
    return base + s * (x.to(a.dtype) @ a.t() @ b.t())


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_group_has_the_gradient_of_its_tokens(groups, dtype):
    m, s = membership(groups), 0.7
    x, w = numbers(T, IN, dtype=dtype).requires_grad_(), numbers(OUT, IN, dtype=dtype)
    a, b = numbers(R, IN, dtype=dtype, seed=1).requires_grad_(), numbers(OUT, R, dtype=dtype, seed=2).requires_grad_()
    leaves = [p for _ in range(1, groups) for p in (a.detach().requires_grad_(), b.detach().requires_grad_())]
    dy = numbers(T, OUT, dtype=dtype, seed=3)
    y = GroupedLora.apply(x @ w.t(), x, s, m, a, b, *leaves)
    expected = layer(x @ w.t(), x, w, a, b, s)
    torch.testing.assert_close(y, expected)
    found = torch.autograd.grad(y, [x, a, b, *leaves], dy)
    for g in range(groups):
        own = torch.autograd.grad(expected, [a, b], dy * m[:, g : g + 1].to(dtype), retain_graph=True)
        assert own[0].any()
        torch.testing.assert_close(found[1 + 2 * g : 3 + 2 * g], own)
    everything = torch.autograd.grad(expected, [x, a, b], dy * m.sum(1, keepdim=True).to(dtype), retain_graph=True)
    torch.testing.assert_close(sum(found[1::2]), everything[1])  # tokens in no group count nowhere
    torch.testing.assert_close(found[0], torch.autograd.grad(expected, x, dy)[0])  # but pass their gradient on


def test_an_empty_group_has_a_zero_gradient():
    m = torch.zeros(T, 2)
    m[:, 0] = 1
    x, a, b = numbers(T, IN), numbers(R, IN, seed=1).requires_grad_(), numbers(OUT, R, seed=2).requires_grad_()
    other = [a.detach().requires_grad_(), b.detach().requires_grad_()]
    y = GroupedLora.apply(numbers(T, OUT, seed=4), x, 1.0, m, a, b, *other)
    found = torch.autograd.grad(y.sum(), [a, b, *other])
    assert found[0].any()
    assert not found[2].any()
    assert not found[3].any()


def test_an_input_without_gradient_gets_none_and_the_factors_theirs():
    x, a, b = numbers(T, IN), numbers(R, IN, seed=1).requires_grad_(), numbers(OUT, R, seed=2).requires_grad_()
    y = GroupedLora.apply(numbers(T, OUT, seed=4), x, 1.0, membership(1, none=0), a, b)
    found = torch.autograd.grad(y.sum(), [a, b])
    expected = torch.autograd.grad(layer(numbers(T, OUT, seed=4), x, None, a, b, 1.0).sum(), [a, b])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bfloat16_base_is_as_peft_has_it(autocast):
    """PEFT multiplies in the adapter's float32 without autocast, in bfloat16 with it, and returns the base's dtype."""
    x = numbers(T, IN, dtype=torch.bfloat16).requires_grad_()
    a, b = (
        numbers(R, IN, dtype=torch.float32, seed=1).requires_grad_(),
        numbers(OUT, R, dtype=torch.float32, seed=2).requires_grad_(),
    )
    base, dy = numbers(T, OUT, dtype=torch.bfloat16, seed=4), numbers(T, OUT, dtype=torch.bfloat16, seed=3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = GroupedLora.apply(base, x, 0.5, membership(1, none=0), a, b)
        lora = torch.nn.functional.linear(torch.nn.functional.linear(x if autocast else x.float(), a), b)
        expected = (base + lora * 0.5).to(base.dtype)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    found, own = torch.autograd.grad(y, [x, a, b], dy), torch.autograd.grad(expected, [x, a, b], dy)
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32, torch.float32]
    for g, e in zip(found, own, strict=True):
        assert (g - e).norm() <= (2e-2 if autocast else 1e-2) * e.norm()
    if not autocast:  # float32 products: only the base's rounding differs
        torch.testing.assert_close(found[1:], own[1:], rtol=1e-5, atol=1e-5)


def adapter(count: int = 3) -> GroupedAdapter:
    return GroupedAdapter(plain_layers(tiny(LlamaConfig, target=["q_proj", "v_proj"])), count)


def test_leaves_share_the_storage_of_the_parameters():
    made = adapter()
    for g in range(made.count):
        pointers = [leaf.data_ptr() for leaf in made.leaves(g)]
        assert pointers == [p.data_ptr() for p in made.parameters]
    assert all(leaf is p for leaf, p in zip(made.leaves(0), made.parameters, strict=True))
    assert not any(leaf is p for leaf, p in zip(made.leaves(1), made.parameters, strict=True))
    assert len(made.leaves(2)) == len(made.parameters) == 8


def test_leaves_follow_a_parameter_that_moves():
    made = adapter()
    assert not made.refresh()
    made.layers[0].A.data = made.layers[0].A.data.clone()
    assert made.leaves(1)[0].data_ptr() != made.parameters[0].data_ptr()
    assert made.refresh()
    assert made.leaves(1)[0].data_ptr() == made.parameters[0].data_ptr()
    assert not made.refresh()
