"""On two processes, too: a slack filter changes nothing, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.event_log import read
from tests.distributed.worker import STEPS, without_time


@pytest.mark.parametrize(("engine", "name"), [("ddp", "slack"), ("fsdp2", "slack")], indirect=["engine"])
def test_inactive_filter_is_bit_identical_to_trl(engine, name):
    for rank in engine:
        assert {row["event"] for row in rank[name]["rows"]} == {"inactive"}
        assert any(float(x.abs().max()) > 0 for step in rank[name]["safety"] for x in step)
        expected, found = rank["trl"]["weights"], rank[name]["weights"]
        assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize(
    ("engine", "name"), [("ddp", "resume"), ("fsdp2", "resume"), ("fsdp2", "resume_full")], indirect=["engine"]
)
def test_a_resumed_run_is_bit_identical(engine, name):
    for rank in engine:
        whole, resumed = rank[name]["whole"], rank[name]["resumed"]
        assert [row["step"] for row in resumed["rows"]] == [4, 5]
        assert without_time(resumed["rows"]) == without_time(whole["rows"][3:])
        assert any(row["event"] != "inactive" for row in resumed["rows"])
        assert all(torch.equal(whole["weights"][key], resumed["weights"][key]) for key in whole["weights"])
        assert whole["metrics"] == resumed["metrics"]


@pytest.mark.parametrize(("engine", "name"), [("ddp", "resume"), ("fsdp2", "resume")])
def test_the_event_log_of_a_resumed_run_has_each_step_once(engine, name, runs, request):
    request.getfixturevalue(engine)
    assert [row["step"] for row in read(runs / engine / name / "events.jsonl")] == list(range(1, STEPS + 1))
