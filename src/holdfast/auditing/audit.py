"""Audit: how much worse is one model than another on safety examples, for any two models, whoever made them."""

from __future__ import annotations

import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.auditing.ahead import FIRST
from holdfast.auditing.finishing import summary_of, write_audit
from holdfast.auditing.judging import Judging
from holdfast.auditing.looks import note_look, require_open
from holdfast.auditing.measure import Progress, kl_wanted
from holdfast.auditing.pair import Pair, open_pair
from holdfast.auditing.parts import Parts
from holdfast.auditing.result import Audit
from holdfast.auditing.tokenizers import Choice
from holdfast.auditing.windows import Windows, measure_windows
from holdfast.certification.openings import Ledger, default_ledger
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.file_lock import locked
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import versions
from holdfast.data.prompt_marks import prompt_marks
from holdfast.data.stream import ExampleStream, Template, open_stream
from holdfast.evaluation.judge import open_judge
from holdfast.evaluation.on_policy import require_tau
from holdfast.models.handle import DType
from holdfast.records.audit_table import SUMMARY_NAME, TABLE_NAME

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class How:
    """How an audit measures; everything here is part of what its figures are bound to.

    Attributes:
        max_length: tokens after which an example is cut; None cuts nothing.
        kl: measure KL; None: where an adapter can be switched, or the unit needs it.
        batch_tokens: padded tokens a batch; sized to memory unless given.
        judge: what `open_judge` takes, for the behaviour view.
        max_new_tokens: length of the longest reply that it sees.
        harm_tau: the largest acceptable rise of the judge's probability from one model's reply to the other's.
    """

    max_length: int | None = None
    kl: bool | None = None
    batch_tokens: int | None = None
    judge: Any = None
    max_new_tokens: int = 128
    harm_tau: float = 0.1

    def __post_init__(self) -> None:
        require_tau(self.harm_tau)


