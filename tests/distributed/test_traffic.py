"""The messages of a step are those that `benchmarks.scale` plans, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import scale

from tests import tiny
from tests.distributed import traffic_cases

SMALL = 1024  # bytes a step: losses, flags, inner products
CASES = [("ddp", "lora fused"), ("ddp", "full"), ("fsdp2", "lora"), ("fsdp2", "full")]


def planned(engine: Any, name: str) -> scale.Plan:
    """The plan of a case, in float32 as the tests are."""
    case, config = traffic_cases.CASES[name], tiny.model().config
    full = case.get("full", False)
    shape = scale.Shape(
        "tiny", config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, config.vocab_size,
    )  # fmt: skip
    return scale.Plan(
        shape, 2, engine, rank=0 if full else traffic_cases.RANK, adapted=("q", "v"), stored=4.0, plain=4.0, sent=4.0,
        safety_sets=1, micro_batches=case.get("accumulation", 1), safety_micro_batches=2,
    )  # fmt: skip


def compare(plan: scale.Plan, messages: traffic_cases.Messages) -> None:
    """What one rank sent in a step with what is planned."""
    expected, sent = scale.messages(plan), {key: sum(sizes) for key, sizes in messages.items()}
    gathered = sent.pop("_allgather_base_", 0) + sent.pop("all_gather_into_tensor", 0)
    for waiting in ("wait_tensor", "_wrap_tensor_autograd"):
        sent.pop(waiting, None)
    assert gathered == expected.all_gather
    assert sent.pop("_reduce_scatter_base_", 0) == expected.reduce_scatter
    assert 0 <= sent.pop("allreduce_") - expected.all_reduce < SMALL
    assert sum(sent.values()) < SMALL, sent
    assert sum(expected) > 5 * SMALL


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_messages_are_as_planned(engine, name, request):
    for rank in request.getfixturevalue(engine):
        compare(planned(engine, name), rank["traffic"][name]["messages"])


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_weights_are_as_planned(engine, name, request):
    """Of the first rank, which has the larger part of rows that cannot be shared equally."""
    plan = planned(engine, name)
    parts = plan.ranks if plan.cut else 1
    own = 4 * scale.trained(plan, parts) / parts
    assert request.getfixturevalue(engine)[0]["traffic"][name]["weights"] == scale.memory(plan).weights + own
