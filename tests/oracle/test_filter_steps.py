"""The filter on optimizers and a nonlinear constraint: each step keeps the barrier, and every odd case has a name."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch

import holdfast as hf
from holdfast.constraint import memory as filter_module
from holdfast.constraint.event import Event
from holdfast.core.errors import ConfigError, InfeasibleError, NumericalError, UnsupportedError
from tests.oracle.lion import Lion
from tests.oracle.test_filter_qp import problem

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, fused=True),
    "adamw no decay": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.0),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "lion": lambda p: Lion(p, lr=0.02, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


def start(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, 3, dtype=dtype) / 3), torch.nn.Parameter(torch.zeros(5, dtype=dtype))]


def task_loss(params):
    a, b = params
    return ((a - 3.0) ** 2).sum() + ((b + 2.0) ** 2).sum()


def curved(params):
    """A bent ball: negative at the start, and between the start and where the task pulls to."""
    x = torch.cat([p.reshape(-1) for p in params])
    return (x**2).mean() / 4 + torch.sin(3 * x).mean() / 10 - 0.5


def steps(optimizer, params, g, *, count=300, **kwargs):
    """Run the loop and yield, per step: event, gradient of g before the step, value, applied step."""
    filt = hf.SafetyFilter(optimizer, **{"rate": 1.0, **kwargs})
    for _ in range(count):
        optimizer.zero_grad()
        task_loss(params).backward()
        value = g(params)
        h = torch.autograd.grad(value, params, retain_graph=True)
        before = [p.detach().clone() for p in params]
        event = filt.step(value)
        yield event, h, float(value.detach()), [p.detach() - q for p, q in zip(params, before, strict=True)]


def excess(h, step, value, rate) -> float:
    """`h . s + gamma v`: at most zero when the barrier holds."""
    return sum(float((x * s).sum()) for x, s in zip(h, step, strict=True)) + rate * value


def rounding(h, params) -> float:
    """How far the parameters' own rounding can move `h . s`."""
    eps = torch.finfo(params[0].dtype).eps
    return 4 * eps * sum(float((x.abs() * (p.detach().abs() + 1)).sum()) for x, p in zip(h, params, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_applied_step_keeps_the_barrier(name, rate):
    params = start()
    seen = []
    for event, h, value, step in steps(OPTIMIZERS[name](params), params, curved, rate=rate):
        seen.append(event.name)
        if event.name in (Event.ACTIVE, Event.INACTIVE):
            assert excess(h, step, value, rate) <= rounding(h, params)
        if event.name is Event.ACTIVE:
            assert event.residual == pytest.approx(0.0, abs=1e-9)
        if seen.count(Event.ACTIVE) == 50:
            break
    assert seen.count(Event.ACTIVE) == 50, seen[-20:]


def test_float32_parameters_keep_it_to_rounding():
    params = start(torch.float32)
    active = 0
    for event, h, value, step in steps(torch.optim.AdamW(params, lr=0.02), params, curved, rate=0.3, count=150):
        if event.name is Event.ACTIVE:
            active += 1
            assert excess(h, step, value, 0.3) <= rounding(h, params)
    assert active >= 10


def test_gradient_space_with_adamw_does_not_keep_the_barrier():
    """The reason for the update space: momentum and preconditioner undo what the filtered gradient promises."""
    missed = active = 0
    for seed in range(200):
        params, optimizer, gradients, values = problem(seed, "update")
        before = [p.detach().clone() for p in params]
        filt = hf.SafetyFilter(optimizer, rate=0.3, space="gradient")
        filt.arm(values[:1], gradients[:1])
        optimizer.step()
        step = [p.detach() - q for p, q in zip(params, before, strict=True)]
        if filt.last_event.name is Event.ACTIVE:
            active += 1
            assert filt.last_event.residual == pytest.approx(0.0, abs=1e-6)  # the direction keeps it ...
            missed += excess(gradients[0], step, values[0], 0.3) > 1e-3 * abs(values[0])  # ... the step does not
    assert active > 50
    assert missed > active / 2


def test_gradient_space_with_plain_sgd_keeps_it():
    params = start()
    optimizer = torch.optim.SGD(params, lr=0.01)
    active = 0
    for event, h, value, step in steps(optimizer, params, curved, rate=0.5, space="gradient"):
        if event.name is Event.ACTIVE:
            active += 1
            assert excess(h, step, value, 0.5) <= rounding(h, params)
    assert active >= 10


def test_slack_filter_leaves_parameters_and_moments_untouched():
    params, plain = start(torch.float32), start(torch.float32)
    optimizer, reference = torch.optim.AdamW(params, lr=0.01), torch.optim.AdamW(plain, lr=0.01)
    for event, *_ in steps(optimizer, params, lambda p: curved(p) * 1e-3 - 100.0, count=10):
        assert event.name is Event.INACTIVE
    for _ in range(10):
        reference.zero_grad()
        task_loss(plain).backward()
        reference.step()
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], reference.state[q]["exp_avg_sq"])


