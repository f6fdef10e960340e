"""A certificate from two evaluation logs, without weights: what passed before and does not pass after.

Samples are paired by id. Counted are those that passed before; lost are those of them that do not pass after. The logs
are bound by their bytes. Which models made them is what the logs say.
"""

from pathlib import Path
from typing import Any

import numpy as np

from holdfast.auditing.certificate_spec import CertificateSpec, Leakage, claim_of
from holdfast.auditing.issuing import drawn_words, place_of, write_record
from holdfast.certification.behaviour import KEPT, LOST, assessed
from holdfast.certification.openings import Ledger, default_ledger
from holdfast.certification.terms import Rows, Terms, require_categories, require_enough_rows
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.hashing import sha256_json, sha256_text
from holdfast.data.examples import normalise
from holdfast.data.near_duplicates import clusters
from holdfast.judging.logs.evaluation_log import EvaluationLog
from holdfast.judging.logs.paired import Epochs, PairedOutcomes, paired_outcomes
from holdfast.records.certificate import FILE_NAME, CertificateRecord
from holdfast.records.certificate_table import outcome_lines

_RECORDED = ("score", "threshold", "epochs", "before", "after", "warnings")  # how samples pass, and of which logs


def certify_logs(
    before: Path, after: Path, *, output: Path, score: str | None = None, threshold: float | None = None,
    epochs: Epochs | None = None, kind: str = "fixed", alpha: float = 0.05, confidence: float = 0.95,
    drawn: str = "groups", max_weight: int | None = None, openings: int | None = None, ledger: Path | None = None,
) -> CertificateRecord:  # fmt: skip
    """Certify that at most a share alpha of what passed in the log before does not pass in the log after.

    Args:
        before: an inspect `.eval` or `.json` log, or an lm-eval `samples_*.jsonl`.
        after: of the same task.
        output: folder for the certificate and its table.
        score: the one that counts; None where there is one alone.
        threshold: from which value on a score passes.
        epochs: when a repeated sample passes: `all`, `majority` or `any`.
        kind: fixed or per_category.
    """
    if (output / FILE_NAME).exists():
        raise ConfigError(f"{output / FILE_NAME} exists", remedy="name another folder with --output")
    pairs = paired_outcomes(before, after, score, threshold=threshold, epochs=epochs)
    spec = CertificateSpec(
        str(before), str(after), ChanceConstraint(alpha=alpha, unit="nll_token"), "log", kind, confidence, None, drawn,
        max_weight, measured={"log": _described(pairs)},
    )  # fmt: skip
    ids, table = _sample_ids(pairs), _counted(pairs)
    if kind == "per_category":
        require_categories(table.category)
    book = Ledger(ledger or default_ledger(str(before)))
    categories = {name: sample.category for name, sample in zip(ids, pairs.samples, strict=True)}
    claim = claim_of(spec, pairs.log_before.sha256, pairs.log_after.sha256, spec.claims, categories)
    texts = {n: f"text:{sha256_text(normalise(s.prompt))[:16]}" for n, s in zip(ids, pairs.samples, strict=True)}
    terms = Terms.of(spec, book.check(claim, ids, declared=openings, texts=texts).declared)
    require_enough_rows(
        terms, table.cluster.tolist(), table.category,
        counted=f"{pairs.passed_before} of {pairs.n} samples passed in the log before",
        remedy="use logs with more samples; `holdfast plan` says how many",
    )  # fmt: skip
    entry = book.open(claim, ids, declared=openings, label=str(output), texts=texts)
    terms = Terms.of(spec, entry.declared)
    book.settle(claim.sha256, ids, outcome_lines(table, terms.tau))
    return write_record(
        spec, terms, entry, book.path, table, assessed(table, terms, spec.claims), output,
        models={"before": _named(pairs.log_before), "after": _named(pairs.log_after)},
        places={"before": place_of(before), "after": place_of(after), "prompts": None, "splits": None},
        bound={
            "data_sha256": _data_sha256(pairs), "before_sha256": pairs.log_before.sha256,
            "after_sha256": pairs.log_after.sha256, "tokenizer_sha256": "", "template_sha256": "",
            "splits_sha256": None, "replies_sha256": None,
        },
        leakage=Leakage(), assumptions=_assumptions(terms, pairs),
    )  # fmt: skip


def require_logs(record: CertificateRecord, table: Rows, before: Path, after: Path) -> list[str]:
    """Pair the logs again and compare; returns the ids of all samples."""
    how = record.settings["log"]
    pairs = paired_outcomes(before, after, how["score"], threshold=how["threshold"], epochs=how["epochs"])
    bound = record.bound
    sides = ("before", pairs.log_before, bound["before_sha256"]), ("after", pairs.log_after, bound["after_sha256"])
    for side, log, expected in sides:
        if log.sha256 != expected:
            what = f"the log {side} has sha256 {log.sha256}, expected {expected}"
            raise CheckpointError(what, remedy=f"name the log that was certified with --{side}")
    again, stated = (
        (list(rows.ids), rows.degradation.tolist(), rows.cluster.tolist(), list(rows.category))
        for rows in (_counted(pairs), table)
    )
    if again != stated or _described(pairs) != how or _data_sha256(pairs) != record.bound["data_sha256"]:
        raise CheckpointError("the certificate's table is not what the logs say", remedy="certify again")
    return _sample_ids(pairs)


def _named(log: EvaluationLog) -> str:
    return f"{log.model or 'a model that the log does not name'} in {log.file}"


def _described(pairs: PairedOutcomes) -> dict[str, Any]:
    return {name: value for name, value in pairs.to_json().items() if name in _RECORDED}


def _sample_ids(pairs: PairedOutcomes) -> list[str]:
    """One id a sample, by its own id and by what it asks; a log's ids may be anything."""
    return [sha256_json([sample.id, sample.content_sha256])[:16] for sample in pairs.samples]


def _counted(pairs: PairedOutcomes) -> Rows:
    """The samples that passed before, D = 1 where they do not pass after."""
    samples = pairs.samples
    lost = np.array([LOST if sample.regressed else KEPT for sample in samples])
    labels = np.array(clusters([sample.prompt for sample in samples]), dtype=np.int64)
    categories, nothing = [sample.category for sample in samples], np.full(len(samples), np.nan)
    every = Rows(_sample_ids(pairs), lost, labels, categories, nothing)
    return every.at([i for i, sample in enumerate(samples) if sample.before])


def _data_sha256(pairs: PairedOutcomes) -> str:
    return sha256_json(sorted(sample.content_sha256 for sample in pairs.samples))


def _assumptions(terms: Terms, pairs: PairedOutcomes) -> list[str]:
    lost = sum(sample.lost_after for sample in pairs.samples)
    return [
        drawn_words(terms),
        f"A sample passes by its score {pairs.score}; one without a result did not pass ({lost} in the log after). "
        "Whether the score is right, and whether the named models made the logs, was not checked.",
        "Alpha and the score were fixed before the logs were looked at, and no sample played a part in training or in "
        "any choice.",
        "The hashes bind this file to both logs and the table. They are not a signature.",
        *pairs.warnings,
    ]
