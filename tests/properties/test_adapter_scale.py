"""`metric: adam_unit` in training: g times 1e-3 to 1e3 gives the same adapter."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from tests.unit.trainers.building import build, safety

import holdfast as hf
from holdfast.core.event_log import read
from holdfast.defenses.holdfast import FilteredDefense
from holdfast.training.safety import SafetySet
from holdfast.training.steering import Steering

STEPS = 50
LIMIT = hf.ChanceConstraint(tau=0.1, alpha=0.05, beta=10.0, unit="kl_token")
OPTIONS = {
    "plain": {},
    "reserve": {"reserve": 0.4},
    "importance": {"reserve": 0.4, "draw": "importance", "verify": 4, "rest": 2, "dual": 0.1},
    "verified": {"reserve": 0.4, "value_decay": 0.95, "anchor": True, "verify": 6},
    "anchor and dual": {"reserve": 0.4, "value_decay": 0.95, "anchor": True, "every": 2, "dual": 0.1},
}


class Scaled(Steering):
    """A constraint whose g is multiplied: its terms, and alpha with what is measured in it, buffer and reserve."""

    def __init__(self, one: SafetySet, config: Any, scale: float) -> None:
        self.scale = scale
        super().__init__(one, config)
        self.limit, self.buffer, self.margin = (scale * x for x in (self.limit, self.buffer, self.margin))

    def terms(self, degradations: torch.Tensor) -> torch.Tensor:
        return self.scale * super().terms(degradations)

    def start(self) -> float:
        return self.scale * super().start()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A float32 adapter after 50 steps under one constraint or two, each times a scale."""

    @functools.cache
    def adapter(*scales: float, name: str = "plain", metric: str = "adam_unit") -> torch.Tensor:
        left = iter(scales)
        sets = {f"set{i}": safety(seed=2 + i) for i in range(len(scales))}
        given = {
            "defense": {"name": "holdfast", "metric": metric, **OPTIONS[name]},
            "safety_dataset": sets, "constraint": dict.fromkeys(sets, LIMIT),
        }  # fmt: skip

        def steer(defense: FilteredDefense, one: SafetySet) -> Steering:
            return Scaled(one, defense.config, next(left))

        folder = tmp_path_factory.mktemp("scaled")
        with mock.patch.object(FilteredDefense, "steer", steer):
            trainer = build(folder, given=given, max_steps=STEPS)
            trainer.train()
        rows = read(trainer.run_dir / "events.jsonl")
        assert sum(row["active"] for row in rows) >= STEPS / 2
        weights = [p.detach().reshape(-1) for p in trainer.model.parameters() if p.requires_grad]
        assert {w.dtype for w in weights} == {torch.float32}
        return torch.cat(weights)

    return adapter


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_scale_of_g_does_not_change_the_adapter(trained, scale, name):
    one, other = trained(1.0, name=name), trained(scale, name=name)
    assert torch.linalg.norm(other - one) <= 1e-5 * torch.linalg.norm(one)


def test_nor_does_one_constraints_scale_beside_another(trained):
    one, other = trained(1.0, 1.0), trained(1e3, 1.0)
    assert torch.linalg.norm(other - one) <= 1e-5 * torch.linalg.norm(one)


def test_with_raw_moments_it_does(trained):
    """The comparison above can fail."""
    one, other = trained(1.0, metric="adam"), trained(1e3, metric="adam")
    assert torch.linalg.norm(other - one) > 1e-3 * torch.linalg.norm(one)