def audit(
    before: Any,
    after: Any,
    safety: Any,
    constraint: ChanceConstraint | None = None,
    *,
    output: str | Path | None = None,
    ledger: str | Path | None = None,
    open_closed: bool = False,
    judge: Any = None,
    max_new_tokens: int = 128,
    harm_tau: float = 0.1,
    dtype: DType = "auto",
    device: str | None = None,
    max_length: int | None = None,
    template: Template = "chat",
    tokenizer: Choice = "same",
    kl: bool | None = None,
    batch_tokens: int | None = None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    subset: str | None = None,
    safety_revision: str | None = None,
    before_revision: str | None = None,
    after_revision: str | None = None,
    trust_remote_code: bool = False,
    processing_class: Any = None,
    progress: Progress | None = None,
) -> Audit:
    """Measure how much worse `after` is than `before` on every safety example.

    The data is read twice and never held: a first pass checks all of it before a model is loaded, a second measures
    it in windows. With `output`, an interrupted audit continues after its last whole window.

    Args:
        before: hub id, folder, PEFT adapter (folder or hub id), `embedded`, or a loaded model.
        after: the same. Where it is an adapter on `before`, the weights are loaded once.
        safety: data file, hub id, rows or examples.
        constraint: unit, tau, alpha and first_k; the defaults of `ChanceConstraint` unless given.
        output: folder for audit.parquet and audit.json; None keeps the result in memory.
        ledger: file that the look at these prompts is entered in before they are measured; beside a safety file, or
            in holdfast's cache for a hub id, unless given. Rows in memory are entered only where it is given.
        open_closed: audit examples that are closed for the certification of a run too: it spends an opening of theirs.
        judge: name of a judge (with options as `name:option=value,...`), folder of a trained one, a judge, or a
            function (prompt, reply) -> "safe" or "unsafe"; both models then reply to every prompt, and what was safe
            before and is unsafe after is counted.
        max_new_tokens: length of the longest reply.
        harm_tau: of a judge with probabilities: how much higher one may be for the reply of `after`, in [0, 1).
        dtype: `auto` keeps each checkpoint's.
        device: the GPU where there is one, unless given.
        max_length: tokens after which an example is cut.
        template: `chat` makes conversations of prompt and completion; `none` leaves plain text plain.
        tokenizer: `same` demands that both models read the same tokens; `before`, `after`: whose to use for both;
            `own`: each its own, with unit nll_sum only.
        kl: measure KL(before || after), with both models in memory if need be; None: where an adapter can be switched.
        batch_tokens: padded tokens a batch; sized to memory unless given.
        columns: our names (prompt, completion, messages, text, category) to the data's.
        split: of a hub data set, as are `subset` and `safety_revision`.
        before_revision: of a hub id, as is `after_revision`.
        trust_remote_code: let repositories run their code; for hub ids only at a pinned commit.
        processing_class: the tokenizer of loaded models.
        progress: called with (done, total), each example counted once a model; with a judge, then again for replies.

    Raises:
        DataError: the data is malformed, listing up to 20 faults; or it holds examples that are closed.
        ConfigError: a setting cannot be used, `output` holds another audit, or the ledger cannot be written.
        CheckpointError: files are damaged, or the tokenizers differ.
    """
    if not isinstance(constraint, ChanceConstraint | None):
        raise ConfigError(
            f"constraint is a {type(constraint).__name__}, expected a ChanceConstraint",
            remedy="pass ChanceConstraint(tau=0.1, alpha=0.05)",
        )
    stream = open_stream(
        safety, columns=columns, template=template, split=split, subset=subset, revision=safety_revision
    )
    place, texts = _ledger_and_marks(safety, ledger, stream, open_closed)
    with open_pair(
        before, after, dtype=dtype, device=device, tokenizer=tokenizer, trust_remote_code=trust_remote_code,
        before_revision=before_revision, after_revision=after_revision, processing_class=processing_class,
    ) as pair:  # fmt: skip
        how = How(
            max_length=max_length, kl=kl, batch_tokens=batch_tokens, max_new_tokens=max_new_tokens, harm_tau=harm_tau,
            judge=None if judge is None else open_judge(judge),
        )  # fmt: skip
        limit = constraint or ChanceConstraint()
        settings = {"template": template, "tokenizer": tokenizer, "max_length": max_length}

        judged = Judging(how.judge, max_new_tokens) if how.judge is not None and how.judge.revision else None

        def enter() -> None:
            if place is not None:
                note_look(
                    Ledger(place), (pair.before.sha256, pair.after.sha256), texts, limit, settings, judged, harm_tau
                )

        return audit_roles(pair, {"audit": stream}, limit, how, output, progress, enter)


def _ledger_and_marks(
    safety: Any, ledger: str | Path | None, stream: ExampleStream, open_closed: bool
) -> tuple[Path | None, dict[str, str]]:
    """Where the look is entered, if anywhere, and the marks of the prompts; closed ones are refused unless asked for.

    A ledger that is named does not hide what the one beside the data says is closed.
    """
    beside = default_ledger(str(safety)) if isinstance(safety, str | Path) else None
    place = Path(ledger) if ledger is not None else beside
    if place is None:
        return None, {}
    texts = prompt_marks(stream)
    if not open_closed:
        require_open({known for known in (place, beside) if known is not None}, texts)
    return place, texts


def audit_roles(
    pair: Pair,
    streams: Mapping[str, ExampleStream],
    constraint: ChanceConstraint,
    how: How,
    output: str | Path | None = None,
    progress: Progress | None = None,
    enter: Callable[[], None] | None = None,
) -> Audit:
    """Audit an open pair on examples by role (`audit`, or a run's `constraint` and `monitor`).

    `enter` is called when everything was checked and nothing is measured yet, so that an audit that is killed counts.
    """
    kl = _kl(pair, constraint, how.kl)
    windows = Windows(streams, pair, max_length=how.max_length)
    binding = _binding(windows, constraint, how, kl)
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if output is None else Path(output)
        stack.enter_context(locked(folder / SUMMARY_NAME))  # a second audit waits, then finds this one finished
        found = _finished(folder, sha256_json(binding))
        if enter is not None:
            enter()
        if found is not None:
            return found
        parts = Parts(folder, binding)
        measure_windows(windows, parts, constraint, kl=kl, batch_tokens=how.batch_tokens, progress=progress)
        verdicts, behaviour = _behaviour(pair, streams, how, progress)
        pair.require_unchanged()
        values = summary_of(pair, streams, constraint, windows, parts) | {"behaviour": behaviour}
        values |= {"binding": parts.sha256, "versions": binding["versions"]}
        values |= {"seconds": round(time.monotonic() - started, 3)}
        write_audit(folder, values, windows, parts, constraint, verdicts)
        parts.remove()
        found = Audit.load(folder)
        return found if output is not None else replace(found, folder=None)


