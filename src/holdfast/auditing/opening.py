"""Opening a certify split: measure two models on it once, count, and write the certificate.

Everything that can be refused is refused before the split is looked at: too few prompts, prompts that were trained on,
a tau inside the noise, an opening that was not declared. The ledger's entry is written before the first degradation is
measured. Of the split only the verdict and counts are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.auditing.certificate_table import read_rows
from holdfast.auditing.certify_prompts import (
    Leakage,
    Prompts,
    read_prompts,
    require_no_leak,
    require_not_steering,
)
from holdfast.auditing.issuing import Evidence, issue
from holdfast.auditing.judging import open_judging
from holdfast.auditing.measure import Progress, measure_pair
from holdfast.auditing.noise import noise_floor
from holdfast.auditing.pair import Name, Pair
from holdfast.auditing.question import Question, Setup
from holdfast.auditing.strength import search_strength
from holdfast.auditing.verify import require_entered, require_figures
from holdfast.certification.assessment import Rows, Terms, require_categories, require_enough
from holdfast.certification.claim import Claim
from holdfast.certification.openings import Ledger, default_ledger
from holdfast.certification.record import FILE_NAME, TABLE_NAME, CertificateRecord, load_certificate
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError, NumericalError, UnsupportedError
from holdfast.data.encode import Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import Example
from holdfast.evaluation.judge import JudgeSpec


def open_certify(
    before: str | Path,
    after: str | Path,
    safety: str | Sequence[Example],
    constraint: ChanceConstraint | None = None,
    *,
    output: Path,
    kind: str = "fixed",
    confidence: float = 0.95,
    openings: int | None = None,
    pool: int | None = None,
    source: str | None = None,
    train_data: Sequence[str] = (),
    leakage: Leakage | None = None,
    ledger: Path | None = None,
    splits: Path | None = None,
    notes: Sequence[str] = (),
    setup: Setup | None = None,
    judge: JudgeSpec | None = None,
    max_new_tokens: int = 128,
    progress: Progress | None = None,
) -> CertificateRecord:
    """Certify that at most a share alpha of prompts like these degrade by more than tau.

    With a judge, a degradation is on-policy: how much more probably harmful the judge finds the reply of `after` than
    the one of `before`, and tau is a difference of probabilities. A reply that it does not score is a regression.

    The same question about the same prompts is answered from the files in `output`, without measuring again.

    Args:
        before: hub id, folder, PEFT adapter or `embedded`: what degradations are measured against.
        after: the same: what is judged.
        safety: the certify prompts: a file or hub data set, or examples, which came from `source`.
        constraint: tau, alpha, unit and first_k.
        output: folder for `certificate.json`, `certificate.parquet` and, of a strength search, the adapter.
        kind: fixed, finite_pool, sequential, per_category or strength.
        confidence: 1 - delta, over all openings of these prompts.
        openings: how often these prompts may be opened; None: as declared before, or once.
        pool: for `finite_pool`: size of the known list that the prompts were drawn from without replacement.
        train_data: files or hub data sets that the prompts must not occur in.
        leakage: the outcome of that search, where it was made already.
        ledger: file of the openings; beside the safety file unless given.
        splits: a run's splits.json, to bind.
        notes: further assumptions to state.
        judge: what `open_judge` takes, with a revision; None compares likelihoods.
        max_new_tokens: length of the longest reply that is judged.

    Raises:
        InfeasibleError: too few prompts, an undeclared opening, or tau inside the noise.
        DataError: bad data, or a prompt that was trained on.
        ConfigError: settings that do not fit, or an output folder with another certificate.
    """
    limit = constraint or ChanceConstraint()
    judging = None if judge is None else open_judging(judge, limit, max_new_tokens)
    asked = Question(before, after, limit, kind, confidence, pool, setup or Setup(), judging)
    place = safety if isinstance(safety, str) else source
    prompts = _prompts(asked, safety, source, openings)
    if splits is None:
        require_not_steering(prompts.ids, after)
    leakage = leakage or require_no_leak(prompts.examples, train_data, asked.setup.reading)
    book = Ledger(ledger or default_ledger(place or ""))
    order: dict[str, Any] = {"sequential": kind == "sequential", "texts": prompts.texts}
    with asked.pair() as pair:
        claim = asked.claim(pair, dict(zip(prompts.ids, prompts.categories, strict=True)))
        terms = asked.terms(book.check(claim, prompts.ids, declared=openings, **order).declared)
        _require_enough(terms, prompts)
        stored = _stored(output, claim, prompts, book)
        known = None if stored is None else read_rows(output / TABLE_NAME, terms.tau, stored.bound["table_sha256"])
        if stored is not None and stored.examples == len(prompts.ids):
            return stored
        _require_measurable(pair, asked, prompts)
        # On-policy nothing is scored but replies; what rounding does to those has no floor that could be measured.
        encoded = _encode(pair, prompts, asked.setup) if judging is None else {"before": [], "after": []}
        noise = _noise(pair, encoded["before"], limit) if judging is None else 0.0
        entry = book.open(claim, prompts.ids, declared=openings, **order)
        terms = asked.terms(entry.declared)  # another process may have declared a number since the check
        rows = _measure(pair, prompts, encoded, asked, terms, known, progress)
        if judging is not None:  # a judge may say something else when it is asked again, and replies may differ
            flags = zip(rows.ids, rows.strength.tolist(), (rows.degradation <= terms.tau).tolist(), strict=True)
            book.settle(claim.sha256, prompts.ids, [f"{name} {strength:g} {kept}" for name, strength, kept in flags])
        evidence = Evidence(asked, prompts, pair, rows, terms, entry, book.path, place, splits, leakage, noise)
        truncated = sum(item.truncated for item in encoded["before"])
        return issue(evidence, output, notes=[*notes, *_cut(truncated, asked.setup.max_length)])


def _prompts(asked: Question, safety: str | Sequence[Example], source: str | None, openings: int | None) -> Prompts:
    """The prompts, refused where they can already be seen to be too few."""
    setup, sequential = asked.setup, asked.kind == "sequential"
    found = read_prompts(safety, source=source, reading=setup.reading, template=setup.template, sequential=sequential)
    if asked.kind == "per_category":
        require_categories(found.categories)
    _require_enough(asked.terms(openings or 1), found)
    return found


def _require_enough(terms: Terms, prompts: Prompts) -> None:
    units = len(prompts.ids) if terms.kind == "finite_pool" else len(set(prompts.cluster))
    require_enough(terms, units, prompts.per_category() if terms.kind == "per_category" else None)


def _stored(output: Path, claim: Claim, prompts: Prompts, book: Ledger) -> CertificateRecord | None:
    """The certificate in the output folder, when it answers this question, for all prompts or the first of them.

    It is believed where its figures follow from its table and the ledger knows of it: anyone can put a file there.
    """
    path = output / FILE_NAME
    if not path.exists():
        return None
    record = load_certificate(path)
    if record.openings["claim"] == claim.sha256:
        rows = read_rows(output / TABLE_NAME, record.tau, record.bound["table_sha256"])
        ids = list(dict.fromkeys(rows.ids))
        if set(ids) == set(prompts.ids) or (record.kind == "sequential" and ids == prompts.ids[: len(ids)]):
            require_figures(record, rows)
            require_entered(record, ids, book)
            return record
    raise ConfigError(f"{path} is a certificate of something else", remedy="name another folder with --output")


def _require_measurable(pair: Pair, asked: Question, prompts: Prompts) -> None:
    """Refuse now what would only fail while the prompts are being measured, when the opening is spent.

    Raises:
        UnsupportedError: no strength to scale, or a unit that is not defined for this pair.
        DataError: prompts that leave no room for a reply.
    """
    if asked.kind == "strength":
        pair.set_strength(1.0)
    if asked.judging is not None:
        asked.judging.require_room(pair, prompts.examples, asked.setup.template)
    elif pair.tokenizers.own and asked.constraint.unit != "nll_sum":
        raise UnsupportedError(
            f"unit {asked.constraint.unit!r} is not defined across tokenizers: it is counted in tokens",
            remedy="use unit nll_sum, or read both models with one tokenizer",
        )


def _encode(pair: Pair, prompts: Prompts, setup: Setup) -> dict[Name, list[Encoded]]:
    """The prompts as each side reads them."""
    found: dict[Name, list[Encoded]] = {}
    tokenizers: dict[Name, object] = {"before": pair.tokenizers.before, "after": pair.tokenizers.after}
    for name, tokenizer in tokenizers.items():
        require_usable_tokenizer(tokenizer, needs_chat=any(e.kind == "chat" for e in prompts.examples))
        same = name == "after" and not pair.tokenizers.own
        found[name] = (
            found["before"]
            if same
            else encode_all(prompts.examples, tokenizer, max_length=setup.max_length, role="safety").examples
        )
    if pair.tokenizers.own and any(item.truncated for items in found.values() for item in items):
        raise DataError(
            f"examples are longer than max_length {setup.max_length}: cut by two tokenizers, the two models would be "
            "scored on different texts",
            remedy="leave out --max-length, or read both models with one tokenizer",
        )
    return found


def _noise(pair: Pair, encoded: Sequence[Encoded], constraint: ChanceConstraint) -> float:
    """The noise floor in the constraint's unit, refused where tau lies inside it."""
    found = noise_floor(pair, encoded, constraint.unit, first_k=constraint.first_k)
    if not math.isfinite(found):
        raise NumericalError(
            "the model before gives no finite loss on these prompts", remedy="load it in float32, or check its files"
        )
    constraint.require_tau_above_noise(found)
    return found


