"""The slot loop decodes every prompt once and as if alone, for any rows, pace, widths, lengths and end tokens."""

from __future__ import annotations

from functools import cache
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import tiny

from holdfast.judging.engines.continuous import loop as slot_loop
from holdfast.judging.engines.continuous.loop import Pace, SlotLoop

MOST = 7


@cache
def model():
    return tiny.model(seed=4, layers=1).eval()


@cache
def alone(prompt: tuple[int, ...]) -> list[int]:
    """`MOST` greedy tokens after a prompt, by full forward passes."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(MOST):
            ids.append(int(model()(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


token = st.integers(3, 6)
prompts = st.lists(st.lists(token, min_size=1, max_size=5).map(tuple), min_size=1, max_size=8)
paces = st.builds(Pace, steps=st.integers(1, 5), share=st.sampled_from([0.0, 0.5, 1.0]))
end_tokens = st.sets(st.integers(0, 63), max_size=40)


@settings(max_examples=40, deadline=None)
@given(prompts, st.integers(1, 9), st.integers(1, MOST), end_tokens, paces, st.sampled_from([1, 3, 128]), st.booleans())
def test_every_prompt_is_decoded_as_if_alone(asked, rows, new, ends, pace, bucket, fixed):
    with mock.patch.object(slot_loop, "BUCKET", bucket):
        loop = SlotLoop(
            model(), asked, rows=min(rows, len(asked)), max_new_tokens=new, ends=sorted(ends), pad=0, pace=pace,
            prepared=(lambda step, _: step) if fixed else None,
        )  # fmt: skip
        batches = list(loop.decode(range(len(asked))))
    assert sum(len(batch) for batch in batches) == len(asked)
    found = {i: row for batch in batches for i, row in batch.items()}
    for i, prompt in enumerate(asked):
        expected = alone(prompt)[:new]
        end = next((place for place, made in enumerate(expected) if made in ends), None)
        assert found[i][: len(expected) if end is None else end + 1] == (
            expected if end is None else expected[: end + 1]
        )
        assert end is not None or len(found[i]) == new
