"""The parts of continuous batching: grouped attention, and a cache whose rows have lengths of their own."""

from __future__ import annotations

import math
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from holdfast.judging.engines.continuous.loop import NAME, SlotCache, grouped, grouped_attention


@pytest.mark.parametrize("keys", [1, 2, 6], ids=["one key head", "two key heads", "no sharing"])
def test_grouped_attention_is_softmax_attention_with_repeated_keys(keys):
    """Against the textbook formula in float64, head by head."""
    draw = torch.Generator().manual_seed(0)
    rows, heads, width, size = 3, 6, 7, 4
    query = torch.randn(rows, heads, 1, size, generator=draw, dtype=torch.float64)
    key = torch.randn(rows, keys, width, size, generator=draw, dtype=torch.float64)
    value = torch.randn(rows, keys, width, 5, generator=draw, dtype=torch.float64)
    mask = torch.zeros(rows, 1, 1, width, dtype=torch.float64)
    mask[1, :, :, 4:] = torch.finfo(torch.float64).min
    found, _ = grouped_attention(SimpleNamespace(), query, key, value, mask, scaling=0.3)
    assert found.shape == (rows, 1, heads, 5)
    for row in range(rows):
        for head in range(heads):
            k, v = (tensor[row, head * keys // heads] for tensor in (key, value))
            weights = [math.exp(0.3 * float(query[row, head, 0] @ k[j])) for j in range(4 if row == 1 else width)]
            expected = sum(w * v[j] for j, w in enumerate(weights)) / sum(weights)
            torch.testing.assert_close(found[row, 0, head], expected)


def test_grouped_attention_is_in_place_for_a_while_only():
    config = SimpleNamespace(_attn_implementation="sdpa")
    with suppress(KeyError), grouped(config):
        assert config._attn_implementation == NAME
        raise KeyError
    assert config._attn_implementation == "sdpa"
    config._attn_implementation = "eager"
    with grouped(config):
        assert config._attn_implementation == "eager"


def prefilled(lengths: list[int], *, fill: float) -> tuple[DynamicCache, torch.Tensor]:
    """A left-padded cache in which the key at position p of row r is `fill + 10 r + p`, and padding is NaN."""
    width = max(lengths)
    keys = torch.full((len(lengths), 1, width, 1), float("nan"))
    for row, length in enumerate(lengths):
        keys[row, 0, width - length :, 0] = fill + 10 * row + torch.arange(length)
    made = DynamicCache()
    made.update(keys, -keys, 0)
    return made, torch.tensor([width - length for length in lengths])


def filled(rows: list[int], lengths: list[int], cache: SlotCache, *, fill: float = 100.0) -> None:
    made, padding = prefilled(lengths, fill=fill)
    cache.fill(torch.tensor(rows), made, padding)


def test_a_filled_row_starts_at_place_zero_without_padding():
    cache = SlotCache(3, 8, torch.zeros(3, 1, dtype=torch.long))
    filled([2, 0], [4, 2], cache)
    assert cache.keys[0][2, 0, :4, 0].tolist() == [100, 101, 102, 103]
    assert cache.keys[0][0, 0, :2, 0].tolist() == [110, 111]
    assert cache.values[0][2, 0, :4, 0].tolist() == [-100, -101, -102, -103]
    assert not cache.keys[0].isnan().any()
    assert not cache.keys[0][1].any()


def test_each_row_is_written_at_its_own_position_and_read_up_to_the_width():
    positions = torch.tensor([[1], [5]])
    cache = SlotCache(2, 8, positions)
    filled([0, 1], [1, 5], cache)
    cache.width = 6
    new = torch.tensor([7.0, 9.0]).view(2, 1, 1, 1)
    keys, values = cache.update(new, -new, 0)
    assert keys.shape == (2, 1, 6, 1)
    assert [float(x) for x in (keys[0, 0, 1, 0], keys[1, 0, 5, 0], values[1, 0, 5, 0])] == [7, 9, -9]
    assert keys[1, 0, :5, 0].tolist() == [110, 111, 112, 113, 114]
    positions.add_(1)
    cache.update(new + 1, -new, 0)
    assert [float(x) for x in (cache.keys[0][0, 0, 2, 0], cache.keys[0][1, 0, 6, 0])] == [8, 10]


def test_nothing_of_an_earlier_occupant_stays():
    """A NaN behind the mask would still reach the sum: 0 * NaN."""
    cache = SlotCache(1, 6, torch.zeros(1, 1, dtype=torch.long))
    filled([0], [5], cache)
    cache.keys[0].fill_(float("nan"))
    filled([0], [2], cache, fill=0.0)
    assert cache.keys[0][0, 0, :, 0].tolist() == [0, 1, 0, 0, 0, 0]
