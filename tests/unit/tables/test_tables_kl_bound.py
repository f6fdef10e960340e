"""Settings of a constraint in KL, by the bound on its mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.tables.making import result_json, results
from tools.study_page.kl_bound import bounded, mean_bound, threshold
from tools.study_page.verdicts import bounds

from holdfast.constraint.chance import ChanceConstraint

DEFAULT = {"tau": 0.1, "alpha": 0.05, "beta": 10.0, "unit": "kl_token", "majorizer": "ramp"}


def cell(setting="", *, seed=42, harm=0.2, defense="holdfast", **constraint):
    return result_json(
        defense, setting=setting, seed=seed, constraint=DEFAULT | constraint, HS=(harm, harm - 0.01, harm + 0.01),
        FA=(0.7, 0.6, 0.8), over_refusal=(0.5, 0.4, 0.6),
    )  # fmt: skip


@pytest.mark.parametrize("limit", [(0.1, 0.05, 10.0), (0.2, 0.05, 10.0), (0.1, 0.2, 50.0), (0.05, 0.3, 21.0)])
def test_no_kl_that_meets_the_constraint_has_a_larger_mean_and_one_has_it(limit):
    tau, alpha, beta = limit
    constraint = ChanceConstraint(tau=tau, alpha=alpha, beta=beta, unit="kl_token")
    values = {"tau": tau, "alpha": alpha, "beta": beta}

    def g(d):
        return float(constraint.value(torch.from_numpy(d)))

    draw = np.random.default_rng(0)
    for _ in range(200):
        d = draw.exponential(draw.uniform(0.001, 0.5), 40)
        if g(d) <= 0:
            assert d.mean() <= mean_bound(values) + 1e-12
    at = np.full(40, threshold(values) + alpha / beta)  # everyone at the bound
    assert g(at) == pytest.approx(0.0, abs=1e-12)


def test_rows_stand_in_the_order_of_the_bound_with_what_is_free():
    given = [
        cell(harm=0.18), cell("beta=20", beta=20.0, harm=0.6), cell("alpha=0.01", alpha=0.01, harm=0.17),
        cell("cvar", majorizer="cvar", harm=0.9), cell("nll", unit="nll_token", harm=0.9),
        cell(defense="primal_dual"),
        result_json("aligned", HS=(0.16, 0.15, 0.17), FA=(0.2, 0.1, 0.3), over_refusal=(0.8, 0.7, 0.9)),
    ]  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in bounds(results(given)).splitlines() if line.startswith("| ")][2:]
    assert [row[:3] for row in rows] == [
        ["alpha=0.01", "0", "0.001"], ["default", "0", "0.005"], ["beta=20", "0.05", "0.0525"],
    ]  # fmt: skip
    assert rows[1][-1].startswith("+0.020 ")


def test_settings_are_compared_on_common_seeds_or_not_at_all():
    given = [cell(harm=0.1), cell(seed=1, harm=0.3), cell("beta=20", beta=20.0, seed=1, harm=0.6)]
    text = bounds(results(given))
    assert "| default | 0 | 0.005 | 0.300 " in text
    assert bounds(results([cell(), cell("beta=20", beta=20.0, seed=1)])) == ""
    assert bounds(results([cell()])) == ""


def test_only_the_ramp_of_a_kl_that_tells_its_numbers_counts():
    told = results([cell(), result_json("holdfast", setting="x")])
    assert [result.setting for result in bounded(told, "holdfast")] == [""]
