"""Issuing a certificate: the verdict from the rows, the hashes of what it rests on, and the assumptions in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.auditing.certificate_table import write_rows
from holdfast.auditing.certify_prompts import Leakage, Prompts
from holdfast.auditing.pair import Pair
from holdfast.auditing.question import Question
from holdfast.auditing.strength import strength_folder, write_strength
from holdfast.certification.assessment import Rows, Terms, assess
from holdfast.certification.openings import Opening
from holdfast.certification.record import TABLE_NAME, CertificateRecord
from holdfast.constraint.chance import NOISE_MARGIN
from holdfast.core.hashing import sha256_file
from holdfast.core.provenance import commit, hardware, versions
from holdfast.models.content import content_of


@dataclass(frozen=True)
class Evidence:
    """What a certificate is made from."""

    asked: Question
    prompts: Prompts
    pair: Pair
    rows: Rows
    terms: Terms
    entry: Opening
    ledger: Path
    source: str | None
    splits: Path | None
    leakage: Leakage
    noise: float


def issue(evidence: Evidence, output: Path, *, notes: Sequence[str] = ()) -> CertificateRecord:
    """Write the adapter of a strength search, then the table, and last the certificate."""
    asked, terms, pair = evidence.asked, evidence.terms, evidence.pair
    found = assess(evidence.rows, terms)
    after, after_sha256 = place_of(asked.after), pair.after.sha256
    if found["strength"] is not None:
        chosen = found["strength"]["chosen"]
        found["strength"] |= {"adapter": None, "original": after, "original_sha256": after_sha256}
        if chosen is not None:
            folder = strength_folder(output, chosen)
            write_strength(pair, chosen, folder)
            after = found["strength"]["adapter"] = str(folder.resolve())
            after_sha256 = content_of(folder, trust_remote_code=asked.setup.trust_remote_code).sha256
    table = write_rows(output / TABLE_NAME, evidence.rows, terms.tau)
    splits = evidence.splits
    record = CertificateRecord(
        kind=terms.kind, alpha=terms.alpha, tau=terms.tau, unit=terms.unit, first_k=int(asked.constraint.first_k),
        confidence=terms.confidence, pool=terms.pool,
        openings=openings_of(evidence),
        bound={
            "data_sha256": evidence.prompts.data_sha256, "split_sha256": evidence.entry.split_sha256,
            "table_sha256": table, "before_sha256": pair.before.sha256, "after_sha256": after_sha256,
            "reference_sha256": pair.before.sha256, "tokenizer_sha256": pair.tokenizers.tokenizer_sha256,
            "template_sha256": pair.tokenizers.template_sha256,
            "splits_sha256": None if splits is None else sha256_file(splits),
        },
        places={
            "before": place_of(asked.before), "after": after, "table": TABLE_NAME,
            "safety": None if evidence.source is None else place_of(evidence.source),
            "splits": None if splits is None else str(splits.resolve()),
        },
        leakage=asdict(evidence.leakage), settings=asked.settings, noise_floor=evidence.noise,
        assumptions=[*assumptions(evidence), *notes],
        versions=versions(), commit=commit(), hardware=hardware(),
        made=datetime.now(UTC).isoformat(timespec="seconds"), **found,
    )  # fmt: skip
    record.save(output)
    return record


def openings_of(evidence: Evidence) -> dict[str, Any]:
    """The ledger's entry as the certificate shows it."""
    entry = evidence.entry
    return {
        "declared": entry.declared,
        "this": entry.number,
        "ledger": str(evidence.ledger.resolve()),
        "claim": entry.claim,
    }


def place_of(ref: str | Path) -> str:
    """A reference that still leads there from another working folder."""
    path = Path(ref).expanduser()
    return str(path.resolve()) if path.exists() else str(ref)


def regression_words(asked: Question) -> list[str]:
    """What a regression was, and what was not looked at."""
    if asked.judging is not None:
        judge = asked.judging.judge
        return [
            f"A regression is a reply to which the judge {judge.name} (revision {judge.revision}) gives a probability "
            "of harm more than tau above that of the model before's reply to the same prompt (on_policy), or a pair of "
            "replies that it did not score. Where it gives no probabilities: a reply that is not called safe, to a "
            "prompt whose reply before was not called unsafe. The judge's own errors are not in the bound.",
            f"Replies are the most likely tokens one after another, at most {asked.judging.max_new_tokens} of them; "
            "other ways of decoding, longer replies, and what rounding on other hardware does to them were not tested.",
        ]
    unjudged = "what the model writes on its own was not judged."
    if asked.unit == "kl_token":
        return [f"A regression is a divergence from the model before above tau (kl_token); {unjudged}"]
    return [
        f"A regression is a likelihood of the given completion that fell by more than tau ({asked.unit}); {unjudged}"
    ]


def assumptions(evidence: Evidence) -> list[str]:
    """What the statement rests on and no file can prove, in plain words."""
    terms, limit = evidence.terms, evidence.asked.constraint
    drawn = {
        "finite_pool": f"The prompts are a random sample without replacement from a list of {terms.pool}.",
        "sequential": "The prompts arrived in an order that does not depend on how the models answer; prompts that "
        "nearly equal an earlier one were left out.",
    }.get(
        terms.kind,
        "The prompts are independent draws from the source that the statement speaks of; near-duplicates count as one "
        "prompt, which regresses when any of them does.",
    )
    found = [
        drawn,
        "Models, tau, alpha and unit were fixed before these prompts were looked at, and the prompts played no part in "
        "training or in any choice; looks that were not entered in the ledger are not known here.",
        *regression_words(evidence.asked),
        "The hashes bind this file to data, models and table. They are not a signature: compare the sha256 with the "
        "one that was printed when it was issued.",
    ]
    if not evidence.leakage.checked:
        found.append("No training data was given: that no prompt was trained on is assumed, not checked.")
    if terms.openings > 1:
        found.append(
            f"{terms.openings} openings were declared; each spends 1/{terms.openings} of the allowed error, and no "
            "model was built from what an earlier opening showed."
        )
    if evidence.noise * NOISE_MARGIN > limit.tau:
        found.append(f"tau lies within {NOISE_MARGIN:g} times the numerical noise, which was explicitly allowed.")
    return found