def _measure(
    pair: Pair,
    prompts: Prompts,
    encoded: dict[Name, list[Encoded]],
    asked: Question,
    terms: Terms,
    known: Rows | None,
    progress: Progress | None,
) -> Rows:
    """Degradations of the prompts that are not known yet, after those that are."""
    start = 0 if known is None else len(known.ids)
    todo = {name: items[start:] for name, items in encoded.items()}
    unit, first_k = asked.constraint.unit, asked.constraint.first_k

    def degradation() -> Any:
        if asked.judging is not None:
            return asked.judging.degradations(pair, prompts.examples[start:], asked.setup.template, progress)
        found = measure_pair(pair, todo, first_k=first_k, kl=unit == "kl_token", progress=progress)
        return found.degradation(unit)

    def measured() -> Rows:
        return Rows(
            ids=prompts.ids[start:],
            degradation=np.asarray(degradation(), dtype=np.float64),
            cluster=np.array(prompts.cluster[start:], dtype=np.int64),
            category=prompts.categories[start:],
            strength=np.full(len(prompts.ids) - start, np.nan),
        )

    if asked.kind == "strength":
        return search_strength(pair, measured, terms)
    return measured() if known is None else Rows.joined([known, measured()])


def _cut(truncated: int, max_length: int | None) -> list[str]:
    return [f"{truncated} of the examples were cut at {max_length} tokens."] if truncated else []
