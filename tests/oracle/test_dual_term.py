"""The dual term against its formula, and what it does for a problem whose solution is known."""

import math

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.constraint.gradients import ParameterSpace
from holdfast.constraint.memory import DUAL_DECAY, LARGEST, DualTerm
from holdfast.constraint.problem import measure
from holdfast.core.errors import ConfigError


def test_ratios_follow_what_the_nominal_step_lacks():
    draw = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(30, generator=draw))
    space, term = ParameterSpace([p]), DualTerm()
    expected = np.zeros(2)
    for _ in range(60):
        h = [[torch.randn(30, generator=draw)] for _ in range(2)]
        s, values, rate = [torch.randn(30, generator=draw)], [0.4, -0.2], 0.3
        term.follow(measure(space, h, values, s, rate=rate)[0], 0.5)
        for k in range(2):
            inner, target = float(h[k][0].double() @ s[0].double()), rate * values[k]
            expected[k] += 0.5 * (inner + target) / (abs(inner) + abs(target))
        expected = np.clip(expected, 0.0, LARGEST)
        assert term.ratios == pytest.approx(expected.tolist(), rel=1e-6)
    assert max(term.ratios) > 0.0


def test_the_term_has_the_length_of_the_task_gradient_times_its_ratio():
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([3.0, 4.0, 0.0])
    h = [[torch.tensor([0.0, 0.0, 1e4])], [torch.tensor([1e-4, 0.0, 0.0])], [torch.zeros(3)]]
    term = DualTerm([0.5, 2.0, 1.0])
    term.add(ParameterSpace([p]), h, term.fold_norms([1e8, 1e-8, 0.0], [True] * 3), 25.0)
    assert p.grad.tolist() == pytest.approx([3.0 + 10.0, 4.0, 2.5])


def test_a_batch_that_says_little_is_not_stretched():
    """The term of a batch is its gradient over the root mean square of those before and of itself, debiased."""
    p, term = torch.nn.Parameter(torch.zeros(1)), DualTerm([0.5])
    seen = [4.0, 1.0, 0.25, 1e-4]
    for norm in seen:
        squares = term.fold_norms([norm**2], [True])
    weights = [DUAL_DECAY ** (len(seen) - 1 - i) for i in range(len(seen))]
    rms = math.sqrt(sum(w * norm**2 for w, norm in zip(weights, seen, strict=True)) / sum(weights))
    p.grad = torch.tensor([3.0])
    term.add(ParameterSpace([p]), [[torch.tensor([1e-4])]], squares, 9.0)
    assert float(p.grad) == pytest.approx(3.0 + 0.5 * 3.0 * 1e-4 / rms)


def test_it_takes_over_from_the_corrections():
    """min |p - (2, 1)|^2 with p_0 <= 1: at rest the optimizer's own step needs almost no correction."""

    def run(dual: float) -> tuple[torch.Tensor, float]:
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([p], lr=0.05)
        filt = hf.SafetyFilter(optimizer, rate=0.3, dual=dual)
        lengths = []
        for _ in range(400):
            optimizer.zero_grad()
            ((p - torch.tensor([2.0, 1.0])) ** 2).sum().backward()
            event = filt.step(p[0] - 1.0)
            lengths.append(event.multipliers[0])  # of the correction: h has length 1
        return p.detach(), sum(lengths[-100:]) / 100

    without, corrected = run(0.0)
    with_term, left = run(0.05)
    assert torch.allclose(without, torch.tensor([1.0, 1.0]), atol=1e-3)
    assert torch.allclose(with_term, torch.tensor([1.0, 1.0]), atol=2e-2)
    assert float(with_term[0]) <= 1.0 + 1e-6
    assert left < 0.1 * corrected


def test_a_slack_constraint_changes_no_bit():
    def run(dual: float) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.AdamW([p], lr=0.01)
        filt = hf.SafetyFilter(optimizer, rate=0.3, dual=dual)
        for _ in range(20):
            optimizer.zero_grad()
            (p**2).sum().backward()
            filt.step(p.sum() - 100.0)
        return p.detach()

    assert torch.equal(run(0.0), run(0.5))


@pytest.mark.parametrize("dual", [-0.1, 1.5, math.nan])
def test_a_rate_out_of_range_is_refused(dual):
    with pytest.raises(ConfigError, match="expected 0 <= dual <= 1"):
        hf.SafetyFilter(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), dual=dual)


def test_gradient_space_is_refused():
    with pytest.raises(ConfigError, match="hands its multiplier to the optimizer already"):
        hf.SafetyFilter(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), space="gradient", dual=0.1)


def test_a_term_of_an_earlier_run_is_not_added_without_the_option():
    p = torch.nn.Parameter(torch.zeros(2))
    filt = hf.SafetyFilter(torch.optim.SGD([p], lr=0.1))
    filt.load_state_dict({**filt.state_dict(), "dual_ratios": [1.0]})
    p.grad = torch.tensor([1.0, 0.0])
    filt.arm([-1.0], [[torch.tensor([0.0, 1.0])]])
    assert p.grad.tolist() == [1.0, 0.0]
