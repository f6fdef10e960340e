"""A run with two audits: the one that training wrote, and a later one in its folder `audit`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.unit.report.synthetic import (
    AFTER,
    BEFORE,
    TAU,
    Words,
    audit_values,
    certificate,
    degradations,
    examples,
    write_audit,
    write_plain_audit,
    write_run,
)
from tests.unit.report.test_report_page import page_of

from holdfast.core.errors import CheckpointError
from holdfast.reporting.page import paired, paired_words
from holdfast.reporting.read import read_evidence
from holdfast.reporting.verdict import Standing, claim, verdict
from holdfast.reporting.views import figure_rows

PASSED = certificate(Words())


def audit_later(run: Path, *, over: bool, judged: bool = False, rises: bool = False, **changes) -> Path:
    """What `holdfast audit RUN` writes: the same examples in one unit more; every tenth one beyond tau if `over`."""
    folder, sizes = run / "audit", {"constraint": 120, "monitor": 100}
    folder.mkdir()
    parts = {role: np.minimum(degradations(role, n, 0, 0.0), TAU) for role, n in sizes.items()}
    if over:
        parts["monitor"][::10] = 2 * TAU
    ids = {role: [example.id for example in examples(Words(), role, n)] for role, n in sizes.items()}
    safety = str(run.parent / "safety.jsonl")
    values = audit_values(parts, Words(), safety, judged=judged, mode="adapter", kl=True, rises=rises, **changes)
    write_audit(folder, parts, ids, values, Words())
    return run


@pytest.mark.parametrize("certified", [None, PASSED])
def test_a_later_audit_over_the_limit_is_enough(tmp_path, certified):
    run = audit_later(write_run(tmp_path / "run", certified=certified), over=True)
    found = verdict(read_evidence(run))
    assert found.standing is Standing.OVER
    assert found.reason.startswith("10 of 100 monitor examples (10 %) in the later audit degraded by more than 0.1")


@pytest.mark.parametrize("certified", [None, PASSED])
def test_a_later_audit_within_the_limit_does_not_excuse_the_one_of_training(tmp_path, certified):
    run = audit_later(write_run(tmp_path / "run", worse=0.2, certified=certified), over=False)
    evidence = read_evidence(run)
    found, one = verdict(evidence), evidence.sets[0]
    monitor = next(f for f in one.beside if f.role == "monitor")
    assert found.standing is Standing.OVER
    assert f"{monitor.violations} of 100 monitor examples" in found.reason
    assert "in the audit that training wrote" in found.reason
    rows = [(row.who, row.what, row.fits) for row in figure_rows(one)]
    assert ("monitor", "the audit that training wrote", "over") in rows
    if certified is None:
        assert claim(evidence).endswith(f"among 100 monitor prompts it did on {monitor.violations}.")


def test_result_json_counts_where_the_audit_of_training_is_gone(tmp_path):
    run = audit_later(write_run(tmp_path / "run", worse=0.2, audit=False), over=False)
    assert verdict(read_evidence(run)).standing is Standing.OVER


def test_both_within_is_measured_and_the_later_one_is_shown(tmp_path):
    run = audit_later(write_run(tmp_path / "run"), over=False)
    evidence = read_evidence(run)
    assert verdict(evidence).standing is Standing.MEASURED
    assert "kl_token" in evidence.sets[0].units
    page = page_of(run)
    assert "Shown is the later audit, in audit/." in page
    assert '<th scope="row">kl_token</th>' in page


def test_one_audit_needs_no_words_about_which(tmp_path):
    assert "Shown is" not in page_of(write_run(tmp_path / "run"))


@pytest.mark.parametrize("side", ["after", "before"])
def test_a_later_audit_of_other_models_is_named_and_left_out(tmp_path, side):
    other = {"ref": "elsewhere", "sha256": "f00d" * 16}
    run = audit_later(write_run(tmp_path / "run"), over=True, **{side: other})
    evidence = read_evidence(run)
    assert verdict(evidence).standing is Standing.MEASURED
    assert "kl_token" not in evidence.sets[0].units
    ours = AFTER if side == "after" else BEFORE
    note = f"is of another model {side} (sha256 f00df00df00d, not {ours[:12]}) and does not count for the verdict"
    assert note in page_of(run)


@pytest.mark.parametrize("side", ["after", "before"])
def test_a_later_audit_of_an_endpoint_is_left_out(tmp_path, side):
    served = {"ref": "m at http://h/v1 (an endpoint)", "sha256": None, "endpoint": {"model_name": "m"}}
    run = audit_later(write_run(tmp_path / "run"), over=True, **{side: served})
    assert verdict(read_evidence(run)).standing is Standing.MEASURED
    assert "is of an endpoint, whose weights were not seen, and does not count for the verdict" in page_of(run)


def test_the_judge_of_other_models_is_left_out(tmp_path):
    same = audit_later(write_run(tmp_path / "a", judged=False), over=False, judged=True)
    assert read_evidence(same).sets[0].behaviour
    other = {"after": {"ref": "elsewhere", "sha256": "f00d" * 16}}
    run = audit_later(write_run(tmp_path / "b", judged=False), over=False, judged=True, **other)
    assert read_evidence(run).sets[0].behaviour is None


def test_judged_rises_are_shown_where_there_are_any(tmp_path):
    shown = page_of(audit_later(write_run(tmp_path / "a", judged=False), over=False, judged=True, rises=True))
    assert "replies whose judged probability of harm rose by more than 0.25" in shown
    without = page_of(audit_later(write_run(tmp_path / "b", judged=False), over=False, judged=True))
    assert "judged probability" not in without


def test_a_later_audit_with_another_limit_is_named_and_left_out(tmp_path):
    run = audit_later(write_run(tmp_path / "run"), over=True, tau=0.15)
    assert verdict(read_evidence(run)).standing is Standing.MEASURED
    assert "has another limit (0.15 nats per token) and does not count" in page_of(run)


def test_a_later_audit_with_a_larger_alpha_is_held_against_the_alpha_of_the_run(tmp_path):
    run = audit_later(write_run(tmp_path / "run"), over=True, alpha=0.2)
    evidence = read_evidence(run)
    assert evidence.sets[0].limit.alpha == 0.05
    assert verdict(evidence).standing is Standing.OVER


def test_a_later_audit_that_lost_its_table_is_refused(tmp_path):
    """Its figures could not be recomputed."""
    run = audit_later(write_run(tmp_path / "run"), over=True)
    (run / "audit" / "audit.parquet").unlink()
    with pytest.raises(CheckpointError, match=r"audit\.parquet cannot be read"):
        read_evidence(run)


def test_a_certificate_says_what_it_is_bound_to(tmp_path):
    page = page_of(write_run(tmp_path / "run", certified=PASSED))
    assert f"bound to the adapter or model with sha256 <code>{AFTER[:12]}</code>" in page


def test_a_comparison_says_who_has_no_monitor_examples(tmp_path):
    runs = [write_run(tmp_path / "first"), write_plain_audit(tmp_path / "aud1")]
    evidence = [read_evidence(run) for run in runs]
    for order in (1, -1):
        pair = paired(evidence[::order], ["first", "aud1"][::order])
        assert paired_words(pair[0]).endswith("since aud1 has no monitor examples.")
