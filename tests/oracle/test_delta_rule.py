"""The gated delta rule in chunks with its own backward, against the recurrence written out in float64."""

from __future__ import annotations

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.fused.delta_rule import gated_delta_rule, unit_lower_inverse

SIZES = [(1, 1, 1, 2, 1), (2, 10, 3, 8, 8), (2, 64, 2, 16, 8), (1, 65, 2, 8, 16), (3, 200, 2, 16, 16)]


def drawn(rows, tokens, heads, width, values, *, dtype=torch.float32, decay=0.5):
    draw = torch.Generator().manual_seed(7)
    q, k = (torch.randn(rows, tokens, heads, width, generator=draw) for _ in range(2))
    v = torch.randn(rows, tokens, heads, values, generator=draw)
    g, beta = -decay * torch.rand(rows, tokens, heads, generator=draw), torch.rand(rows, tokens, heads, generator=draw)
    return [x.to(dtype) for x in (q, k, v, g, beta)]


def literal(q, k, v, g, beta):
    """S <- e^g S; S <- S + beta k (v - S^T k)^T; o = S^T q, token by token."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    state = torch.zeros(*q.shape[:1], *q.shape[2:], v.shape[-1], dtype=torch.float64)
    found = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        error = v[:, t] - (state * k[:, t, :, :, None]).sum(-2)
        state = state + beta[:, t, :, None, None] * k[:, t, :, :, None] * error[:, :, None, :]
        found.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(found, 1)


def own(q, k, v, g, beta):
    return qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def with_gradients(rule, inputs):
    xs = [x.detach().clone().requires_grad_() for x in inputs]
    out = rule(*xs)
    weight = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out.double() * weight).sum(), xs)]


def apart(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_are_those_of_the_recurrence(sizes):
    inputs = drawn(*sizes)
    for found, expected in zip(with_gradients(gated_delta_rule, inputs), with_gradients(literal, inputs), strict=True):
        assert found.shape == expected.shape
        assert apart(found, expected) < 3e-6 or float((found - expected).norm()) < 1e-6


@pytest.mark.parametrize("decay", [0.0, 0.5, 60.0])
def test_it_is_as_near_to_the_recurrence_as_transformers_is(decay):
    inputs = drawn(2, 150, 2, 16, 16, decay=decay)
    expected = with_gradients(literal, inputs)
    mine, theirs = with_gradients(gated_delta_rule, inputs), with_gradients(own, inputs)
    for a, b, c in zip(mine, theirs, expected, strict=True):
        assert apart(a, c) <= 3 * apart(b, c) + 1e-6


def test_rates_of_zero_and_tokens_of_zero():
    q, k, v, g, beta = drawn(2, 70, 2, 8, 8)
    k[:, 5:9] = 0.0
    beta[:, 20:30] = 0.0
    inputs = [q, k, v, g, beta]
    for found, expected in zip(with_gradients(gated_delta_rule, inputs), with_gradients(literal, inputs), strict=True):
        assert apart(found, expected) < 3e-6


def test_a_row_that_is_not_finite_stays_alone():
    inputs = drawn(3, 70, 2, 8, 8)
    clean = with_gradients(gated_delta_rule, inputs)
    inputs[2][1] = float("nan")
    for found, expected in zip(with_gradients(gated_delta_rule, inputs), clean, strict=True):
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_dtypes_are_those_of_the_inputs():
    q, k, v, g, beta = drawn(2, 70, 2, 8, 8)
    given = [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta.bfloat16()]
    found = with_gradients(gated_delta_rule, given)
    assert [x.dtype for x in found] == [torch.bfloat16, *(x.dtype for x in given)]
    for a, b in zip(found, with_gradients(literal, given), strict=True):
        assert apart(a, b) < 4e-3  # of rounding the result


def test_autocast_does_not_reach_inside_nor_does_a_setting_stay_behind():
    inputs = drawn(2, 70, 2, 8, 8)
    before = torch.backends.cuda.matmul.fp32_precision
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients(gated_delta_rule, inputs)
    assert torch.backends.cuda.matmul.fp32_precision == before
    for a, b in zip(found, with_gradients(gated_delta_rule, inputs), strict=True):
        assert torch.equal(a, b)


class TensorFloat32(TorchDispatchMode):
    """Factors of batched products rounded to 11 bits, as a GPU's TF32 does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "aten::bmm":
            args = (*map(self.rounded, args[:2]), *args[2:])
        elif name.startswith("aten::baddbmm"):
            args = (args[0], *map(self.rounded, args[1:3]), *args[3:])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def rounded(x):
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("decay", [0.5, 10.0, 100.0])
def test_tf32_is_good_enough_for_every_gradient(decay):
    """Under strong decay the gradient by g is what is left of numbers that cancel; rounded apart, it would be noise."""
    inputs = drawn(2, 150, 2, 32, 32, decay=decay)
    expected = with_gradients(literal, inputs)
    with TensorFloat32():
        found = with_gradients(gated_delta_rule, inputs)
    for a, b in zip(found, expected, strict=True):
        assert apart(a, b) < 3e-3
    assert apart(found[0], expected[0]) > 1e-5  # it was rounded


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_inverse_by_halves(size):
    a = 0.2 * torch.randn(3, 2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tril(-1)
    expected = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + a)
    torch.testing.assert_close(unit_lower_inverse(a), expected, rtol=1e-9, atol=1e-9)


def kept_bytes(rule, inputs):
    """What autograd keeps for the backward beside the inputs."""
    seen = {}
    xs = [x.detach().clone().requires_grad_() for x in inputs]
    given = {x.untyped_storage().data_ptr() for x in xs}

    def note(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = rule(*xs)
    assert out.requires_grad
    return sum(n for address, n in seen.items() if address not in given)


def test_it_keeps_less_than_autograd_does():
    inputs = drawn(2, 256, 2, 128, 128, dtype=torch.bfloat16)
    assert kept_bytes(gated_delta_rule, inputs) < 0.6 * kept_bytes(own, inputs)
