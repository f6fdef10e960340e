"""Ways to a certificate that the evidence does not carry: each is refused, or counted as one more look."""

from __future__ import annotations

import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from tests import tiny
from tests.unit.auditing.certifying import CONSTRAINT, write_safety
from tests.unit.auditing.test_opening import foreign, refused, unmeasured

from holdfast.auditing import measures
from holdfast.auditing.audit import audit
from holdfast.auditing.certificate_spec import CertificateSpec, Setup, claim_of
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, DataError, InfeasibleError, UnsupportedError
from holdfast.data.encode import encode
from holdfast.data.examples import as_chat, make_example
from holdfast.data.sources import read_examples
from holdfast.data.split_record import save_record
from holdfast.data.splits import split_examples, split_from_roles
from holdfast.screening.record import save
from holdfast.screening.screen import Screening
from holdfast.screening.sets import MonitorPrompts


def test_a_sequence_cannot_be_sorted_by_an_audit_of_it(made):
    rows = tiny.rows(40, seed=3)
    write_safety(made.safety, rows)
    audit(made.base, made.adapter, str(made.safety), CONSTRAINT)
    write_safety(made.safety, rows[::-1])
    refused(made, InfeasibleError, "their order may depend on what was seen", kind="sequential")


@pytest.mark.parametrize(
    "way", [{"max_length": 64}, {"template": "none"}, {"tokenizer": "after"}], ids=lambda way: next(iter(way))
)
def test_the_best_way_to_measure_cannot_be_chosen_by_audits(made, way):
    audit(made.base, made.adapter, str(made.safety), CONSTRAINT)
    audit(made.base, made.adapter, str(made.safety), CONSTRAINT, **way)
    for setup in (Setup(), Setup(**way)):
        refused(made, InfeasibleError, "looked at 1 time before", setup=setup)
    assert made.certify(setup=Setup(**way), openings=2).openings["this"] == 2


def test_an_audit_in_the_same_way_is_free(made):
    way = {"max_length": 64, "template": "none", "tokenizer": "after"}
    audit(made.base, made.adapter, str(made.safety), CONSTRAINT, **way)
    refused(made, InfeasibleError, "looked at 1 time before", setup=Setup(**way), kind="finite_pool", pool=30)
    assert made.certify(setup=Setup(**way)).certified


def test_an_audit_that_is_killed_counts(made, monkeypatch):
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.auditing.audit.measure_windows", killed)
        with pytest.raises(KeyboardInterrupt):
            audit(made.base, made.adapter, str(made.safety), replace(CONSTRAINT, tau=0.06))
    refused(made, InfeasibleError, "audits that count: 1")


def test_an_audit_that_is_refused_is_no_look(made, tmp_path):
    with pytest.raises(UnsupportedError, match="not defined across tokenizers"):
        audit(made.base, foreign(tmp_path), str(made.safety), CONSTRAINT, tokenizer="own")
    assert not made.safety.with_name("safety.jsonl.openings.json").exists()


def test_audited_prompts_with_other_completions_are_no_fresh_prompts(made):
    audit(made.base, made.adapter, str(made.safety), replace(CONSTRAINT, tau=0.06))
    rows = [{"prompt": f" {row['prompt']}!", "completion": f"{row['completion']} w1"} for row in tiny.rows(20, seed=3)]
    write_safety(made.safety, rows)
    refused(made, InfeasibleError, "audits that count: 1")


def test_an_audit_of_rows_is_entered_where_a_ledger_is_given(made, tmp_path):
    book, rows, limit = tmp_path / "book.json", tiny.rows(20, seed=3), replace(CONSTRAINT, tau=0.06)
    audit(made.base, made.adapter, rows, limit)
    audit(made.base, made.adapter, str(made.safety), limit, ledger=book)
    assert not made.safety.with_name("safety.jsonl.openings.json").exists()
    refused(made, InfeasibleError, "audits that count: 1", ledger=book)
    audit(made.base, made.adapter, rows, limit, ledger=str(tmp_path / "rows.json"))
    refused(made, InfeasibleError, "audits that count: 1", ledger=tmp_path / "rows.json")