def test_moments_never_see_the_correction():
    """A constraint orthogonal to the task: corrected steps, moments equal to plain AdamW's."""
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    filtered, plain = torch.optim.AdamW([p], lr=0.1, weight_decay=0), torch.optim.AdamW([q], lr=0.1, weight_decay=0)
    filt = hf.SafetyFilter(filtered, rate=1.0, metric="identity")
    names = set()
    for _ in range(5):
        p.grad, q.grad = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])
        names.add(filt.step(p[1] + 0.05).name)
        plain.step()
    assert Event.ACTIVE in names
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(filtered.state[p][key], plain.state[q][key])
    assert p[0] == q[0]


def test_parameter_without_task_gradient_is_corrected_within_the_trust_region():
    """LoRA's A while B is zero: no task gradient, no optimizer state, still a finite, bounded correction."""
    used, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([used, unused], lr=0.1)
    filt = hf.SafetyFilter(optimizer, rate=1.0, trust_region=2.0)
    used.grad = torch.ones(3)
    event = filt.step((unused.sum() - 2.9) * 1e-4)
    moved = (unused.detach() - 1.0).norm()
    assert event.corrected
    assert 0 < moved <= 2.0 * 0.1 * math.sqrt(3) * 1.001


def test_two_constraints_hold_together():
    params = start()
    optimizer = torch.optim.AdamW(params, lr=0.05)
    filt = hf.SafetyFilter(optimizer, rate=0.5, trust_region=50.0)
    both = 0
    for _ in range(60):
        optimizer.zero_grad()
        task_loss(params).backward()
        gs = [params[0].mean() - 1.5, (params[1] ** 2).mean() - 0.5]
        hs = [torch.autograd.grad(g, params, retain_graph=True, allow_unused=True) for g in gs]
        hs = [[torch.zeros_like(p) if x is None else x for x, p in zip(h, params, strict=True)] for h in hs]
        before = [p.detach().clone() for p in params]
        event = filt.step(gs)
        step = [p.detach() - q for p, q in zip(params, before, strict=True)]
        if event.name in (Event.ACTIVE, Event.INACTIVE):
            assert all(
                excess(h, step, float(g.detach()), 0.5) <= rounding(h, params) for h, g in zip(hs, gs, strict=True)
            )
        both += all(m > 0 for m in event.multipliers)
    assert both >= 5


def test_warm_up_from_a_learning_rate_of_zero():
    params = start()
    optimizer = torch.optim.AdamW(params, lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, k / 5))
    for space in ("update", "gradient"):
        filt = hf.SafetyFilter(optimizer, rate=0.3, space=space)
        for _ in range(8):
            optimizer.zero_grad()
            task_loss(params).backward()
            event = filt.step(curved(params))
            schedule.step()
            assert all(map(math.isfinite, event.multipliers))
        assert all(torch.isfinite(p).all() for p in params)
        filt.detach()


