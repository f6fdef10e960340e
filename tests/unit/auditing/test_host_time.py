"""What keeps the host from holding up the device: work in its gaps, one check instead of two, a heap set aside."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from tests import tiny
from tests.unit.auditing.making import encodings, write_rows

from holdfast.auditing import measure as measuring
from holdfast.auditing import windows as windowing
from holdfast.auditing.audit import audit
from holdfast.auditing.batches import batches, needs_mask
from holdfast.auditing.measure import Measurer, second_pass
from holdfast.auditing.pair import open_pair
from holdfast.auditing.results import PartialResults
from holdfast.auditing.windows import WindowPrefetcher, gc_frozen
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import UnsupportedError
from holdfast.data.stream import open_stream

CPU = torch.device("cpu")


@pytest.fixture
def thawed():
    """No object set aside, as in a fresh process; the tests' own froze what they had imported."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_the_heap_is_set_aside_and_comes_back_whatever_happens():
    def fail():
        assert gc.get_freeze_count() > 0
        raise KeyError

    with pytest.raises(KeyError), gc_frozen():
        fail()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_a_heap_that_its_owner_froze_stays_frozen():
    gc.freeze()
    with gc_frozen():
        pass
    assert gc.get_freeze_count() > 0


def test_a_second_pass_in_steps_is_the_one_at_once(base, adapter):
    rows = encodings(30)
    with open_pair(base, adapter, device="cpu") as pair:
        expected = second_pass(Measurer(pair, first_k=2, batch_tokens=600), rows).finish()
        found = second_pass(Measurer(pair, first_k=2, batch_tokens=600), rows)
        steps = 0
        while found.step():
            steps += 1
        found.finish()
    assert steps > 1
    assert [row.id for row in found.encoded] == sorted(row.id for row in rows)
    assert found.order == expected.order
    for name, column in expected.columns().items():
        assert np.array_equal(found.columns()[name], column)


def test_out_of_memory_ends_the_second_pass_in_smaller_batches(base, adapter, monkeypatch):
    rows, sizes, losses_of = encodings(30), [], measuring.losses_of  # type: ignore[attr-defined]

    def failing(model, batch):
        sizes.append(len(batch.inputs["input_ids"]))
        if len(sizes) == 2:
            raise torch.OutOfMemoryError
        return losses_of(model, batch)

    with open_pair(base, adapter, device="cpu") as pair:
        expected = second_pass(Measurer(pair, first_k=2, batch_tokens=600), rows).finish()
        monkeypatch.setattr(measuring, "losses_of", failing)
        found = second_pass(Measurer(pair, first_k=2, batch_tokens=600), rows).finish()
    assert max(sizes[2:]) < max(sizes[:2])
    assert sizes[0] + sum(sizes[2:]) == len(rows)
    for name, column in expected.columns().items():
        np.testing.assert_allclose(found.columns()[name], column, rtol=1e-5, atol=1e-5)


def test_windows_grow_until_they_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(windowing, "FIRST", 4)
    ahead = WindowPrefetcher(
        {"audit": open_stream(write_rows(tmp_path / "a.jsonl", 46))},
        16,
        lambda examples: examples,  # type: ignore[return-value]
    )
    found = [(window.size, ahead.growing) for window in ahead]
    assert found == [(4, True), (8, True), (16, False), (9, False), (9, False)]


def test_the_second_pass_runs_in_the_gaps_of_windows_that_leave_time(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(windowing, "FIRST", 4)
    monkeypatch.setattr(windowing, "WINDOW", 16)
    events: list[str] = []
    launch, step = Measurer.launch, measuring.Launch.step

    def launching(self, name, encoded, count, gap):
        events.append("launch")
        collect = launch(self, name, encoded, count, gap)
        events.append("launched")
        return collect

    def stepping(self, *gap):
        more = step(self, *gap)
        events.extend(["step"] if more and self.plan is not batches else [])
        return more

    monkeypatch.setattr(Measurer, "launch", launching)
    monkeypatch.setattr(measuring.Launch, "step", stepping)
    limit = ChanceConstraint(unit="nll_token")
    audit(base, adapter, write_rows(tmp_path / "a.jsonl", 30), limit, device="cpu", batch_tokens=600)
    assert events[:7] == ["launch", "launched", "launch", "launched", "launch", "step", "step"]
    assert events.count("step") > 2


def test_the_second_pass_is_encoded_when_windows_leave_time(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(windowing, "FIRST", 4)
    monkeypatch.setattr(windowing, "WINDOW", 16)
    sizes, encode = [], windowing.Windows.encode

    def encoding(self, examples, name):
        sizes.append(len(examples))
        return encode(self, examples, name)

    monkeypatch.setattr(windowing.Windows, "encode", encoding)
    found = audit(base, adapter, write_rows(tmp_path / "a.jsonl", 28), device="cpu", batch_tokens=10_000)
    assert sizes == [1, 4, 4, 4, 8, 8, 28]  # the check's, windows of 4, 8 and 16, and only then the sample
    assert found.noise_floor < 1e-5


def test_an_audit_reads_no_part_back_for_its_noise_floor(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(windowing, "WINDOW", 8)
    read, seen = PartialResults.read, []
    write_noise = PartialResults.write_noise

    def reading_back(self, name, number):
        seen.append(number)
        return read(self, name, number)

    def writing(self, value):
        seen.append("noise")
        write_noise(self, value)

    monkeypatch.setattr(PartialResults, "read", reading_back)
    monkeypatch.setattr(PartialResults, "write_noise", writing)
    audit(base, adapter, write_rows(tmp_path / "a.jsonl", 20), device="cpu")
    assert seen[0] == "noise"


@pytest.fixture
def counted():
    model, calls = tiny.model().eval(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    return model, calls


def test_a_plain_model_is_checked_by_two_forwards(counted):
    model, calls = counted
    assert not needs_mask(model, encodings(1)[0], 0, CPU)
    assert len(calls) == 2


def test_a_model_that_sees_its_padding_needs_a_mask(counted):
    model, calls = counted
    for layer in model.model.layers:  # every position sees the mean of all
        layer.register_forward_hook(lambda _m, _a, out: out + out.mean(1, keepdim=True))
    assert needs_mask(model, encodings(1)[0], 0, CPU)
    assert len(calls) > 2


def test_a_head_that_does_more_is_refused_by_the_check(counted):
    model, _ = counted
    own = model.forward

    def alien(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = output.logits * 1.3
        return output

    model.forward = alien
    with pytest.raises(UnsupportedError, match="differ from its own logits"):
        needs_mask(model, encodings(1)[0], 0, CPU)