def test_other_categories_are_another_claim(made, tmp_path):
    rows = tiny.rows(40, seed=3)
    write_safety(made.safety, [row | {"category": "ab"[i % 2]} for i, row in enumerate(rows)])
    made.certify(kind="per_category")
    write_safety(made.safety, [row | {"category": "ab"[i // 20]} for i, row in enumerate(rows)])
    refused(made._replace(output=tmp_path / "b"), InfeasibleError, "undeclared", kind="per_category")


def test_edited_completions_are_no_fresh_prompts(made, tmp_path):
    made.certify()
    rows = [{"prompt": f" {row['prompt']}!", "completion": f"{row['completion']} w1"} for row in tiny.rows(20, seed=3)]
    write_safety(made.safety, rows)
    refused(made._replace(output=tmp_path / "b"), InfeasibleError, "undeclared")


def test_a_certificate_that_the_ledger_does_not_know_is_not_believed(made, monkeypatch):
    record = made.certify()
    Path(record.openings["ledger"]).unlink()
    unmeasured(monkeypatch)
    with pytest.raises(CheckpointError, match="expected opening number 1 of 1 for this claim, found none"):
        made.certify()


def test_a_stored_certificate_must_follow_from_its_table(made):
    record = made.certify(constraint=replace(CONSTRAINT, tau=0.002))
    assert not record.certified
    replace(record, certified=True, statement="All is well.").save(made.output)
    with pytest.raises(CheckpointError, match="certified, statement do not follow from its table"):
        made.certify(constraint=replace(CONSTRAINT, tau=0.002))


def test_the_number_declared_meanwhile_by_another_process_decides_the_level(made, monkeypatch):
    """Between check and entry somebody else declares two openings and takes the first."""
    floor = measures.noise_floor  # type: ignore[attr-defined]

    def meanwhile(*args: object, **kwargs: object) -> float:
        monkeypatch.setattr(measures, "noise_floor", floor)
        made._replace(output=made.output / "theirs").certify(openings=2, constraint=replace(CONSTRAINT, tau=0.06))
        return floor(*args, **kwargs)

    monkeypatch.setattr(measures, "noise_floor", meanwhile)
    record = made.certify()
    assert (record.openings["this"], record.openings["declared"], record.level) == (2, 2, 0.025)


def test_prompts_that_steered_the_run_are_refused(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made.adapter, run / "adapter")
    split = split_examples(read_examples(str(made.safety)), seed=0, fractions=(0.5, 0.25, 0.25))
    save_record(split.record, run)
    (run / "config.yaml").write_text("model: base\n", encoding="utf-8")
    error = refused(made._replace(adapter=run / "adapter"), DataError, "15 of 20 prompts steered or watched")
    assert f"holdfast certify {run}" in error.remedy


def test_prompts_that_a_screening_held_or_watched_are_refused_whatever_the_reply(made, tmp_path, caplog):
    """The model's own replies are other completions, and so other ids."""
    run = tmp_path / "run"
    shutil.copytree(made.adapter, run / "adapter")
    given = [make_example(example.prompt, "another reply", "", None) for example in read_examples(str(made.safety))]
    held = split_from_roles(given[:8], given[8:10], given[10:12])
    save_record(held.record, run / "refusals")
    watched = MonitorPrompts(unseen=tuple(given[12:15]))
    save(run / "screening", Screening(20, 20, 0, {}, (), "drop", {"refusals": held}, watched), {})
    (run / "config.yaml").write_text("model: base\n", encoding="utf-8")
    refused(made._replace(adapter=run / "adapter"), DataError, "13 of 20 prompts steered or watched")
    assert "cannot be read" not in caplog.text


def test_two_tokenizers_may_not_cut_the_same_text_differently(made, tmp_path):
    limit = replace(CONSTRAINT, unit="nll_sum", tau=50.0)
    own = made._replace(adapter=foreign(tmp_path))
    rows = [as_chat(make_example(**row)) for row in tiny.rows(20, seed=3)]
    short = max(len(encode(row, tiny.tokenizer(), max_length=None).input_ids) for row in rows) - 1
    cut = Setup(tokenizer="own", max_length=short)
    refused(own, DataError, "scored on different texts", constraint=limit, setup=cut)


def test_a_confidence_that_is_a_fraction_makes_the_same_claim():
    """The claim is hashed as JSON, which knows no fractions."""
    limit = ChanceConstraint(tau=0.1, alpha=0.05)
    found, expected = (
        claim_of(CertificateSpec("before", "after", limit, confidence=confidence), "b", "a", (), {}).sha256
        for confidence in (Fraction(19, 20), 0.95)
    )
    assert found == expected
