"""`metric: adam_unit`: neither the scale of a constraint nor how often it is given changes the steps."""

from __future__ import annotations

import functools

import pytest
import torch

import holdfast as hf

STEPS = 50


@functools.cache
def trained(
    scales: tuple[float, ...], *, again: bool = False, metric: str = "adam_unit", **options: float
) -> torch.Tensor:
    """A float32 point after 50 AdamW steps that pull against two curved constraints, each times a scale."""
    draw = torch.Generator().manual_seed(3)
    p = torch.nn.Parameter(torch.randn(40, generator=draw))
    target, centre = torch.randn(40, generator=draw) * 3, p.detach().clone()
    weights = torch.rand(2, 40, generator=draw) * torch.logspace(-2, 1, 40)
    optimizer = torch.optim.AdamW([p], lr=0.02, weight_decay=0.0)
    filt = hf.SafetyFilter(optimizer, rate=0.3, metric=metric, gradient_decay=0.8, **options)
    for _ in range(STEPS):
        noise = 1 + 0.3 * torch.randn(2, 40, generator=draw)
        g = [s * ((w * n * (p - centre) ** 2).mean() - 0.05) for s, w, n in zip(scales, weights, noise, strict=True)]
        optimizer.zero_grad()
        ((p - target) ** 2).mean().backward()
        filt.step([*g, g[0]] if again else g)
    return p.detach()


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("options", [{}, {"anchor": True}, {"dual": 0.1}], ids=["plain", "anchor", "dual"])
def test_the_scale_of_g_does_not_matter(scale, options):
    one, other = trained((1.0, 1.0), **options), trained((scale, 1.0), **options)
    assert torch.linalg.norm(other - one) <= 1e-5 * torch.linalg.norm(one)
    both = trained((scale, scale), **options)
    assert torch.linalg.norm(both - one) <= 1e-5 * torch.linalg.norm(one)


def test_the_metric_with_raw_moments_depends_on_the_scale():
    """What `adam_unit` is for."""
    one, other = trained((1.0, 1.0), metric="adam"), trained((1e3, 1e3), metric="adam")
    assert torch.linalg.norm(other - one) > 1e-3 * torch.linalg.norm(one)


@pytest.mark.parametrize("options", [{}, {"anchor": True}], ids=["plain", "anchor"])
def test_a_constraint_that_is_given_twice_counts_once(options):
    one, other = trained((1.0, 1.0), **options), trained((1.0, 1.0), again=True, **options)
    assert torch.linalg.norm(other - one) <= 1e-5 * torch.linalg.norm(one)