def _kl(pair: Pair, constraint: ChanceConstraint, kl: bool | None) -> bool:
    """Whether KL is measured; refuses units that the tokenizers leave undefined."""
    if pair.tokenizers.own and constraint.unit != "nll_sum":
        raise UnsupportedError(
            f"unit {constraint.unit!r} is not defined across tokenizers: it is counted in tokens",
            remedy="use unit nll_sum, or read both models with one tokenizer (tokenizer: before or after)",
        )
    if constraint.unit == "kl_token":
        kl = True
    return kl_wanted(pair, kl)


def _binding(windows: Windows, constraint: ChanceConstraint, how: How, kl: bool) -> dict[str, Any]:
    """Everything that the figures depend on."""
    pair, streams = windows.pair, windows.streams
    return {
        "before": pair.before.sha256, "after": pair.after.sha256, "mode": pair.mode, "dtype": pair.asked_dtype,
        "device": pair.device.type, "tokenizer": pair.tokenizers.tokenizer_sha256,
        "template": pair.tokenizers.template_sha256, "chat": {role: s.chat for role, s in streams.items()},
        "data": {role: stream.sha256 for role, stream in streams.items()}, "unit": constraint.unit,
        "tau": constraint.tau, "alpha": constraint.alpha, "first_k": constraint.first_k,
        "max_length": how.max_length, "kl": kl, "batch_tokens": how.batch_tokens, "window": [FIRST, windows.size],
        "judge": _judge(how.judge), "versions": versions(),
        "max_new_tokens": how.max_new_tokens if how.judge else None,
    } | ({"harm_tau": how.harm_tau} if how.judge else {})  # fmt: skip


def _judge(judge: Any) -> list[str] | None:
    """The judge's name and revision; an unknown one is refused before anything is measured.

    A judge without a revision, such as a plain function, may have changed since: it never matches an earlier audit.
    """
    if judge is None:
        return None
    found = open_judge(judge)
    return [found.name, found.revision or uuid.uuid4().hex]


def _finished(folder: Path, binding: str) -> Audit | None:
    """The audit that is there already; another one is left alone."""
    place = folder / SUMMARY_NAME
    if not place.exists() and not (folder / TABLE_NAME).exists():
        return None
    if place.exists() and (found := Audit.load(folder)).binding == binding:
        logger.info("this audit is finished already: %s", folder)
        return found
    raise ConfigError(
        f"{folder} holds the audit of other models, data or settings", remedy="name another folder (--output, output=)"
    )


def _behaviour(
    pair: Pair, streams: Mapping[str, ExampleStream], how: How, progress: Progress | None
) -> tuple[Any, dict[str, Any] | None]:
    if how.judge is None:
        return None, None
    from holdfast.auditing.behaviour import behaviour_view

    examples = [example for stream in streams.values() for example in stream]
    template: Template = "chat" if any(stream.chat for stream in streams.values()) else "none"

    def replied(side: str, done: int) -> None:
        if progress is not None:
            progress(done + (len(examples) if side == "after" else 0), 2 * len(examples))

    seen = behaviour_view(
        pair, examples, how.judge, max_new_tokens=how.max_new_tokens, tau=how.harm_tau, template=template,
        progress=replied,
    )  # fmt: skip
    return seen, seen.to_json()
