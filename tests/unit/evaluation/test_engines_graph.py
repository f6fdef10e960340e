"""Recorded decode steps: a recording gives the tokens of the step itself, and is dropped where it does not.

CUDA graphs need CUDA. Here a step is recorded as torch's own trace of its tensor operations, which like a CUDA graph
keeps the tensors' addresses, freezes every value of the host, and cannot contain a look at a tensor's value.
"""

from __future__ import annotations

import logging

import pytest
import torch
from peft import get_peft_model
from tests import tiny
from tests.greedy import examples, stopping
from torch.fx.experimental.proxy_tensor import make_fx

from holdfast.judging.engines.continuous import loop as slot_loop
from holdfast.judging.engines.continuous.graph import WARM_UPS, GraphedStep
from holdfast.judging.engines.continuous.loop import EVERY_STEP, Pace, SlotLoop
from holdfast.judging.prompts import prompt_ids

NEW = 14
PACE = Pace(steps=4, share=0.25)


class Trace:
    """The tensor operations of one call, run again on the same tensors."""

    def __init__(self, graph, scores):
        self.graph, self.scores = graph, scores

    def replay(self):
        self.scores.copy_(self.graph())


class Tracer:
    """A recorder without CUDA."""

    def __init__(self, state, *, spoilt=None, broken=None):
        self.state, self.spoilt, self.broken = state, spoilt, broken
        self.recordings = self.rehearsals = 0

    def aside(self, function):
        self.rehearsals += 1
        return function()

    def __call__(self, function):
        self.recordings += 1
        if self.broken is not None:
            raise self.broken
        before = [tensor.clone() for tensor in self.state]
        graph = make_fx(function)()
        scores = graph()
        for tensor, value in zip(self.state, before, strict=True):  # a recording has no effect
            tensor.copy_(value)
        if self.spoilt is not None:
            whole = graph
            return Trace(lambda: whole() + self.spoilt, scores), scores
        return Trace(graph, scores), scores


def decode(model, *, rows: int = 3, pace: Pace = EVERY_STEP, tracer=None):
    tokenizer = tiny.tokenizer()
    prompts = prompt_ids(tokenizer, examples(), "chat")
    made = []

    def prepared(step, state):
        made.append(Tracer(state, **tracer))
        return GraphedStep(step, state, record=made[0])

    loop = SlotLoop(
        model.eval(), prompts, rows=rows, max_new_tokens=NEW, ends=[1], pad=0, pace=pace,
        prepared=None if tracer is None else prepared,
    )  # fmt: skip
    found: dict[int, list[int]] = {}
    for batch in loop.decode(range(len(prompts))):
        assert not found.keys() & batch.keys()
        found |= batch
    cut = {i: row[: row.index(1) + 1] if 1 in row else row for i, row in found.items()}
    return cut, (made[0] if made else None)


@pytest.fixture(scope="module")
def expected():
    return decode(stopping(tiny.model(seed=1)))[0]


@pytest.mark.parametrize("rows", [2, 5])
def test_recorded_steps_give_the_same_tokens(expected, rows, monkeypatch, caplog):
    monkeypatch.setattr(slot_loop, "BUCKET", 8)
    found, tracer = decode(stopping(tiny.model(seed=1)), rows=rows, pace=PACE, tracer={})
    assert found == expected
    assert tracer.recordings > 1, "one recording per width"
    assert tracer.rehearsals == WARM_UPS * tracer.recordings
    assert not caplog.records


def test_a_width_is_recorded_once(expected):
    found, tracer = decode(stopping(tiny.model(seed=1)), pace=PACE, tracer={})
    assert found == expected
    assert tracer.recordings == 1


def test_an_attached_adapter_is_part_of_the_recording(expected):
    adapted = get_peft_model(stopping(tiny.model(seed=1)), tiny.lora())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    plain, _ = decode(adapted)
    recorded, _ = decode(adapted, pace=PACE, tracer={})
    assert recorded == plain != expected


def test_a_step_that_cannot_be_recorded_runs_as_it_is_and_says_so(expected, caplog):
    with caplog.at_level(logging.WARNING):
        found, tracer = decode(
            stopping(tiny.model(seed=1)), pace=PACE, tracer={"broken": RuntimeError("operation not permitted\ndetail")}
        )
    assert found == expected
    assert tracer.recordings == 1, "it is not tried again"
    assert "the decode step runs without a CUDA graph: operation not permitted" in caplog.text


def test_a_recording_that_gives_other_scores_is_dropped(expected, caplog):
    other = torch.zeros(64)
    other[20] = 1000.0
    with caplog.at_level(logging.WARNING):
        found, tracer = decode(stopping(tiny.model(seed=1)), pace=PACE, tracer={"spoilt": other})
    assert found == expected
    assert tracer.recordings == 1
    assert "its recording gives other scores" in caplog.text


def test_no_memory_for_a_recording_is_no_reason_to_go_on_without():
    with pytest.raises(torch.OutOfMemoryError):
        decode(stopping(tiny.model(seed=1)), tracer={"broken": torch.OutOfMemoryError("CUDA out of memory.")})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_graphs_give_the_same_tokens(expected):
    model = stopping(tiny.model(seed=1)).to("cuda").eval()
    prompts = prompt_ids(tiny.tokenizer(), examples(), "chat")
    made = []

    def prepared(step, state):
        made.append(GraphedStep(step, state))
        return made[0]

    loop = SlotLoop(model, prompts, rows=3, max_new_tokens=NEW, ends=[1], pad=0, pace=PACE, prepared=prepared)
    found = {i: row for batch in loop.decode(range(len(prompts))) for i, row in batch.items()}
    assert {i: row[: row.index(1) + 1] if 1 in row else row for i, row in found.items()} == expected
    assert made[0].recording
