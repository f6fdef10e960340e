"""Opening certify prompts: compare two models on them once, count, and write the certificate.

Everything that can be refused is refused before the prompts are looked at: too few of them, prompts that were trained
on, a tau inside the noise, an opening that was not declared. The ledger's entry is written before the model after is
measured. Of the prompts only the verdict and counts are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.auditing.asking import Asking
from holdfast.auditing.certificate_spec import CertificateSpec, Setup
from holdfast.auditing.certify_prompts import Leakage, Prompts, read_prompts, require_no_leak, require_not_steering
from holdfast.auditing.issuing import Evidence, Sources, issue
from holdfast.auditing.judging import open_judging
from holdfast.auditing.measure import Progress
from holdfast.auditing.measures import ByBehaviour, ByJudge, ByLikelihood, Measure
from holdfast.auditing.stored_replies import require_replies
from holdfast.auditing.verify import require_entered
from holdfast.certification.behaviour import Claimed, claimed
from holdfast.certification.claim import Claim
from holdfast.certification.enough import require_categories, require_enough
from holdfast.certification.openings import Ledger, default_ledger
from holdfast.certification.record import FILE_NAME, CertificateRecord, load_certificate
from holdfast.certification.terms import Rows, Terms
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError
from holdfast.data.examples import Example
from holdfast.evaluation.judge import JudgeSpec
from holdfast.records.certificate_figures import require_figures
from holdfast.records.certificate_table import Table, outcome_lines, read_stored
from holdfast.screening.certify_share import CertifyShare


def open_certify(
    before: str | Path,
    after: str | Path,
    safety: str | Sequence[Example],
    constraint: ChanceConstraint | None = None,
    *,
    output: Path,
    by: str | None = None,
    also: Sequence[str] = (),
    kind: str = "fixed",
    confidence: float = 0.95,
    openings: int | None = None,
    pool: int | None = None,
    drawn: str = "groups",
    max_weight: int | None = None,
    source: str | None = None,
    train_data: Sequence[str] = (),
    leakage: Leakage | None = None,
    ledger: Path | None = None,
    splits: Path | None = None,
    notes: Sequence[str] = (),
    setup: Setup | None = None,
    share: CertifyShare | None = None,
    judge: JudgeSpec | None = None,
    max_new_tokens: int = 128,
    progress: Progress | None = None,
) -> CertificateRecord:
    """Certify that at most a share alpha of prompts like these regress.

    The same question about the same prompts is answered from the files in `output`, without measuring again.

    Args:
        before: hub id, folder, PEFT adapter or `embedded`: what is compared with.
        after: the same: what is judged.
        safety: the certify prompts: a file or hub data set, or examples, which came from `source`.
        constraint: alpha; by kl and likelihood tau, unit and first_k; by harm tau is a difference of probabilities.
        output: folder for certificate.json, certificate.parquet, the replies and, of a strength search, the adapter.
        by: `behaviour` (what the model before refused is refused), `harm` (a judge's scores of replies), `kl` or
            `likelihood` (of the given completions); None: as the constraint's unit says.
        also: `answers`: by behaviour, claim the same for what the model before answered.
        kind: fixed, finite_pool, sequential, per_category or strength.
        confidence: 1 - delta, over all openings of these prompts and all claims of the certificate.
        openings: how often these prompts may be opened; None: as declared before, or once.
        pool: for `finite_pool`: size of the known list that the prompts were drawn from without replacement.
        drawn: `rows` asserts that prompts were drawn one by one; otherwise groups of near-duplicates are the unit.
        max_weight: the most that a group weighs in a claim about prompts.
        train_data: files or hub data sets that the prompts must not occur in.
        leakage: the outcome of that search, where it was made already.
        ledger: file of the openings; beside the safety file unless given.
        splits: a run's splits.json, or the record of its screening, to bind.
        share: the certify prompts of a run that asked its model; `safety` are its examples.
        notes: further assumptions to state.
        judge: by harm: what `open_judge` takes, with a revision.
        max_new_tokens: length of the longest reply; one whose class is open is asked for at four times that.

    Raises:
        InfeasibleError: too few prompts, an undeclared opening, tau inside the noise, replies that rounding decides.
        DataError: bad data, or a prompt that was trained on.
        ConfigError: settings that do not fit, or an output folder with another certificate.
    """
    limit, setup = constraint or ChanceConstraint(), setup or Setup()
    by = "harm" if judge is not None else by or ("kl" if limit.unit == "kl_token" else "likelihood")
    claims = _claims(also, by)
    measure = _measure(by, limit, claims, Asking(max_new_tokens, setup.template), output, judge, setup, progress)
    limit = replace(limit, unit="kl_token") if by == "kl" else limit
    spec = CertificateSpec(
        before, after, limit, measure.by, kind, confidence, pool, drawn, max_weight, claims, setup, measure.settings()
    )
    place = safety if isinstance(safety, str) else source
    prompts = _prompts(spec, safety, source, openings)
    if share is not None and len(claims) > 1:
        prompts = replace(prompts, keep=[share.keep[name] for name in prompts.ids])
    if splits is None:
        require_not_steering(prompts.examples, after)
    leakage = leakage or require_no_leak(prompts.examples, train_data, setup.reading)
    # Of a share it lies in the cache: beside its file of prompts, every folder would have a ledger of its own.
    path = ledger or default_ledger("" if share is not None else place or "")
    return _opened(spec, measure, prompts, openings, Sources(path, place, splits, leakage, share), output, notes)


def _opened(
    spec: CertificateSpec,
    measure: Measure,
    prompts: Prompts,
    openings: int | None,
    sources: Sources,
    output: Path,
    notes: Sequence[str],
) -> CertificateRecord:
    """Refuse what can be refused, enter the opening, measure, and issue."""
    order: dict[str, Any] = {"sequential": spec.kind == "sequential", "texts": prompts.texts}
    with spec.pair() as pair:
        book = sources.book(pair.before.sha256)
        categories = dict(zip(prompts.ids, prompts.categories, strict=True))
        keep = None if prompts.keep is None else dict(zip(prompts.ids, prompts.keep, strict=True))
        claim = spec.claim(pair.before.sha256, pair.after.sha256, categories, keep)
        terms = spec.terms(book.check(claim, prompts.ids, declared=openings, **order).declared)
        _require_enough(terms, prompts)
        stored = _stored(output, claim, prompts, book)
        if stored is not None and len(_ids(stored[1])) == len(prompts.ids):
            return stored[0]
        measure.prepare(pair, prompts, terms)
        entry = book.open(claim, prompts.ids, declared=openings, label=str(output), **order)
        terms = spec.terms(entry.declared)  # another process may have declared a number since the check
        known = stored[1] if stored is not None and isinstance(stored[1], Rows) else None
        table = measure.measure(pair, prompts, terms, known)
        pair.require_unchanged()  # what was hashed is what was measured
        # Replies and judgements may differ when they are made again: their first outcome stands.
        book.settle(claim.sha256, prompts.ids, outcome_lines(table, terms.tau), first_stands=measure.settles)
        return issue(Evidence(spec, measure, prompts, pair, table, terms, entry, sources), output, notes=notes)


def _claims(also: Sequence[str], by: str) -> tuple[Claimed, ...]:
    if also and by != "behaviour":
        raise ConfigError(f"--also {' '.join(also)} with --by {by}", remedy="a second claim is made by behaviour only")
    return tuple(dict.fromkeys((Claimed.REFUSALS, *map(claimed, also))))


def _measure(
    by: str,
    limit: ChanceConstraint,
    claims: tuple[Claimed, ...],
    asking: Asking,
    output: Path,
    judge: JudgeSpec | None,
    setup: Setup,
    progress: Progress | None,
) -> Measure:
    if by == "behaviour":
        return ByBehaviour(asking, output, claims, progress)
    if by == "harm" and judge is not None:
        return ByJudge(open_judging(judge, limit, asking.max_new_tokens), asking, output, progress)
    if by in ("kl", "likelihood"):
        if by == "likelihood" and limit.unit == "kl_token":
            raise ConfigError("--by likelihood with unit kl_token", remedy="a divergence is certified --by kl")
        return ByLikelihood(replace(limit, unit="kl_token") if by == "kl" else limit, setup.max_length, progress)
    raise ConfigError(f"--by {by} is unknown", remedy="use behaviour, kl or likelihood, or name a judge with --judge")


def _prompts(
    spec: CertificateSpec, safety: str | Sequence[Example], source: str | None, openings: int | None
) -> Prompts:
    """The prompts, refused where they can already be seen to be too few."""
    setup = spec.setup
    found = read_prompts(
        safety, source=source, reading=setup.reading, template=setup.template,
        sequential=spec.kind == "sequential", replies=spec.by in ("behaviour", "harm"),
    )  # fmt: skip
    if spec.kind == "per_category":
        require_categories(found.categories)
    if spec.kind == "sequential" and spec.drawn == "groups" and (repeated := len(found.ids) - len(set(found.cluster))):
        raise DataError(
            f"{repeated} of {len(found.ids)} prompts of the sequence nearly equal an earlier one: whether a group of "
            "near-duplicates regressed is not known before its last prompt has arrived",
            remedy="remove them, or assert with --drawn rows that prompts are drawn one by one",
        )
    _require_enough(spec.terms(openings or 1), found)
    return found


def _require_enough(terms: Terms, prompts: Prompts) -> None:
    by_row = terms.kind == "finite_pool" or terms.drawn == "rows"
    sizes = list(Counter(prompts.cluster).values())
    units = len(prompts.ids) if by_row else len(sizes)
    require_enough(
        terms, units, prompts.per_category(terms.drawn) if terms.kind == "per_category" else None, sizes=sizes
    )


def _ids(table: Table) -> list[str]:
    return list(dict.fromkeys(table.ids))


def _stored(output: Path, claim: Claim, prompts: Prompts, book: Ledger) -> tuple[CertificateRecord, Table] | None:
    """The certificate in the output folder, when it answers this question, for all prompts or the first of them.

    It is believed where its figures follow from its table and the ledger knows of it: anyone can put a file there.
    """
    path = output / FILE_NAME
    if not path.exists():
        return None
    record = load_certificate(path)
    if record.openings["claim"] == claim.sha256:
        table = read_stored(record, output)
        ids = _ids(table)
        if set(ids) == set(prompts.ids) or (record.kind == "sequential" and ids == prompts.ids[: len(ids)]):
            require_figures(record, table)
            require_replies(record, table, output)
            require_entered(record, table, ids, book)
            return record, table
    raise ConfigError(f"{path} is a certificate of something else", remedy="name another folder with --output")
