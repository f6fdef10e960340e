"""The noise floor from the audit's own losses and one more pass; windows handed over before the last is waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests import tiny
from tests.unit.auditing.making import encodings, write_adapter, write_rows

from holdfast.auditing import windows as windowing
from holdfast.auditing.audit import audit
from holdfast.auditing.batches import batches
from holdfast.auditing.measure import SAMPLE, Measurer, floor_between, measure_pair, second_pass
from holdfast.auditing.pair import open_pair
from holdfast.auditing.results import PartialResults
from holdfast.constraint.chance import ChanceConstraint


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tiny.saved(tmp_path_factory.mktemp("base"))
    return base, write_adapter(tmp_path_factory.mktemp("adapter"), base)


@pytest.mark.parametrize("unit", ["nll_sum", "nll_token", "nll_first"])
def test_the_floor_is_the_distance_to_the_first_losses(models, unit):
    rows = encodings(30)
    with open_pair(*models, device="cpu") as pair:
        measured = measure_pair(pair, rows, first_k=2)
        again = second_pass(Measurer(pair, first_k=2, batch_tokens=600), rows).finish()
    first = {row.id: (measured.nll_before[i], measured.first_before[i]) for i, row in enumerate(rows)}
    assert len(first) == len(again.encoded) == 30
    assert floor_between(first, again, unit) < 1e-5
    moved = {name: (total + 0.5, early - 0.25) for name, (total, early) in first.items()}
    tokens = min(row.n_labels for row in rows)
    expected = {"nll_sum": 0.5, "nll_token": 0.5 / tokens, "nll_first": 0.125}
    assert floor_between(moved, again, unit) == pytest.approx(expected[unit], abs=1e-5)


def test_its_batches_are_smaller_than_the_audits_own(models):
    """Batches of one size take the same kernels, and no rounding would show; the audit's are nearest in size where its
    examples, all of one length, are a little more than one batch."""
    rows = [replace(row, input_ids=row.input_ids[-10:], labels=row.labels[-10:]) for row in encodings(SAMPLE)]
    budget = 10 * SAMPLE - 1
    own = batches([10] * SAMPLE, budget)
    assert len(own) == 2
    with open_pair(*models, device="cpu") as pair:
        plan = second_pass(Measurer(pair, first_k=2, batch_tokens=budget), rows).todo
    assert max(map(len, plan)) < 0.8 * min(map(len, own))


def test_the_sample_is_the_smallest_ids_and_one_nan_does_not_hide_the_rest(models):
    rows = encodings(SAMPLE + 20)
    with open_pair(*models, device="cpu") as pair:
        again = second_pass(Measurer(pair, first_k=2), rows).finish()
    ids = [row.id for row in again.encoded]
    assert ids == sorted(row.id for row in rows)[:SAMPLE]
    columns = again.columns()
    losses = zip(columns["nll_before"], columns["first_before"], strict=True)
    same = dict(zip(ids, losses, strict=True))
    assert floor_between(same, again, "nll_sum") == 0.0
    assert floor_between({**same, ids[0]: (float("nan"), 0.0)}, again, "nll_sum") == 0.0


@pytest.mark.parametrize("unit", ["nll_sum", "kl_token", "kl_first"])
def test_a_floor_that_was_lost_is_measured_again_without_the_windows(models, tmp_path, monkeypatch, unit):
    data, limit = write_rows(tmp_path / "a.jsonl", 20), ChanceConstraint(unit=unit)
    monkeypatch.setattr(windowing, "WINDOW", 8)
    expected = audit(*models, data, limit, device="cpu", dtype="bfloat16").noise_floor  # type: ignore[call-arg]

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartialResults, "write_noise", die)
        with pytest.raises(KeyboardInterrupt):
            audit(*models, data, limit, device="cpu", dtype="bfloat16", output=tmp_path / "out")  # type: ignore[call-arg, misc]
    monkeypatch.setattr(Measurer, "launch", lambda *_: pytest.fail("measured again"))
    found = audit(*models, data, limit, device="cpu", dtype="bfloat16", output=tmp_path / "out")  # type: ignore[call-arg, misc]
    assert found.noise_floor == expected


def test_a_window_is_waited_for_when_the_next_one_runs(models, tmp_path, monkeypatch):
    monkeypatch.setattr(windowing, "WINDOW", 8)
    events = []
    launch, write, encode = Measurer.launch, PartialResults.write, windowing.Windows.encode

    def launching(self, name, encoded, count, gap):
        events.append("launch")
        return launch(self, name, encoded, count, gap)

    def writing(self, name, number, *rest):
        events.append(f"store {number}")
        write(self, name, number, *rest)

    def encoding(self, examples, name):
        events.append(f"encode {len(examples)}")
        return encode(self, examples, name)

    monkeypatch.setattr(Measurer, "launch", launching)
    monkeypatch.setattr(PartialResults, "write", writing)
    monkeypatch.setattr(windowing.Windows, "encode", encoding)
    limit = ChanceConstraint(unit="nll_token")
    audit(*models, write_rows(tmp_path / "a.jsonl", 20), limit, device="cpu", batch_tokens=10_000)  # type: ignore[call-arg]
    # One example for the check; the next window in two halves, between the forwards; the sample in the first gap.
    assert events == [
        "encode 1", "encode 8", "launch", "encode 3", "encode 20", "encode 3",
        "launch", "encode 3", "encode 3", "store 0", "launch", "store 1", "store 2",
    ]  # fmt: skip
