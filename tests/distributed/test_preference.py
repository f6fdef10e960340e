"""DPO and GRPO on two processes: TRL's bits where the filter is slack, and one process's steps where it binds."""

from __future__ import annotations

import pytest
import torch

BOTH = pytest.mark.parametrize("engine", ["ddp", "fsdp2"], indirect=True)


@pytest.mark.parametrize(
    ("engine", "name"), [("ddp", "slack_dpo"), ("fsdp2", "slack_dpo"), ("ddp", "slack_grpo")], indirect=["engine"]
)
def test_inactive_filter_is_bit_identical_to_trl(engine, name):
    for rank in engine:
        expected, found = rank[name]["trl"]["weights"], rank[name]["slack"]["weights"]
        assert {row["event"] for row in rank[name]["slack"]["rows"]} == {"inactive"}
        assert all(torch.equal(expected[key], found[key]) for key in expected)


@BOTH
def test_pairs_in_micro_batches_of_two_processes_are_one_batch(engine, one_process):
    expected = one_process["dpo"]
    assert "active" in {row["event"] for row in expected["rows"]}
    for rank in engine:
        found = rank["dpo"]
        assert [row["event"] for row in found["rows"]] == [row["event"] for row in expected["rows"]]
        for key, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-5, atol=1e-6)


def test_sampling_from_shards_is_refused(fsdp2):
    for rank in fsdp2:
        assert rank["grpo"][:2] == ("UnsupportedError", 2)
        assert "rewards under FSDP2" in rank["grpo"][2]
