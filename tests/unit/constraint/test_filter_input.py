"""What `SafetyFilter.step` refuses: everything through which the filter would be off without a word."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.core.errors import ConfigError


def made() -> tuple[torch.nn.Parameter, hf.SafetyFilter]:
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    filt = hf.SafetyFilter(torch.optim.SGD([p], lr=0.1), rate=1.0)
    p.grad = torch.ones(2)
    return p, filt


def without_grad(p: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return p.mean() - 5.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: (p.mean() - 5.0).detach(), "no graph"),
        (without_grad, "no graph"),
        (lambda p: [p.mean() - 5.0, (p.mean() - 5.0).detach()], "constraint 2 of 2 has no graph"),
        (lambda p: -5.0, "is a float"),
        (lambda p: (p.mean() - 5.0).item(), "is a float"),
        (lambda p: [p.mean(), 1.0], "constraint 2 of 2 is a float"),
        (lambda p: None, "is a NoneType"),
        (lambda p: {"g": p.mean()}, "is a str"),
        (lambda p: p - 5.0, r"shape \(2,\)"),
        (lambda p: p.mean()[None], r"shape \(1,\)"),
        (lambda p: [], "no constraint"),
        (lambda p: torch.tensor(-1.0, requires_grad=True), "none of the optimizer's parameters"),
        (lambda p: torch.nn.Parameter(torch.ones(2)).sum() - 5.0, "none of the optimizer's parameters"),
    ],
)
def test_what_cannot_be_filtered_with_is_refused_and_nothing_moves(make, words) -> None:
    p, filt = made()
    before = p.detach().clone()
    with pytest.raises(ConfigError, match=words) as refused:
        filt.step(make(p))
    assert refused.value.remedy
    assert torch.equal(p.detach(), before)


def test_a_scalar_with_a_graph_is_taken_also_where_its_gradient_is_zero() -> None:
    p, filt = made()
    assert filt.step(p.mean() - 5.0).name == "inactive"
    p.grad = torch.ones(2)
    assert filt.step((p.clamp(max=-100.0)).sum() * 0 - 1.0).name == "inactive"


def test_any_iterable_of_scalars_is_several_constraints() -> None:
    p, filt = made()
    event = filt.step(g for g in (p[0] - 5.0, p[1] - 5.0))
    assert len(event.values) == 2
