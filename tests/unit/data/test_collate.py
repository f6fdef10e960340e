"""Padding."""

import torch

from holdfast.data.encode import Encoded, collate

LONG = Encoded("a", (5, 6, 7, 2), (-100, -100, 7, 2), truncated=False)
SHORT = Encoded("b", (8, 2), (-100, 2), truncated=False)


def test_pads_on_the_right():
    batch = collate([LONG, SHORT], pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2], [8, 2, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 2], [-100, 2, -100, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_real_eos_keeps_its_label_when_it_is_also_the_pad_token():
    batch = collate([LONG, SHORT], pad_token_id=2)
    assert batch["labels"].tolist() == [[-100, -100, 7, 2], [-100, 2, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_width_is_rounded_up():
    assert collate([LONG], 0, pad_to_multiple_of=8)["labels"].shape == (1, 8)
    assert collate([LONG], 0, pad_to_multiple_of=4)["labels"].shape == (1, 4)