def test_a_correction_passes_while_the_learning_rate_is_zero():
    """Started infeasible at lr = 0: the trust region has a floor."""
    p = torch.nn.Parameter(torch.full((4,), 2.0))
    filt = hf.SafetyFilter(torch.optim.AdamW([p], lr=0.0), rate=1.0)
    p.grad = torch.ones(4)
    event = filt.step(p.mean() - 1.0)
    assert event.name is Event.RESTORATION
    assert p.detach().mean() < 2.0


def test_restoration_decreases_g_monotonically_from_an_infeasible_start():
    """g = 0.5 at the start: `(1 - gamma)^k` while uncapped, and at most ln(50)/-ln(0.7) = 11 steps to 0.01."""
    p = torch.nn.Parameter(torch.full((3,), 1.5, dtype=torch.float64))
    filt = hf.SafetyFilter(torch.optim.SGD([p], lr=0.01), rate=0.3, metric="identity", trust_region=100.0)
    values = []
    for _ in range(12):
        p.grad = -torch.ones(3, dtype=torch.float64)  # the task pulls outwards
        g = p.mean() - 1.0
        values.append(float(g.detach()))
        filt.step(g)
    assert all(b < a for a, b in itertools.pairwise(values))
    assert values[11] <= 0.01


def test_capped_and_infeasible_drops_the_task_step():
    p = torch.nn.Parameter(torch.tensor([5.0, 0.0], dtype=torch.float64))
    filt = hf.SafetyFilter(torch.optim.SGD([p], lr=0.1), rate=1.0, trust_region=1.0)
    p.grad = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    event = filt.step(p[0] - 1.0)
    assert event.name is Event.RESTORATION
    assert p.detach().tolist() == pytest.approx([5.0 - 0.1 * math.sqrt(2), 0.0])


def test_violated_with_zero_gradient_is_infeasible_and_moves_nothing():
    for space in ("update", "gradient"):
        p = torch.nn.Parameter(torch.ones(3))
        filt = hf.SafetyFilter(torch.optim.AdamW([p], lr=0.1), space=space, rate=1.0)
        p.grad = torch.ones(3)
        event = filt.step((p * 0.0).sum() + 0.5)
        assert event.name is Event.INFEASIBLE
        assert torch.equal(p.detach(), torch.ones(3))


def test_contradictory_constraints_in_restoration_are_infeasible_and_leave_the_weights_whole():
    """Safety and over-refusal pulling apart: no step can meet both, and nothing non-finite may reach the weights."""
    names = set()
    for scale in (1e-9, 1e-7, 1e-3, 1.0):
        p = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = torch.optim.SGD([p], lr=0.1)
        filt = hf.SafetyFilter(optimizer, rate=1.0, trust_region=0.5, metric="identity")
        h = torch.tensor([1.0, 0.5], dtype=torch.float64)
        p.grad = torch.tensor([-1.0, 1.0], dtype=torch.float64)
        filt.arm([scale, 0.0], [[h], [-h]])
        optimizer.step()
        names.add(filt.last_event.name)
        assert torch.isfinite(p).all()
    assert Event.INFEASIBLE in names


def test_optimizers_whose_step_is_not_one_move_are_refused():
    class ScheduleFree(torch.optim.SGD):
        def train(self):
            """Switches to the other weights."""

        def eval(self):
            """Switches back."""

    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(UnsupportedError, match="second set of weights"):
        hf.SafetyFilter(ScheduleFree([p], lr=0.1), rate=1.0)
    with pytest.raises(UnsupportedError, match="LBFGS"):
        hf.SafetyFilter(torch.optim.LBFGS([p]), rate=1.0)


