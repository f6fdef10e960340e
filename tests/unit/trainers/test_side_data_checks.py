"""Side data that could mislead: a head whose losses are not the model's, and data that the defense does not read."""

from __future__ import annotations

import logging

import pytest
from tests import tiny
from tests.unit.trainers.building import build

from holdfast.core.errors import UnsupportedError
from holdfast.runs.config import config_from_dict
from holdfast.runs.config.resolve import resolve
from holdfast.runs.stages.certifiable import warn_about_data
from holdfast.runs.stages.prepare import Prepared
from holdfast.scoring import completion
from holdfast.scoring.head import Head

RUN = {"model": "m/n", "task": {"data": "t.jsonl"}, "output_dir": "out", "harmful": {"data": "h.jsonl"}}


def test_an_alignment_run_without_a_safety_set_looks_at_the_head_too(tmp_path, monkeypatch):
    given = {"defense": "booster", "safety_dataset": None, "constraint": None}
    harmful = {"harmful_dataset": tiny.dataset(4, seed=5, start="w3")}
    build(tmp_path / "fine", given={**given, **harmful}, stage="align")

    def other(model):
        head = Head(model)
        head.scale = 1.3
        return head

    monkeypatch.setattr(completion, "Head", other)
    with pytest.raises(UnsupportedError, match="differ from its own logits"):
        build(tmp_path / "wrong", given={**given, **harmful}, stage="align")


def test_data_that_are_not_used_are_named(caplog):
    tuning = {**RUN, "safety": {}, "stage": "align", "unaligned": "owner/base"}
    with caplog.at_level(logging.WARNING):
        warn_about_data(resolve(config_from_dict({**tuning, "defense": "sft"}), elsewhere=True), Prepared([], {}))
    assert [record.args for record in caplog.records] == [("harmful", "sft"), ("unaligned", "sft")]
    caplog.clear()
    warn_about_data(
        resolve(config_from_dict({**RUN, "stage": "align", "defense": "booster"}), elsewhere=True),
        Prepared([], {}, harmful=[]),
    )
    assert not caplog.records
