"""The sequential test keeps its verdict, its state and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.certification.sequential import EProcess
from holdfast.core.errors import ConfigError, DataError


def certified_process() -> EProcess:
    process = EProcess(0.05)
    process.update_many([False] * 100)
    return process


def test_a_new_process_knows_nothing():
    process = EProcess(0.05)
    assert (process.n, process.regressions, process.certified_at, process.certified) == (0, 0, None, False)
    assert process.e_value == pytest.approx(1.0)
    assert process.upper_bound() == pytest.approx(1.0)


def test_a_certificate_is_not_taken_back():
    process = certified_process()
    assert process.certified_at == 88
    process.update_many([True] * 50)
    assert process.e_value < 1
    assert process.certified
    assert process.certified_at == 88
    assert process.upper_bound() <= 0.05
    process.update_many([False] * 3000)
    assert process.certified_at == 88


def test_a_dip_inside_one_batch_of_prompts_counts():
    """The look after each prompt is what certifies, not the look after the batch."""
    process = EProcess(0.05)
    process.update_many([False] * 90 + [True] * 50)
    assert process.certified_at == 88


def test_more_tests_for_one_delta_wait_longer():
    alone, shared = EProcess(0.05), EProcess(0.05, parts=2)
    for process in (alone, shared):
        process.update_many([False] * 200)
    assert alone.certified_at < shared.certified_at


def test_a_long_run_of_good_prompts_does_not_overflow():
    process = EProcess(0.5)
    process.update_many(np.zeros(100_000, dtype=bool))
    assert process.e_value == float("inf")
    assert 0 < process.upper_bound() < 1e-3


@pytest.mark.parametrize("outcome", [1, 0.0, None, "False", float("nan")])
def test_an_outcome_must_be_a_truth_value(outcome):
    process = EProcess(0.05)
    with pytest.raises(DataError, match=r"expected True \(regressed\) or False"):
        process.update_many([False, outcome])
    assert process.n == 0


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="alpha = 0"):
        EProcess(0)
    with pytest.raises(ConfigError, match="confidence = 1"):
        EProcess(0.05, 1)