def test_restoration_without_headway_stops():
    """Two contradictory examples: g cannot fall, and the filter says so instead of going on."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    filt = hf.SafetyFilter(torch.optim.SGD([p], lr=1e-4), rate=1.0, trust_region=1.0, metric="identity")

    def restore():
        for _ in range(filter_module.RESTORATION_LIMIT + 1):
            p.grad = torch.ones(1, dtype=torch.float64)
            filt.step((p - 1e-6).abs().sum() + (p + 1e-6).abs().sum() + 1.0 + 0.1 * p.sum())

    with pytest.raises(InfeasibleError, match="restoration steps did not reduce it") as caught:
        restore()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("where", ["task gradient", "constraint value", "constraint gradient"])
@pytest.mark.parametrize("space", ["update", "gradient"])
@pytest.mark.parametrize("fused", [False, True])
def test_non_finite_numbers_stop_the_step(where, space, fused):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=fused)
    filt = hf.SafetyFilter(optimizer, space=space, gradient_decay=0.9, rate=1.0)
    p.grad = torch.ones(3)
    filt.step(p.mean() - 5.0)
    moments, before = optimizer.state[p]["exp_avg_sq"].clone(), p.detach().clone()
    p.grad = torch.full((3,), math.nan if where == "task gradient" else 1.0)
    value = {"constraint value": math.nan}.get(where, -1.0)
    gradient = torch.full((3,), math.inf if where == "constraint gradient" else 1.0)
    filt.arm([value], [[gradient]])
    optimizer.step()
    assert filt.last_event.name is Event.NONFINITE
    assert torch.equal(p.detach(), before)
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], moments)
    assert float(optimizer.state[p]["step"]) == 1.0
    assert not hasattr(optimizer, "found_inf")
    p.grad = torch.ones(3)
    assert filt.step(p.mean() - 5.0).name is Event.INACTIVE  # the averages are clean


def test_a_step_that_needs_no_correction_computes_no_metric(monkeypatch):
    """The metric decides how to correct, not whether."""
    p = torch.nn.Parameter(torch.ones(3))
    filt = hf.SafetyFilter(torch.optim.AdamW([p], lr=0.1), rate=1.0, anchor=True)
    p.grad = -torch.ones(3)
    assert filt.step(p.mean() - 1.05).corrected

    def refuse(*_, **__):
        raise AssertionError("the metric was computed")

    monkeypatch.setattr("holdfast.constraint.filter.adam_diagonal", refuse)
    p.grad = -torch.ones(3)
    event = filt.step(p.mean() - 5.0)
    assert (event.name, event.multipliers, event.correction_ratio) == (Event.INACTIVE, (0.0,), 0.0)
    assert filt.anchor.distance == pytest.approx(float((p.detach() - filt.anchor.origin[0]).norm()), rel=1e-6)
    assert event.residual == pytest.approx(-5.0 + float(p.detach().mean()), abs=1e-6)
    p.grad = -torch.ones(3)
    with pytest.raises(AssertionError, match="was computed"):
        filt.step(p.mean() - 1.2)


def test_the_scale_of_a_fused_optimizer_that_somebody_else_set_stays():
    """As a gradient scaler sets it: the filter then waits for the task's gradient."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    filt = hf.SafetyFilter(optimizer, rate=1.0)
    theirs = torch.zeros(())
    setattr(optimizer, "found_inf", theirs)  # noqa: B010  (no attribute of its type)
    p.grad = torch.full((3,), math.nan)
    assert filt.step(p.mean() - 5.0).name is Event.NONFINITE
    assert getattr(optimizer, "found_inf") is theirs  # noqa: B009
    assert torch.equal(p.detach(), torch.ones(3))


