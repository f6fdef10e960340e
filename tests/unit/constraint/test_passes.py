"""Passes over whole sets: literal losses whatever the batches, masks where there is padding, one copy at the end."""

from __future__ import annotations

import pytest
import torch
from tests.unit.constraint.literal import ROWS, adapted, encoded, forward, literal_nll

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.units import KL_UNITS, UNITS
from holdfast.data.encode import collate
from holdfast.scoring import completion as scoring
from holdfast.scoring import forward as passes
from holdfast.scoring.completion import Batch, completion_kl, completion_losses
from holdfast.scoring.transfer import OnHost, to_device

CPU = torch.device("cpu")
MANY = encoded([(2 + i % 5, 1 + i % 9) for i in range(23)], seed=4)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_losses_are_the_literal_ones_in_every_batch_size(batch_size):
    model = adapted(trained=0.2).eval()
    found = forward(model, batch_size).losses(MANY, 3)
    for i, row in enumerate(MANY):
        nll = literal_nll(model, row)
        assert float(found.total[i]) == pytest.approx(sum(nll), abs=1e-5)
        assert float(found.first[i]) == pytest.approx(sum(nll[:3]), abs=1e-5)
        assert (int(found.tokens[i]), int(found.first_tokens[i])) == (len(nll), min(3, len(nll)))
    assert {t.dtype for t in (found.total, found.tokens, found.first, found.first_tokens)} == {torch.float64}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shuffle", [None, 3])
def test_degradations_are_those_of_a_training_pass(unit, shuffle):
    model = adapted(trained=0.2).eval()
    constraint, reference = ChanceConstraint(unit=unit, first_k=2), torch.linspace(0, 1, len(ROWS)).double()
    with torch.no_grad():
        losses = completion_losses(model, collate(ROWS, 0), 2)
        kl = completion_kl(model, collate(ROWS, 0), 2)
    own = {"nll_sum": losses.total, "nll_token": losses.per_token(), "nll_first": losses.per_first_token()}
    own |= {"kl_token": kl.per_token(), "kl_first": kl.per_first_token()}
    expected = own[unit] if unit in KL_UNITS else own[unit] - reference
    found = forward(model, 2).degradations(ROWS, reference, constraint, shuffle=shuffle)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_mask_is_given_exactly_where_there_is_padding():
    batching = {"pad_token_id": 0, "first_k": 2, "device": CPU}
    assert set(Batch.of(ROWS[:2], **batching).inputs) == {"input_ids", "attention_mask"}
    assert set(Batch.of(ROWS[:1], **batching).inputs) == {"input_ids"}
    assert set(Batch.of(ROWS[:2], **batching, masked=False).inputs) == {"input_ids"}


def test_padding_in_a_batch_is_masked_from_a_model_that_would_see_it(monkeypatch):
    masks = []
    inner = scoring.hidden_states

    def spy(model, inputs):
        masks.append(inputs.get("attention_mask"))
        return inner(model, inputs)

    monkeypatch.setattr(scoring, "hidden_states", spy)
    rows = encoded([(2, 3), (4, 1), (2, 3), (3, 5)])
    forward(adapted().eval(), 3).losses(rows, 8)
    assert masks[0] is None
    assert masks[1] is None  # the last row is alone
    forward(adapted().eval(), 4).losses(rows, 8)
    assert masks[2].sum(1).tolist() == [5, 5, 5, 8]


def test_results_are_copied_once_at_the_end(monkeypatch):
    """No batch waits for the device: every batch is handed over before the first result is asked for."""
    events = []
    inner, original = passes.losses_of, torch.Tensor.cpu  # type: ignore[attr-defined]
    monkeypatch.setattr(passes, "losses_of", lambda *a: (events.append("batch"), inner(*a))[1])
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (events.append("copy"), original(self))[1])
    forward(adapted().eval(), 4).losses(MANY, 8)
    assert events == ["batch"] * 6 + ["copy"]


def test_batches_cover_all_and_shuffling_changes_them():
    made = forward(adapted(), 4)
    assert sorted(i for positions in made.batches(MANY) for i in positions) == list(range(len(MANY)))
    assert made.batches(MANY, shuffle=1) == made.batches(MANY, shuffle=1) != made.batches(MANY, shuffle=2)
    lengths = [len(MANY[i].input_ids) for positions in made.batches(MANY) for i in positions]
    assert lengths == sorted(lengths)


def test_transfers_keep_values():
    values = torch.arange(6.0).view(2, 3)
    assert torch.equal(OnHost(to_device(values, CPU)).get(), values)
