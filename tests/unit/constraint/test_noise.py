"""The noise floor: the 99 % quantile of |D| at theta_0 under another batch composition."""

from __future__ import annotations

import pytest
import torch
from tests import tiny

from holdfast.constraint.chance import ChanceConstraint
from holdfast.data.encode import Encoded
from holdfast.scoring.degradation import in_unit
from holdfast.scoring.forward import Forward
from holdfast.scoring.reference import NOISE_SAMPLE, noise_floor


class FakeForward:
    """Degradations by table, and a record of what was asked for."""

    def __init__(self, values: dict[str, float]) -> None:
        self.values, self.asked, self.shuffle = values, [], None

    def degradations(self, examples, reference, constraint, *, shuffle=None):
        self.asked, self.shuffle = [e.id for e in examples], shuffle
        assert len(reference) == len(examples)
        return torch.tensor([self.values[e.id] for e in examples], dtype=torch.float64)


def examples(n: int) -> list[Encoded]:
    return [
        Encoded(str(i), (3, 4, 5 + i % 7, *([6] * (i % 5))), (-100, -100, 5 + i % 7, *([6] * (i % 5))), False)
        for i in range(n)
    ]


def test_quantile_of_the_absolute_value():
    values = {str(i): (-1) ** i * i / 1000 for i in range(101)}
    fake = FakeForward(values)
    found = noise_floor(fake, examples(101), torch.zeros(101), ChanceConstraint(unit="nll_token"), seed=7)
    assert found == pytest.approx(0.099)  # sorted |D| = 0, 0.001, ..., 0.100
    assert fake.shuffle == 7


def test_at_most_256_examples_drawn_by_the_seed():
    values = {str(i): 0.0 for i in range(1000)}
    asked = []
    for seed in (1, 1, 2):
        fake = FakeForward(values)
        noise_floor(fake, examples(1000), torch.zeros(1000), ChanceConstraint(unit="nll_token"), seed=seed)
        asked.append(fake.asked)
    assert len(asked[0]) == NOISE_SAMPLE == 256
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_model_stays_far_below_any_sensible_tau(dtype):
    forward = Forward(tiny.model(dtype=dtype), pad_token_id=0, batch_size=4, device=torch.device("cpu"))
    rows, c = examples(30), ChanceConstraint(unit="nll_token")
    reference = in_unit(forward.losses(rows, 8), c)
    assert noise_floor(forward, rows, reference, c, seed=1) < (1e-5 if dtype == torch.float32 else 0.02)
    moved = reference + 0.5
    assert noise_floor(forward, rows, moved, c, seed=1) == pytest.approx(0.5, abs=0.02)
