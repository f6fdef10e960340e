"""Batches by a budget of padded tokens, and what may not depend on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import tiny
from tests.unit.auditing.making import encodings, write_adapter

from holdfast.auditing.batches import _SHARE, CPU_TOKENS, batches, padding_is_inert, shuffled_batches, token_budget
from holdfast.auditing.measure import Measurer, measure_pair, noise_floor
from holdfast.auditing.pair import open_pair
from holdfast.models.handle import cpu_has_bfloat16
from holdfast.scoring.completion import Batch, losses_of
from holdfast.scoring.head import TOKEN_CHUNK, float32_linear

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=50)


@given(LENGTHS, st.integers(1, 120), st.booleans())
def test_every_example_once_and_no_batch_over_budget(lengths, budget, shuffled):
    found = shuffled_batches(lengths, budget, 0) if shuffled else batches(lengths, budget)
    assert sorted(i for positions in found for i in positions) == list(range(len(lengths)))
    for positions in found:
        widest = max(lengths[i] for i in positions)
        assert len(positions) == 1 or len(positions) * widest <= budget


def test_sorted_batches_begin_with_the_longest():
    assert batches([3, 9, 5, 9], 18) == [[1, 3], [2, 0]]
    assert shuffled_batches(list(range(1, 30)), 60, 0) != batches(list(range(1, 30)), 60)


@given(LENGTHS, st.integers(1, 120))
def test_even_batches_are_as_few_and_their_largest_is_no_larger(lengths, budget):
    even, filled = batches(lengths, budget), batches(lengths, budget, even=False)
    largest = [max(len(b) * lengths[b[0]] for b in found) for found in (even, filled)]
    assert len(even) == len(filled)
    assert largest[0] <= largest[1]


def test_a_few_rows_that_are_left_over_do_not_make_a_batch_of_their_own():
    assert [len(b) for b in batches([10] * 12, 100, even=False)] == [10, 2]
    assert [len(b) for b in batches([10] * 12, 100)] == [6, 6]
    assert [len(b) for b in batches([10] * 10, 100)] == [10]
    assert batches([30, 5, 5], 8) == [[0], [1], [2]]


def test_a_cpu_has_a_fixed_budget():
    assert token_budget(tiny.model(), torch.device("cpu")) == CPU_TOKENS


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tiny.saved(tmp_path_factory.mktemp("base"))
    return base, write_adapter(tmp_path_factory.mktemp("adapter"), base)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_neither_order_nor_batch_nor_chunk_changes_a_loss(models, chunk, monkeypatch):
    rows = encodings(12)
    with open_pair(*models, device="cpu") as pair:
        expected = measure_pair(pair, rows, first_k=3, batch_tokens=1)
        monkeypatch.setattr("holdfast.auditing.batches.TOKEN_CHUNK", chunk)
        found = measure_pair(pair, rows[::-1], first_k=3, batch_tokens=10_000)
    for name in ("nll_before", "nll_after", "first_before", "first_after", "kl"):
        assert getattr(found, name)[::-1] == pytest.approx(getattr(expected, name), abs=5e-6), name


def floors(pair, rows):
    measurer = Measurer(pair, first_k=8, batch_tokens=600)
    return {unit: noise_floor(measurer, rows, unit) for unit in ("nll_sum", "kl_token")}


def test_the_noise_floor_is_small_and_not_always_zero(models):
    rows = encodings(40)
    with open_pair(*models, device="cpu", dtype="bfloat16") as pair:
        half = floors(pair, rows)
    with open_pair(*models, device="cpu") as pair:
        full = floors(pair, rows)
    assert 0 <= full["nll_sum"] < 1e-4
    assert 0 <= half["nll_sum"] < 1.0
    # Without bfloat16 instructions every row is multiplied alike whatever batch it is in, so that nothing moves.
    assert full["nll_sum"] < half["nll_sum"] or not cpu_has_bfloat16()
    assert abs(full["kl_token"]) < 1e-6


def test_the_head_multiplies_in_float32_without_a_gpu():
    """On a CPU, bfloat16 states and weights are converted, so products and sums are float32's."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 16).bfloat16(), torch.randn(9, 16).bfloat16()
    with torch.no_grad():
        found = float32_linear(hidden, weight, None)
    assert found.dtype == torch.float32
    exact = hidden.double() @ weight.double().T
    assert np.abs(found.double() - exact).max() < 1e-5
    bias = torch.randn(9).bfloat16()
    assert np.abs(float32_linear(hidden, weight, bias).double() - exact - bias.double()).max() < 1e-5


def test_padding_without_a_mask_is_noticed_by_what_it_does():
    """A causal model does without a mask; one that looks ahead does not."""
    example = encodings(1)[0]
    model = tiny.model().eval()
    assert padding_is_inert(model, example, pad_token_id=0, device=torch.device("cpu"))
    for layer in model.model.layers:  # every position sees the mean of all
        layer.register_forward_hook(lambda _m, _a, out: out + out.mean(1, keepdim=True))
    assert not padding_is_inert(model, example, pad_token_id=0, device=torch.device("cpu"))


def test_losses_are_the_same_with_and_without_a_mask():
    rows, model = encodings(5), tiny.model().eval()
    shared = {"pad_token_id": 0, "first_k": 2, "device": torch.device("cpu")}
    assert len({len(row.input_ids) for row in rows}) > 1
    with torch.no_grad():
        with_mask = losses_of(model, Batch.of(rows, **shared))
        without = losses_of(model, Batch.of(rows, **shared, masked=False))
    torch.testing.assert_close(without, with_mask, rtol=1e-6, atol=1e-6)


def test_no_examples_are_no_batches():
    assert batches([], 100) == batches([], 100, even=False) == []


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize(("share", "free"), [(1.0, 60), (0.5, 40), (0.3, 20)])
def test_the_budget_on_a_gpu_is_of_what_this_process_may_take(
    share: float, free: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 GiB, of which others took 30; 20 are reserved here, 10 of them in use. The share is torch's own function."""
    gib = 2**30
    found = {
        "mem_get_info": (50 * gib, 100 * gib), "memory_reserved": 20 * gib, "memory_allocated": 10 * gib,
        "current_device": 0,
    }  # fmt: skip
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda index: share, raising=False)
    monkeypatch.setattr("holdfast.auditing.batches.MOST_TOKENS", 10**12)
    config = tiny.model().config
    per_token = 4 * (16 * config.hidden_size + 4 * config.intermediate_size)
    head = 6 * 4 * TOKEN_CHUNK * config.vocab_size
    asked = token_budget(tiny.model(), torch.device(device))
    assert asked == int((_SHARE * free * gib - head) / per_token)
