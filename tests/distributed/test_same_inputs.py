"""Processes that read other data or settings than the first are refused before the start, by rank."""

from __future__ import annotations

import json

import pytest

from holdfast.core.errors import DataError
from holdfast.training.fingerprint import require_equal
from tests import forkserver
from tests.distributed import other_inputs
from tests.distributed.other_inputs import CASES


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    forkserver.ranks(other_inputs.main, folder, log=folder / "log")
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("task", "task data on rank 1 differs from rank 0"),
        ("safety", "safety set safety on rank 1 differs from rank 0"),
        ("settings", "settings on rank 1 differs from rank 0"),
        ("limit", "safety set safety on rank 1 differs from rank 0"),
    ],
)
def test_every_process_is_told_which_one_differs(told, case, words):
    assert told[0][case] == told[1][case]
    kind, what, remedy = told[0][case]
    assert kind == "DataError"
    assert words in what
    assert "every process the same files" in remedy


def test_equal_inputs_are_accepted(told):
    assert "nothing" in CASES
    assert [found["nothing"] for found in told] == [[], []]


def test_all_differing_ranks_and_parts_are_named():
    every = [{"task data": "a", "settings": "x"}, {"task data": "b", "settings": "x"}, {"settings": "y"}]
    with pytest.raises(DataError, match="task data on rank 1, 2; settings on rank 2 differs"):
        require_equal(every)
    require_equal(every[:1] * 3)