@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_is_lost_leaves_no_momentum(fused):
    """Fused SGD would make its momentum of memory that nothing has written to, were its kernels told to skip."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=fused)
    filt = hf.SafetyFilter(optimizer, rate=1.0)
    p.grad = torch.full((3,), math.nan)
    assert filt.step(p.mean() - 5.0).name is Event.NONFINITE
    assert optimizer.state[p].get("momentum_buffer") is None
    p.grad = torch.ones(3)
    filt.step(p.mean() - 5.0)
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))


def test_a_fused_optimizer_goes_on_from_the_state_of_another_one():
    """A loaded state brings its own groups, with `fused` off: such kernels refuse `found_inf`."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    optimizer.load_state_dict(torch.optim.AdamW([p], lr=0.1, fused=False).state_dict())
    filt = hf.SafetyFilter(optimizer, rate=1.0)
    p.grad = torch.ones(3)
    assert filt.step(p.mean() - 5.0).name is Event.INACTIVE
    p.grad, before = torch.full((3,), math.nan), p.detach().clone()
    assert filt.step(p.mean() - 5.0).name is Event.NONFINITE
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("then", ["step", "detach"])
def test_a_step_that_raises_leaves_no_flag_on_the_optimizer(monkeypatch, then):
    """With `found_inf` left at 1, no later step would move the parameters."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    filt = hf.SafetyFilter(optimizer, rate=1.0)
    p.grad = torch.full((3,), math.nan)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            filt.step(p.mean() - 5.0)
    p.grad = torch.ones(3)
    if then == "step":
        assert filt.step(p.mean() - 5.0).name is Event.INACTIVE
    else:
        filt.detach()
        optimizer.step()
    assert not hasattr(optimizer, "found_inf")
    assert torch.all(p.detach() < 1.0)


def test_too_many_non_finite_steps_end_the_run():
    p = torch.nn.Parameter(torch.ones(3))
    filt = hf.SafetyFilter(torch.optim.SGD([p], lr=0.1), rate=1.0)

    def train():
        for _ in range(4):
            p.grad = torch.full((3,), math.nan)
            filt.step(p.mean() - 5.0)

    with pytest.raises(NumericalError, match="4 of the last 100 steps") as caught:
        train()
    assert caught.value.exit_code == 5


def test_forgetting_the_constraint_is_an_error_and_detach_ends_it():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    filt = hf.SafetyFilter(optimizer, rate=1.0)
    p.grad = torch.ones(3)
    with pytest.raises(ConfigError, match="would not be filtered"):
        optimizer.step()
    filt.detach()
    optimizer.step()
    assert torch.allclose(p.detach(), torch.full((3,), 0.9))


def test_state_round_trip_continues_bit_identically():
    def run(interrupt: bool):
        params = start(torch.float32)
        optimizer = torch.optim.AdamW(params, lr=0.02)
        filt = hf.SafetyFilter(optimizer, rate=0.3, gradient_decay=0.9)
        for k in range(20):
            if interrupt and k == 9:
                optimizer_state, filter_state = optimizer.state_dict(), filt.state_dict()
                params = [torch.nn.Parameter(p.detach().clone()) for p in params]
                optimizer = torch.optim.AdamW(params, lr=0.02)
                optimizer.load_state_dict(optimizer_state)
                filt = hf.SafetyFilter(optimizer, rate=0.3, gradient_decay=0.9)
                filt.load_state_dict(filter_state)
            optimizer.zero_grad()
            task_loss(params).backward()
            filt.step(curved(params))
        return params

    for p, q in zip(run(False), run(True), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"rate": 0.0}, ConfigError, "0 < rate <= 1"),
        ({"rate": 1.5}, ConfigError, "0 < rate <= 1"),
        ({"space": "tangent"}, ConfigError, "unknown filter space"),
        ({"metric": "adma"}, ConfigError, "unknown filter metric"),
        ({"trust_region": 0.0}, ConfigError, "trust_region"),
        ({"gradient_decay": 1.0}, ConfigError, "decay"),
    ],
)
def test_bad_settings_are_refused(kwargs, error, words):
    with pytest.raises(error, match=words):
        hf.SafetyFilter(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), **kwargs)


def test_adam_metric_needs_second_moments():
    p = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="Lion has none"):
        hf.SafetyFilter(Lion([p]), metric="adam", rate=1.0)
    assert hf.SafetyFilter(Lion([p]), rate=1.0).metric == "identity"
    assert hf.SafetyFilter(torch.optim.AdamW([p]), rate=1.0).metric == "adam"


def test_bfloat16_parameters_are_refused():
    with pytest.raises(UnsupportedError, match="trainable parameters in bfloat16"):
        hf.SafetyFilter(torch.optim.SGD([torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))], lr=0.1), rate=1.0)


def test_gradient_space_needs_one_learning_rate():
    p, q = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1}, {"params": [q], "lr": 0.2}])
    filt = hf.SafetyFilter(optimizer, space="gradient", rate=1.0)
    with pytest.raises(ConfigError, match="one learning rate"):
        filt.step(p.sum() + q.sum())
