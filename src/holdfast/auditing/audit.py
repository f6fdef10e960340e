"""Audit: how much worse is one model than another on safety examples, for any two models, whoever made them."""

import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.auditing.behaviour import Behaviour, behaviour_view, judge_record
from holdfast.auditing.endpoint import GivenModel
from holdfast.auditing.measure import Progress, kl_wanted
from holdfast.auditing.model_ref import Choice
from holdfast.auditing.pair import Pair, open_pair
from holdfast.auditing.results import PartialResults, write_audit
from holdfast.auditing.sharing import ALONE, Sharing
from holdfast.auditing.windows import FIRST, Windows, measure_windows, require_served
from holdfast.certification.ledger_state import look_sha256
from holdfast.certification.openings import Ledger, default_ledger
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.file_lock import locked
from holdfast.core.hashing import sha256_json
from holdfast.core.library_types import Tokenizer
from holdfast.core.provenance import versions
from holdfast.core.units import KL_UNITS
from holdfast.data.shingles import prompt_marks
from holdfast.data.stream import ExampleStream, Template, open_stream
from holdfast.defaults import constraint_defaults
from holdfast.judging.judge import open_judge
from holdfast.judging.on_policy import UNIT, require_tau
from holdfast.models.handle import DType
from holdfast.records.audit import Audit
from holdfast.records.audit_folder import SUMMARY_NAME, TABLE_NAME

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditOptions:
    """How an audit measures, with the names and defaults of `audit`; all of it is part of what figures are bound to."""

    max_length: int | None = None
    kl: bool | None = None
    batch_tokens: int | None = None
    judge: Any = None
    max_new_tokens: int = 128
    harm_tau: float = 0.1

    def __post_init__(self) -> None:
        require_tau(self.harm_tau)


