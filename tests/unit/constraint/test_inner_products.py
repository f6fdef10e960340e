"""Inner products of vectors given tensor by tensor, and what the filter computes from them, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.constraint import gradients
from holdfast.constraint.gradients import ParameterSpace
from holdfast.constraint.metric import RELATIVE_FLOOR, adam_diagonal
from holdfast.core.errors import ConfigError

SHAPES = [(3, 4), (7,), (1, 1), (5, 2), (40,), (2, 3, 2)]


@pytest.fixture(params=[4 * 2**20, 16, 7, 1], ids=["one block", "several blocks", "split tensors", "single numbers"])
def space(request, monkeypatch):
    monkeypatch.setattr(gradients, "BLOCK", request.param)
    draw = torch.Generator().manual_seed(0)
    return ParameterSpace([nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES])


def vector(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def plain(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return math.fsum(
        x * y
        for s, t in zip(a, b, strict=True)
        for x, y in zip(s.double().reshape(-1).tolist(), t.double().reshape(-1).tolist(), strict=True)
    )


def test_all_pairs_at_once(space):
    a, b, c = vector(1), vector(2), vector(3)
    pairs = [(a, b), (b, a), (c, c), (a, c), (b, b)]
    for found, (x, y) in zip(space.dots(pairs), pairs, strict=True):
        assert found == pytest.approx(plain(x, y), rel=1e-13, abs=1e-13)


def test_products_are_not_rounded_to_float32(space):
    """1 + e and 1 - e are float32 numbers whose product 1 - e^2 is not."""
    e = 2.0**-20
    a = [torch.full(shape, 1.0 + e) for shape in SHAPES]
    b = [torch.full(shape, 1.0 - e) for shape in SHAPES]
    count = sum(math.prod(shape) for shape in SHAPES)
    assert space.dots([(a, b)])[0] == pytest.approx(count * (1 - e * e), rel=1e-15)


def test_what_is_not_finite_stays_with_its_own_vector(space):
    a, b, c = vector(1), vector(2), vector(3)
    b[2].fill_(math.nan)
    c[0][0, 0] = math.inf
    found = space.dots([(a, a), (a, b), (a, c), (c, c)])
    assert found[0] == pytest.approx(plain(a, a))
    assert not any(map(math.isfinite, found[1:]))


def test_gradients_are_added_up_where_there_is_none_too(space):
    a, b = vector(1), vector(2)
    space.params[0].grad = torch.ones(SHAPES[0])
    space.add_to_gradient([a, b], [2.0, -0.5])
    for i, p in enumerate(space.params):
        torch.testing.assert_close(p.grad, 2 * a[i] - 0.5 * b[i] + (1.0 if i == 0 else 0.0))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_the_metric_is_adams_of_each_group(space, fused):
    """M = lr_p / (sqrt(max(v_task / (1 - beta2^t), v_safe)) + eps + floor); v_task = 0 where it never stepped."""
    groups = [
        {"params": space.params[:3], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3},
        {"params": space.params[3:], "lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8},
    ]
    optimizer = torch.optim.AdamW(groups, fused=fused)
    for seed in (1, 2):
        for p, g in zip(space.params, vector(seed), strict=True):
            p.grad = g
        space.params[4].grad = None
        optimizer.step()
    safe = [v.square() for v in vector(5)]
    moments = []
    for p, v_safe in zip(space.params, safe, strict=True):
        beta2 = 0.99 if any(p is q for q in space.params[:3]) else 0.999
        task = optimizer.state[p]["exp_avg_sq"] / (1 - beta2**2) if p in optimizer.state else torch.zeros_like(p)
        moments.append(torch.maximum(task, v_safe).sqrt())
    mean = sum(float(m.double().sum()) for m in moments) / sum(m.numel() for m in moments)
    found = space.split(adam_diagonal(space, optimizer, space.join(safe)))
    assert space.params[4] not in optimizer.state
    for i, (m, diagonal) in enumerate(zip(moments, found, strict=True)):
        lr, eps = (1.0, 1e-3) if i < 3 else (0.2, 1e-8)
        torch.testing.assert_close(diagonal, lr / (m + eps + RELATIVE_FLOOR * mean), rtol=1e-5, atol=0)


def test_joined_vectors_are_the_same_numbers(space):
    before = [p.detach().clone() for p in space.params]
    theta = space.theta()
    assert [len(theta), theta[0].dim()] == [1, 1]
    space.move(space.join(vector(1)), 0.5)
    for p, start, moved in zip(space.params, before, vector(1), strict=True):
        assert torch.equal(p, start + 0.5 * moved)
    space.pull(theta, 1.0)
    for p, back in zip(space.params, space.split(theta), strict=True):
        torch.testing.assert_close(p.detach(), back, rtol=1e-6, atol=1e-6)
    space.put(theta)
    for p, start in zip(space.params, before, strict=True):
        assert torch.equal(p, start)


def test_a_single_parameter_is_copied_too():
    alone = ParameterSpace([nn.Parameter(torch.zeros(3))])
    theta = alone.theta()
    alone.move([torch.ones(3)], 1.0)
    assert theta[0].tolist() == [0.0, 0.0, 0.0]


def test_types_are_joined_apart():
    params = [
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        nn.Parameter(torch.ones(1)),
    ]
    theta = ParameterSpace(params).theta()
    assert [(len(x), x.dtype) for x in theta] == [(2, torch.float32), (3, torch.float64), (1, torch.float32)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_seen(space, bad):
    a = [*vector(1), torch.zeros(0)]
    assert not space.nonfinite(a).item()
    a[3][4, 1] = bad
    assert space.nonfinite(a).item()


@pytest.mark.parametrize("shapes", [SHAPES[1:], [*SHAPES, (1,)], [SHAPES[1], SHAPES[0], *SHAPES[2:]]])
def test_a_vector_of_other_shapes_is_refused(space, shapes):
    """As many numbers in another order would be joined to a vector that looks right."""
    with pytest.raises(ConfigError, match=r"tensor \d of a vector over the trained parameters: found shape"):
        space.join([torch.zeros(shape) for shape in shapes])


def test_an_empty_shard_keeps_its_shape(monkeypatch):
    """Also where torch gives it back as (0,), which does not fit (0, 8)."""
    monkeypatch.setattr(
        gradients,
        "_unflatten_dense_tensors",
        lambda *args: [x if x.numel() else x.view(0) for x in _unflatten_dense_tensors(*args)],
    )
    some = ParameterSpace([nn.Parameter(torch.zeros(0, 8)), nn.Parameter(torch.zeros(3))])
    start = some.theta()
    some.move(some.join([torch.ones(0, 8), torch.ones(3)]), 2.0)
    some.pull(start, 0.5)
    assert some.params[1].tolist() == [1.0, 1.0, 1.0]
    some.put(start)
    assert [tuple(x.shape) for x in some.full(some.split(start))] == [(0, 8), (3,)]
    assert some.params[1].tolist() == [0.0, 0.0, 0.0]


class Largest(TorchDispatchMode):
    """The most numbers that went into a float64 tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
            self.count = max(self.count, *(x.numel() for x in args if isinstance(x, torch.Tensor)), found.numel())
        return found


def test_float64_copies_are_of_a_block(monkeypatch):
    """A joined vector is as long as the model."""
    monkeypatch.setattr(gradients, "BLOCK", 100)
    model = ParameterSpace([nn.Parameter(torch.ones(1000))])
    a, b = model.theta(), model.theta()
    with Largest() as seen:
        assert model.means([a, b]) == [1.0, 1.0]
        assert model.dots([(a, b)]) == [1000.0]
    assert seen.count == 100


def test_means(space):
    a, b = vector(1), vector(2)
    expected = [float(torch.cat([x.reshape(-1) for x in v]).double().mean()) for v in (a, b)]
    assert space.means([a, b]) == pytest.approx(expected)
