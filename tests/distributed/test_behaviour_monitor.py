"""The behaviour monitor under DDP: every process asks its share, all hold the same figures; under FSDP: refused."""

from __future__ import annotations

import torch

from tests.distributed import behaviour_cases


def test_each_process_asks_its_share_and_all_have_the_same_figures(ddp):
    first, second = (rank["behaviour"] for rank in ddp)
    assert (first["shares"], second["shares"]) == ([11, 11], [10, 10])
    assert first["result"] == second["result"]
    assert {one["of"] for one in first["result"]["behaviour"].values()} == {behaviour_cases.PROMPTS}


def test_training_does_not_notice(ddp):
    for rank in ddp:
        plain, watched = rank["unwatched"]["weights"], rank["behaviour"]["weights"]
        assert plain.keys() == watched.keys()
        assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_a_sharded_model_is_refused(fsdp2):
    for rank in fsdp2:
        name, code, message = rank["behaviour"]
        assert (name, code) == ("UnsupportedError", 2)
        assert "behaviour monitor under FSDP" in message
        assert "DDP" in message
