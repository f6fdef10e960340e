"""A certificate from two evaluation logs: paired by sample, bound by the logs' bytes, no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.auditing.log_certificate import certify_logs
from holdfast.auditing.verify import verify
from holdfast.certification.binomial import p_value
from holdfast.core.errors import CheckpointError, ConfigError, DataError, InfeasibleError

LOGS = Path(__file__).parents[1] / "evaluation" / "evaluation_logs"
WORDS = ("amber", "birch", "cedar", "daisy", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "larch")


def samples(path: Path, *, n: int = 80, lost: int = 0, failed: int = 5) -> Path:
    """An lm-eval file of samples: the first `failed` fail in both logs, the next `lost` in the log after."""
    rows = []
    for i in range(n):
        words = [WORDS[(i * k + k * k) % len(WORDS)] + str(i) for k in range(1, 9)]
        doc = {"question": " ".join(words), "answer": str(i)}
        passed = float(i >= failed + lost)
        rows.append({
            "doc_id": i, "doc": doc, "target": str(i), "arguments": {"gen_args_0": {"arg_0": doc["question"]}},
            "resps": [["x"]], "filtered_resps": ["x"], "filter": "none", "metrics": ["exact_match"],
            "doc_hash": f"{i:064d}", "prompt_hash": f"{i + 1:064d}", "target_hash": f"{i + 2:064d}",
            "exact_match": passed,
        })  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pair(folder: Path, *, lost: int, n: int = 80) -> tuple[Path, Path]:
    before = samples(folder / "before" / "samples_task_2026-01-01T00-00-00.jsonl", n=n)
    return before, samples(folder / "after" / "samples_task_2026-01-02T00-00-00.jsonl", n=n, lost=lost)


def test_what_passed_before_is_counted(tmp_path):
    before, after = pair(tmp_path, lost=1)
    record = certify_logs(before, after, output=tmp_path / "out", alpha=0.1)
    assert (record.n, record.regressions, record.examples) == (75, 1, 75)
    assert record.p_value == p_value(1, 75, 0.1)
    assert record.certified
    assert "passed in the log before" in record.statement
    assert "the models were not seen" in record.statement
    assert verify(tmp_path / "out") == record


def test_a_log_that_lost_more_is_not_certified(tmp_path):
    before, after = pair(tmp_path, lost=20)
    record = certify_logs(before, after, output=tmp_path / "out", alpha=0.1)
    assert (record.regressions, record.certified) == (20, False)


def test_a_changed_log_does_not_verify(tmp_path):
    before, after = pair(tmp_path, lost=20)
    certify_logs(before, after, output=tmp_path / "out", alpha=0.1)
    samples(after, lost=2)
    with pytest.raises(CheckpointError, match="the log after has sha256"):
        verify(tmp_path / "out")


def test_an_undeclared_second_look_is_refused(tmp_path):
    before, after = pair(tmp_path, lost=1)
    certify_logs(before, after, output=tmp_path / "a", alpha=0.1)
    with pytest.raises(InfeasibleError, match="undeclared"):
        certify_logs(before, after, output=tmp_path / "b", alpha=0.2)
    with pytest.raises(ConfigError, match="exists"):
        certify_logs(before, after, output=tmp_path / "a", alpha=0.1)


def test_too_few_samples_spend_no_opening(tmp_path):
    before, after = pair(tmp_path, lost=1, n=40)
    with pytest.raises(InfeasibleError, match="35 of 40 samples passed"):
        certify_logs(before, after, output=tmp_path / "out")
    assert not list(tmp_path.rglob("*.openings.json"))


def test_real_logs_of_inspect_are_read(tmp_path):
    """The fixtures are small: they pair, and are too few to certify."""
    with pytest.raises((InfeasibleError, DataError)) as refused:
        certify_logs(
            LOGS / "inspect_before.eval", LOGS / "inspect_after.eval", output=tmp_path / "out",
            ledger=tmp_path / "ledger.json",
        )  # fmt: skip
    assert "samples passed in the log before" in refused.value.what or "score" in refused.value.what