def audit(
    before: GivenModel, after: GivenModel, safety: Any, constraint: ChanceConstraint | None = None, *,
    output: str | Path | None = None, ledger: str | Path | None = None, open_closed: bool = False,
    judge: Any = None, max_new_tokens: int = 128, harm_tau: float = 0.1,
    dtype: DType = "auto", device: str | None = None, max_length: int | None = None, template: Template = "chat",
    tokenizer: Choice = "same", kl: bool | None = None, batch_tokens: int | None = None,
    columns: Mapping[str, str] | None = None, split: str | None = None, subset: str | None = None,
    safety_revision: str | None = None, before_revision: str | None = None, after_revision: str | None = None,
    trust_remote_code: bool = False, processing_class: Tokenizer | None = None,
    progress: Progress | None = None, sharing: Sharing = ALONE,
) -> Audit:  # fmt: skip
    """Measure how much worse `after` is than `before` on every safety example.

    The data is read twice and never held: a first pass checks all of it before a model is loaded, a second measures
    it in windows. With `output`, an interrupted audit continues after its last whole window.

    Args:
        before: hub id, folder, PEFT adapter (folder or hub id), `embedded`, a loaded model, or a model behind an
            OpenAI-compatible server: `endpoint:base_url=...,model_name=...,tokenizer=...`.
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
        dtype: `auto` is each checkpoint's, float32 on a CPU that is slow in bfloat16.
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
        sharing: the processes that audit together, all of which call this; one by default.

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
    reading: dict[str, Any] = {"columns": columns, "split": split, "subset": subset, "revision": safety_revision}
    stream = open_stream(safety, template=template, **reading)
    beside = default_ledger(str(safety)) if isinstance(safety, str | Path) else None
    place = Path(ledger) if ledger is not None else beside
    texts = {} if place is None else prompt_marks(stream)
    # A ledger that is named does not hide what the one beside the data says is closed: nothing could certify the run.
    known = {path for path in (place, beside) if path is not None and not open_closed}
    for share in (closed for path in known for closed in Ledger(path).closed(list(texts), texts=texts)):
        raise DataError(
            f"{len(share.ids)} of {len(texts)} examples are closed for certification of {share.run}",
            remedy=f"use `holdfast audit {share.run}`, which leaves them closed, or --open (open_closed=True) to spend "
            "an opening",
        )
    with open_pair(
        before, after, dtype=dtype, device=device, tokenizer=tokenizer, trust_remote_code=trust_remote_code,
        before_revision=before_revision, after_revision=after_revision, processing_class=processing_class,
    ) as pair:  # fmt: skip
        options = AuditOptions(
            max_length, kl, batch_tokens, None if judge is None else open_judge(judge), max_new_tokens, harm_tau
        )
        with_kl = pair.switchable and not pair.tokenizers.own and kl is not False
        limit = constraint or ChanceConstraint(**constraint_defaults(kl=with_kl))
        settings = {"template": template, "tokenizer": tokenizer, "max_length": max_length}

        def enter() -> None:
            if place is not None:
                _note_look(Ledger(place), pair, texts, limit, settings, options)

        return audit_roles(pair, {"audit": stream}, limit, options, output, progress, enter, sharing)


def _note_look(
    ledger: Ledger, pair: Pair, texts: Mapping[str, str], limit: ChanceConstraint, settings: Mapping[str, object],
    options: AuditOptions,
) -> None:  # fmt: skip
    """Enter the look into the ledger of these prompts: another claim on them can no longer certify undeclared.

    With a judge that a certificate could be bound to, the audit is a second look: at the on-policy regressions.
    """
    unseen = uuid.uuid4().hex if pair.served else ""  # an endpoint may serve another model each time: a look of its own
    asked: list[tuple[str, float, Mapping[str, Any]]] = [(limit.unit, limit.tau, settings)]
    if options.judge is not None and options.judge.revision:
        judge = judge_record(options.judge, options.max_new_tokens)
        asked.append((UNIT, options.harm_tau, {**settings, "judge": judge}))
    for unit, tau, read in asked:
        look = look_sha256(pair.before.sha256, pair.after.sha256 + unseen, unit, tau, limit.alpha, limit.first_k, read)
        ledger.record_look(look, list(texts), texts=texts)
    logger.info("the look at these prompts is noted in %s", ledger.path)


def audit_roles(
    pair: Pair, streams: Mapping[str, ExampleStream], constraint: ChanceConstraint, options: AuditOptions,
    output: str | Path | None = None, progress: Progress | None = None, enter: Callable[[], None] | None = None,
    sharing: Sharing = ALONE,
) -> Audit:  # fmt: skip
    """Audit an open pair on examples by role (`audit`, or a run's `constraint` and `monitor`).

    `enter` is called when everything was checked and nothing is measured yet, so that an audit that is killed counts.
    """
    pair.tokenizers.require_unit(constraint.unit)
    kl = kl_wanted(pair, True if constraint.unit in KL_UNITS else options.kl)
    if options.judge is not None:
        _require_replies(pair, sharing)
    windows = Windows(streams, pair, max_length=options.max_length, sharing=sharing)
    binding = _binding(windows, constraint, options, kl)
    sharing.require_same("models, data or settings", sha256_json(binding))
    started = time.monotonic()
    with ExitStack() as stack:
        kept = None if output is None or not sharing.leads else Path(output)
        folder = kept or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(locked(folder / SUMMARY_NAME))  # a second audit waits, then finds this one finished

        def begin() -> Audit | None:
            finished = _finished(folder, sha256_json(binding), pair)
            if finished is None:
                require_served(windows, constraint.first_k)
            if enter is not None:
                enter()
            return finished

        if (finished := sharing.first(begin)) is not None:
            return finished
        parts = PartialResults(folder, binding)
        measure_windows(windows, parts, constraint, kl=kl, batch_tokens=options.batch_tokens, progress=progress)
        behaviour = None if options.judge is None else _behaviour(pair, streams, options, progress)
        pair.require_unchanged()
        seconds = round(time.monotonic() - started, 3)
        facts = {"binding": parts.sha256, "versions": binding["versions"], "seconds": seconds}
        whole = (folder, pair, streams, windows.count, parts, constraint, behaviour, facts)
        measured = sharing.first(lambda: write_audit(*whole))
        parts.remove()
        return measured if output is not None else replace(measured, folder=None)


def _require_replies(pair: Pair, sharing: Sharing) -> None:
    """Refuse a judge where no replies can be had."""
    if pair.served:
        raise UnsupportedError(
            f"a judge with {pair.ref(pair.served[0]).ref}: an audit of an endpoint reads logprobs and has no replies",
            remedy="leave the judge out; `holdfast evaluate --engine endpoint` asks and judges",
        )
    if sharing.world > 1:
        what = f"a judge in an audit on {sharing.world} processes: replies are made by one"
        raise UnsupportedError(what, remedy="leave the judge out, or audit in one process")


def _binding(windows: Windows, constraint: ChanceConstraint, options: AuditOptions, kl: bool) -> dict[str, object]:
    """Everything that the figures depend on.

    A judge without a revision, such as a plain function, may have changed since: it never matches an earlier audit.
    """
    pair, streams = windows.pair, windows.streams
    judge = None if options.judge is None else open_judge(options.judge)
    return {
        "before": pair.before.sha256, "after": pair.after.sha256, "mode": pair.mode, "dtype": pair.bound_dtype,
        "device": pair.device.type, "tokenizer": pair.tokenizers.tokenizer_sha256,
        "template": pair.tokenizers.template_sha256, "chat": {role: s.chat for role, s in streams.items()},
        "data": {role: stream.sha256 for role, stream in streams.items()}, "unit": constraint.unit,
        "tau": constraint.tau, "alpha": constraint.alpha, "first_k": constraint.first_k,
        "max_length": options.max_length, "kl": kl, "batch_tokens": options.batch_tokens,
        "window": [FIRST, windows.size], "versions": versions(),
        "judge": None if judge is None else [judge.name, judge.revision or uuid.uuid4().hex],
        "max_new_tokens": options.max_new_tokens if judge else None,
    } | ({"harm_tau": options.harm_tau} if judge else {})  # fmt: skip


def _finished(folder: Path, binding: str, pair: Pair) -> Audit | None:
    place = folder / SUMMARY_NAME
    if not place.exists() and not (folder / TABLE_NAME).exists():
        return None
    what = f"{folder} holds the audit of other models, data or settings"
    if pair.served:
        what = f"{folder} holds a finished audit, and what an endpoint serves may have changed since"
    elif place.exists() and (stored := Audit.load(folder)).binding == binding:
        logger.info("this audit is finished already: %s", folder)
        return stored
    raise ConfigError(what, remedy="name another folder (--output, output=)")


def _behaviour(
    pair: Pair, streams: Mapping[str, ExampleStream], options: AuditOptions, progress: Progress | None
) -> Behaviour:
    examples = [example for stream in streams.values() for example in stream]

    def replied(side: str, done: int) -> None:
        if progress is not None:
            progress(done + (len(examples) if side == "after" else 0), 2 * len(examples))

    return behaviour_view(
        pair, examples, options.judge, max_new_tokens=options.max_new_tokens, tau=options.harm_tau,
        template="chat" if any(stream.chat for stream in streams.values()) else "none", progress=replied,
    )  # fmt: skip
