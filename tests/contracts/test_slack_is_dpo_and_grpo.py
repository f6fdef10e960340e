"""A slack filter changes nothing in DPO and GRPO either: the weights are bit for bit TRL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.event_log import read
from tests import tiny
from tests.unit.trainers import preferring

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo, adapter": ("dpo", {}),
    "dpo, adapter that goes on training": ("dpo", {"model": tiny.continued, "own": {"peft_config": None}}),
    "dpo, all weights": ("dpo", {"own": {"peft_config": None}}),
    "dpo, reference computed beforehand": ("dpo", {"precompute_ref_log_probs": True, "gradient_checkpointing": True}),
    "grpo, adapter, replies used twice": ("grpo", {"num_iterations": 2}),
    "grpo, all weights": ("grpo", {"own": {"peft_config": None}, "beta": 0.0}),
}


@pytest.mark.parametrize("way", WAYS)
def test_inactive_filter_is_bit_identical_to_trl(tmp_path, way):
    method, options = WAYS[way]
    options = dict(options)
    start = options.pop("model", None)
    expected = preferring.trained(preferring.trl(method, tmp_path, start and start(), **options))
    trainer = preferring.safe(method, tmp_path, start and start(), **options)
    found = preferring.trained(trainer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), f"{name} differs by {(value - found[name]).abs().max()}"
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["event"] for row in rows] == ["inactive"] * 4
    assert rows[-1]["g"] > float(preferring.SLACK.value(torch.zeros(1)))  # the safety pass saw the model move


def test_an_active_filter_does_change_the_weights(tmp_path):
    """The comparison above can fail."""
    expected = preferring.trained(preferring.trl("dpo", tmp_path))
    trainer = preferring.safe("dpo", tmp_path, constraint=preferring.TIGHT)
    found = preferring.trained(trainer)
    assert "active" in {row["event"] for row in read(trainer.run_dir / "events.jsonl")}
    assert any(not torch.equal(value, found[name]) for name, value in expected.items())
