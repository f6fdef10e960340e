"""Passes over many examples say how far they are, where they take long."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests import tiny
from tests.unit.constraint.literal import PAD

from holdfast.data.encode import IGNORE, Encoded
from holdfast.scoring.forward import QUIET, Forward


def examples(count: int) -> list[Encoded]:
    return [Encoded(str(i), (5, 6, 7, 8), (IGNORE, IGNORE, 7, 8), truncated=False) for i in range(count)]


@pytest.mark.parametrize(("seconds", "lines"), [(QUIET, [2, 4, 6, 8]), (QUIET / 4, [8]), (QUIET / 100, [])])
def test_a_line_at_most_every_so_many_seconds(monkeypatch, caplog, seconds, lines):
    clock = itertools.count()
    monkeypatch.setattr("holdfast.scoring.forward.time.monotonic", lambda: next(clock) * seconds)
    model = Forward(tiny.model(), pad_token_id=PAD, batch_size=2, device=torch.device("cpu"))
    with caplog.at_level("INFO", "holdfast.scoring"):
        model.losses(examples(10), 4)
    assert caplog.messages == [f"measured {done} of 10 examples" for done in lines]
