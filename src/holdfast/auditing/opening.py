"""Opening certify prompts: compare two models on them once, count, and write the certificate.

Everything that can be refused is refused before the prompts are looked at: too few of them, prompts that were trained
on, a tau inside the noise, an opening that was not declared. The ledger's entry is written before the model after is
measured. Of the prompts only the verdict and counts are shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from holdfast.auditing.asking import Asking, require_replies
from holdfast.auditing.behaviour import certificate_judge
from holdfast.auditing.certificate_spec import (
    CertificateSpec,
    Leakage,
    Prompts,
    Setup,
    claim_of,
    read_prompts,
    require_no_leak,
    require_not_steering,
)
from holdfast.auditing.issuing import Sources, issue
from holdfast.auditing.measure import Progress
from holdfast.auditing.measures import ByBehaviour, ByJudge, ByLikelihood, Measure
from holdfast.auditing.verify import require_entered
from holdfast.certification.behaviour import Claimed, claimed
from holdfast.certification.ledger_state import Claim
from holdfast.certification.openings import Ledger, default_ledger
from holdfast.certification.terms import Rows, Terms, require_categories, require_enough_rows
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError
from holdfast.core.units import KL_UNITS
from holdfast.data.examples import Example, make_example
from holdfast.data.sources import prompts_in_memory
from holdfast.defaults import constraint_defaults
from holdfast.judging.judge import JudgeSpec
from holdfast.records.certificate import FILE_NAME, CertificateRecord, load_certificate
from holdfast.records.certificate_table import Table, outcome_lines, read_stored, require_figures
from holdfast.screening.certify_share import CertifyShare


def open_certify(
    before: str | Path, after: str | Path, safety: str | Sequence[Example], constraint: ChanceConstraint | None = None,
    *, output: Path, by: str | None = None, also: Sequence[str] = (), kind: str = "fixed", confidence: float = 0.95,
    openings: int | None = None, pool: int | None = None, drawn: str = "groups", max_weight: int | None = None,
    source: str | None = None, train_data: Sequence[str] = (),
    train_columns: Mapping[str, str] | None = None, leakage: Leakage | None = None, ledger: Path | None = None,
    splits: Path | None = None, notes: Sequence[str] = (), setup: Setup | None = None,
    share: CertifyShare | None = None, judge: JudgeSpec | None = None, max_new_tokens: int = 128,
    progress: Progress | None = None,
) -> CertificateRecord:  # fmt: skip
    """Certify that at most a share alpha of prompts like these regress.

    The same question about the same prompts is answered from the files in `output`, without measuring again.

    Args: as of `certify`, and
        safety: the certify prompts: a file or hub data set, or examples, which came from `source`.
        constraint: alpha; by kl and likelihood tau, unit and first_k; by harm tau is a difference of probabilities.
        by: None: as the constraint's unit says; a judge makes it `harm`.
        kind: fixed, finite_pool, sequential, per_category or strength.
        pool: for `finite_pool`: size of the known list that the prompts were drawn from without replacement.
        leakage: the outcome of the search for them in `train_data`, where it was made already.
        splits: a run's splits.json, or the record of its screening, to bind.
        share: the certify prompts of a run that asked its model; `safety` are its examples.
        notes: further assumptions to state.
    """
    limit, setup = constraint or ChanceConstraint(**constraint_defaults(kl=by == "kl")), setup or Setup()
    by = "harm" if judge is not None else by or ("kl" if limit.unit in KL_UNITS else "likelihood")
    limit = replace(limit, unit="kl_token") if by == "kl" and limit.unit not in KL_UNITS else limit
    if also and by != "behaviour":
        raise ConfigError(f"--also {' '.join(also)} with --by {by}", remedy="a second claim is made by behaviour only")
    claims = tuple(dict.fromkeys((Claimed.REFUSALS, *map(claimed, also))))
    measure = _measure(by, limit, claims, max_new_tokens, output, judge, setup, progress)
    spec = CertificateSpec(
        before, after, limit, measure.by, kind, confidence, pool, drawn, max_weight, claims, setup, measure.settings()
    )
    place = safety if isinstance(safety, str) else source
    prompts = _prompts(spec, safety, source, openings)
    if share is not None and len(claims) > 1:
        prompts = replace(prompts, keep=[share.keep[name] for name in prompts.ids])
    if splits is None:
        require_not_steering(prompts.examples, after)
    leakage = leakage or require_no_leak(prompts.examples, train_data, setup.reading, train_columns)
    # Of a share it lies in the cache: beside its file of prompts, every folder would have a ledger of its own.
    path = ledger or default_ledger("" if share is not None else place or "")
    return _opened(spec, measure, prompts, openings, Sources(path, place, splits, leakage, share), output, notes)


def _opened(
    spec: CertificateSpec, measure: Measure, prompts: Prompts, openings: int | None, sources: Sources, output: Path,
    notes: Sequence[str],
) -> CertificateRecord:  # fmt: skip
    order: dict[str, Any] = {"sequential": spec.kind == "sequential", "texts": prompts.texts}
    with spec.pair() as pair:
        book = sources.book(pair.before.sha256)
        categories = dict(zip(prompts.ids, prompts.categories, strict=True))
        keep = None if prompts.keep is None else dict(zip(prompts.ids, prompts.keep, strict=True))
        claim = claim_of(spec, pair.before.sha256, pair.after.sha256, spec.claims, categories, keep)
        terms = Terms.of(spec, book.check(claim, prompts.ids, declared=openings, **order).declared)
        require_enough_rows(terms, prompts.cluster, prompts.categories)
        stored = _stored(output, claim, prompts, book)
        if stored is not None and len(set(stored[1].ids)) == len(prompts.ids):
            return stored[0]
        measure.prepare(pair, prompts, terms)
        entry = book.open(claim, prompts.ids, declared=openings, label=str(output), **order)
        terms = Terms.of(spec, entry.declared)  # another process may have declared a number since the check
        known = stored[1] if stored is not None and isinstance(stored[1], Rows) else None
        table = measure.measure(pair, prompts, terms, known)
        pair.require_unchanged()  # what was hashed is what was measured
        # Replies and judgements may differ when they are made again: their first outcome stands.
        book.settle(claim.sha256, prompts.ids, outcome_lines(table, terms.tau), first_stands=measure.settles)
        return issue(spec, measure, prompts, pair, table, terms, entry, sources, output, notes)


def _measure(
    by: str, limit: ChanceConstraint, claims: tuple[Claimed, ...], max_new_tokens: int, output: Path,
    judge: JudgeSpec | None, setup: Setup, progress: Progress | None,
) -> Measure:  # fmt: skip
    asking = Asking(max_new_tokens, setup.template)
    if by == "behaviour":
        return ByBehaviour(asking, output, claims, progress)
    if by == "harm" and judge is not None:
        return ByJudge(certificate_judge(judge, limit), asking, output, progress)
    if by == "likelihood" and limit.unit in KL_UNITS:
        raise ConfigError(f"--by likelihood with unit {limit.unit}", remedy="a divergence is certified --by kl")
    if by in ("kl", "likelihood"):
        return ByLikelihood(limit, setup.max_length, progress)
    raise ConfigError(f"--by {by} is unknown", remedy="use behaviour, kl or likelihood, or name a judge with --judge")


def _prompts(
    spec: CertificateSpec, safety: str | Sequence[Example], source: str | None, openings: int | None
) -> Prompts:
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
    require_enough_rows(Terms.of(spec, openings or 1), found.cluster, found.categories)
    return found


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
        ids = list(dict.fromkeys(table.ids))
        if set(ids) == set(prompts.ids) or (record.kind == "sequential" and ids == prompts.ids[: len(ids)]):
            require_figures(record, table)
            require_replies(record, table, output)
            require_entered(record, table, ids, book)
            return record, table
    raise ConfigError(f"{path} is a certificate of something else", remedy="name another folder with --output")


def certify(
    before: str | Path, after: str | Path, prompts: str | Path | Sequence[str | Mapping[str, object]],
    by: str = "behaviour", *, also: str | Sequence[str] = (), alpha: float = 0.05, tau: float | None = None,
    unit: str | None = None, confidence: float = 0.95, output: str | Path = "certificate",
    judge: JudgeSpec | None = None, drawn: str = "groups", max_weight: int | None = None, per_category: bool = False,
    openings: int | None = None, ledger: str | Path | None = None, train_data: str | Sequence[str] = (),
    train_columns: Mapping[str, str] | None = None, max_new_tokens: int = 128, sign: str | Path | None = None,
    progress: Progress | None = None, **setup: Any,
) -> CertificateRecord:  # fmt: skip
    """Certify that at most a share alpha of what `before` refused is no longer refused by `after`.

    Args:
        before: hub id, folder, PEFT adapter or `embedded`: what is compared with.
        after: the same: what is judged.
        prompts: that nobody looked at: a file or hub data set, texts, or rows with a `prompt`.
        by: `behaviour`; `kl` or `likelihood` give steering figures of the completions in `prompts`.
        also: `answers`: claim the same for what `before` answered.
        alpha: the share that may be lost.
        tau: by kl and likelihood: the largest acceptable degradation in nats; with a judge: of its probability.
        unit: by likelihood: nll_token, nll_sum or nll_first; by kl: kl_token or kl_first.
        confidence: 1 - delta, over all openings.
        output: folder for the certificate, its table and the replies.
        judge: count replies that it finds more harmful than before's; what `open_judge` takes.
        drawn: `rows` asserts that prompts were drawn one by one.
        max_weight: claim a share of prompts, a group of near-duplicates weighing at most this.
        per_category: one claim per category.
        openings: how often these prompts may ever be opened; declared once.
        ledger: file of the openings; beside the prompts, or in holdfast's cache for prompts in memory.
        train_data: what the prompts must not occur in.
        train_columns: our names (prompt, completion, messages, text) to those of `train_data`, of every file.
        max_new_tokens: length of the longest reply.
        sign: an OpenSSH ed25519 key to sign the certificate with.
        setup: fields of `Setup`: template, tokenizer, max_length, dtype, device, revisions, reading.

    Returns:
        The certificate; `certified` is the verdict, `statement` the sentence.

    Raises:
        ConfigError: settings that do not fit.
        DataError: bad data, or a prompt that was trained on.
        InfeasibleError: too few prompts, or an opening that was not declared.
    """
    if any(isinstance(model, int) for model in cast("tuple[Any, ...]", (before, after))):
        what = f"certify({before!r}, {after!r}, ...) got counts, expected two models"
        raise ConfigError(what, remedy="holdfast.certify_counts(regressions, n) tests a count")
    wanted = {"alpha": alpha, "tau": tau, "unit": unit}
    given: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    record = open_certify(
        before, after, str(prompts) if isinstance(prompts, str | Path) else _examples(prompts),
        ChanceConstraint(**constraint_defaults(kl=by == "kl") | given),
        by=by, also=[also] if isinstance(also, str) else also, output=Path(output), judge=judge,
        kind="per_category" if per_category else "fixed", confidence=confidence, drawn=drawn, max_weight=max_weight,
        openings=openings, ledger=None if ledger is None else Path(ledger),
        train_data=[train_data] if isinstance(train_data, str) else train_data, train_columns=train_columns,
        max_new_tokens=max_new_tokens, setup=Setup(**setup), progress=progress,
    )  # fmt: skip
    if sign is not None:
        from holdfast.certification.signing import sign as signed

        signed(Path(output) / FILE_NAME, Path(sign))
    return record


def _examples(prompts: Sequence[str | Mapping[str, object]]) -> list[Example]:
    texts = [make_example(text, "", f"prompt {i}") for i, text in enumerate(prompts) if isinstance(text, str)]
    rows = [row for row in prompts if not isinstance(row, str)]
    return [*texts, *(prompts_in_memory(rows) if rows else [])]
