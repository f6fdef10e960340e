"""`holdfast.certify`: the certificate of two models, from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.auditing.certificate_spec import Setup
from holdfast.auditing.measure import Progress
from holdfast.auditing.opening import open_certify
from holdfast.certification.record import CertificateRecord
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError
from holdfast.data.examples import Example, make_example
from holdfast.data.prompts import prompts_in_memory
from holdfast.evaluation.judge import JudgeSpec

Prompts = str | Path | Sequence[str | Mapping[str, Any]]


def certify(
    before: str | Path,
    after: str | Path,
    prompts: Prompts,
    by: str = "behaviour",
    *,
    also: str | Sequence[str] = (),
    alpha: float = 0.05,
    tau: float | None = None,
    unit: str | None = None,
    confidence: float = 0.95,
    output: str | Path = "certificate",
    judge: JudgeSpec | None = None,
    drawn: str = "groups",
    max_weight: int | None = None,
    per_category: bool = False,
    openings: int | None = None,
    ledger: str | Path | None = None,
    train_data: str | Sequence[str] = (),
    max_new_tokens: int = 128,
    sign: str | Path | None = None,
    progress: Progress | None = None,
    **setup: Any,
) -> CertificateRecord:
    """Certify that at most a share alpha of what `before` refused is no longer refused by `after`.

    Args:
        before: hub id, folder, PEFT adapter or `embedded`: what is compared with.
        after: the same: what is judged.
        prompts: that nobody looked at: a file or hub data set, texts, or rows with a `prompt`.
        by: `behaviour`; `kl` or `likelihood` give steering figures of the completions in `prompts`.
        also: `answers`: claim the same for what `before` answered.
        alpha: the share that may be lost.
        tau: by kl and likelihood: the largest acceptable degradation in nats; with a judge: of its probability.
        unit: by likelihood: nll_token, nll_sum or nll_first.
        confidence: 1 - delta, over all openings.
        output: folder for the certificate, its table and the replies.
        judge: count replies that it finds more harmful than before's; what `open_judge` takes.
        drawn: `rows` asserts that prompts were drawn one by one.
        max_weight: claim a share of prompts, a group of near-duplicates weighing at most this.
        per_category: one claim per category.
        openings: how often these prompts may ever be opened; declared once.
        ledger: file of the openings; beside the prompts, or in holdfast's cache for prompts in memory.
        train_data: what the prompts must not occur in.
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
    given: Any = (before, after)
    if any(isinstance(one, int) for one in given):
        raise ConfigError(
            f"certify({before!r}, {after!r}, ...) got counts, expected two models",
            remedy="holdfast.certify_counts(regressions, n) tests a count",
        )
    wanted: dict[str, Any] = {"alpha": alpha, "tau": tau, "unit": unit}
    limit = ChanceConstraint(**{name: value for name, value in wanted.items() if value is not None})
    record = open_certify(
        before, after, str(prompts) if isinstance(prompts, str | Path) else _examples(prompts), limit,
        by=by, also=[also] if isinstance(also, str) else also, output=Path(output), judge=judge,
        kind="per_category" if per_category else "fixed", confidence=confidence, drawn=drawn, max_weight=max_weight,
        openings=openings, ledger=None if ledger is None else Path(ledger),
        train_data=[train_data] if isinstance(train_data, str) else train_data, max_new_tokens=max_new_tokens,
        setup=Setup(**setup), progress=progress,
    )  # fmt: skip
    if sign is not None:
        from holdfast.certification.record import FILE_NAME
        from holdfast.certification.signing import sign as signed

        signed(Path(output) / FILE_NAME, Path(sign))
    return record


def _examples(prompts: Sequence[str | Mapping[str, Any]]) -> list[Example]:
    texts = [make_example(text, "", f"prompt {i}") for i, text in enumerate(prompts) if isinstance(text, str)]
    rows = [row for row in prompts if not isinstance(row, str)]
    return [*texts, *(prompts_in_memory(rows) if rows else [])]
