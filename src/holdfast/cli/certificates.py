"""What `holdfast certify` opens: prompts for two models, the certify shares of a finished run, or two evaluation logs.

A run's set of given pairs gets a certificate of its own; those that were built by asking get one together.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.auditing.certificate_spec import Leakage, Setup
from holdfast.auditing.log_certificate import certify_logs
from holdfast.auditing.opening import open_certify
from holdfast.cli.options import column_mapping
from holdfast.cli.progress import FORWARD, show_count
from holdfast.cli.terminal import interruptible, quiet_libraries
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.files import require_writable
from holdfast.core.units import KL_UNITS
from holdfast.data.split_record import RECORD_NAME
from holdfast.defaults import constraint_defaults, default
from holdfast.records.certificate import CertificateRecord
from holdfast.runs.config import stored_config
from holdfast.runs.load_finished import FinishedRun, FinishedSet, finished_run
from holdfast.screening.certify_share import PROMPTS

STEERING = ("kl", "likelihood")
LOGGED = ("threshold", "epochs")
_LIMIT = ("unit", "first_k", "allow_tau_below_noise")
_READING = ("split", "subset", "revision", "columns")
_SETUP = ("template", "tokenizer", "max_length", "before_revision", "after_revision")
Values = dict[str, Any]  # the options of the command by name; `given` are those of `--set`
Issued = dict[str, tuple[Path, CertificateRecord]]
"""Certificates by safety set (`""` where there is one), each with its folder."""


def of_pair(values: Values, kind: str) -> Issued:
    """The certificate of two models on prompts that nobody looked at."""
    given = values["given"]
    if logged := sorted(set(given) & set(LOGGED)):
        raise ConfigError(f"--set {', '.join(logged)}: of evaluation logs only", remedy="leave it out")
    setup = Setup(
        **{name: given[name] for name in _SETUP if name in given}, dtype=values["dtype"], device=values["device"],
        reading={name: given[name] for name in _READING if name in given},
        trust_remote_code=values["trust_remote_code"],
    )  # fmt: skip
    place = values["output"] or Path("certificate")
    record = _opened(
        values, values["before"], values["after"], values["prompts"], _limit(values, values["alpha"]),
        kind=kind, output=place, openings=values["openings"], train_data=values["train_data"] or (),
        train_columns=column_mapping(values["train_columns"], "--train-columns"), setup=setup,
    )  # fmt: skip
    return {"": (place, record)}


def of_logs(values: Values, kind: str) -> Issued:
    """The certificate of two evaluation logs."""
    place = values["output"] or Path("certificate")
    require_writable(place)
    if other := sorted(set(values["given"]) - set(LOGGED)):
        raise ConfigError(f"--set {', '.join(other)}: not of evaluation logs", remedy="leave it out")
    record = certify_logs(
        Path(values["before"]), Path(values["after"]), output=place, score=values["score"], kind=kind,
        alpha=default("constraint.alpha") if values["alpha"] is None else values["alpha"],
        **{name: values[name] for name in ("confidence", "drawn", "max_weight", "openings", "ledger")},
        **values["given"],
    )  # fmt: skip
    return {"": (place, record)}


def of_run(values: Values, kind: str) -> Issued:
    """The certificates of a finished run."""
    quiet_libraries()  # reading a run loads them
    run = finished_run(values["run"])
    own = sorted(set(values["given"]) - {"max_new_tokens"})
    own += ["tau"] if values["tau"] is not None and values["judge"] is None else []
    if own:
        raise ConfigError(f"{', '.join(own)}: a run's own settings hold", remedy="leave it out")
    pairs, asked = ([held for held in run.sets if (held.keep is None) == given] for given in (True, False))
    refusals = [held for held in asked if held.keep == "refusals"]
    if asked:
        _require_replies(values, asked, refusals)
    count, confidence = len(pairs) + bool(asked), values["confidence"]
    notes = [] if count == 1 else [
        f"Each of the {count} safety sets is certified at confidence {confidence:g} of its own; that all statements "
        "hold together is less certain than that."
    ]  # fmt: skip
    issued: Issued = {}
    for held in [*pairs, *refusals[:1]]:
        name = held.name if count > 1 else ""
        place = held.folder if values["output"] is None else values["output"] / name
        if held.keep is None:
            issued[name] = (place, _of_pairs(values, kind, held, place, notes))
        else:
            also = [other for other in asked if other.keep == "answers" and "answers" in (values["also"] or ())]
            issued[name] = (place, _of_share(values, kind, run, [*refusals, *also], place, notes))
    return issued


def _limit(values: Values, alpha: float | None) -> ChanceConstraint:
    given = {name: values["given"][name] for name in _LIMIT if name in values["given"]}
    given |= {} if values["tau"] is None else {"tau": values["tau"]}
    if values["by"] not in STEERING and (other := set(given) - ({"tau"} if values["judge"] else set())):
        what = f"{', '.join(sorted(other))}: a certificate by behaviour has no such limit"
        raise ConfigError(what, remedy="leave it out, or certify --by likelihood or kl")
    given |= {} if alpha is None else {"alpha": alpha}
    return ChanceConstraint(**constraint_defaults(kl=values["by"] == "kl") | given)


def _opened(values: Values, *question: Any, **options: Any) -> CertificateRecord:
    quiet_libraries()
    names = ("confidence", "pool", "ledger", "judge", "by", "drawn", "max_weight")
    options |= {name: values[name] for name in names} | {"also": values["also"] or ()}
    options |= {name: values["given"][name] for name in ("max_new_tokens",) if name in values["given"]}
    require_writable(options["output"])  # an opening must not be spent on a certificate that cannot be kept
    shown = ("measured", FORWARD) if _steers(values) else ("asked", "replies")
    advice = "what was asked and opened stays, and the same command continues it"
    with interruptible(advice), show_count(*shown) as progress:
        return open_certify(*question, progress=progress, **options)


def _steers(values: Values) -> bool:
    return values["by"] in STEERING and values["judge"] is None


def _require_replies(values: Values, asked: list[FinishedSet], refusals: list[FinishedSet]) -> None:
    names = ", ".join(held.name for held in asked)
    if _steers(values):
        raise UnsupportedError(
            f"--by {values['by']} of {names}: these sets were built by asking the model, and their certify prompts "
            "carry no replies to take a likelihood of",
            remedy="leave out --by (behaviour); `holdfast audit RUN` has the figures of the replies that are held",
        )
    if not refusals:
        what = f"{names}: the run keeps answers only, and a certificate claims that refusals are kept"
        remedy = "hold refusals too (`safety: auto`), or name prompts: --before MODEL --after ADAPTER --prompts FILE"
        raise ConfigError(what, remedy=remedy)


def _setup(values: Values, held: FinishedSet, reading: dict[str, Any]) -> Setup:
    return Setup(
        template=held.template, max_length=held.max_length, device=values["device"],
        dtype=held.dtype if values["dtype"] == "auto" else values["dtype"], before_revision=held.revision,
        tokenizer="after", reading=reading, trust_remote_code=values["trust_remote_code"],
    )  # fmt: skip


def _of_pairs(values: Values, kind: str, held: FinishedSet, place: Path, notes: list[str]) -> CertificateRecord:
    block = stored_config(values["run"] / "config.yaml").safety[held.name].model_dump()
    reading = {name: block[name] for name in ("columns", "split", "subset", "limit", "revision") if block[name]}
    # Reading a finished run refuses certify prompts that its task data holds, so that search was made.
    searched = Leakage(checked=True, against=f"the task data of {values['run']}", prompts=len(held.split.certify))
    steering = _steers(values)
    if steering and (held.constraint.unit in KL_UNITS) != (values["by"] == "kl"):
        remedy = f"certify --by {'kl' if held.constraint.unit in KL_UNITS else 'likelihood'}, or by behaviour"
        raise ConfigError(f"the run limits {held.constraint.unit}, which is not --by {values['by']}", remedy=remedy)
    limit = held.constraint if steering else replace(_limit(values, held.constraint.alpha), buffer=0.0)
    return _opened(
        values, held.before, held.after, held.split.certify, limit, kind=kind, output=place, openings=held.openings,
        source=held.source, splits=held.folder / RECORD_NAME, leakage=searched, setup=_setup(values, held, reading),
        notes=notes,
    )  # fmt: skip


def _of_share(
    values: Values, kind: str, run: FinishedRun, sets: list[FinishedSet], place: Path, notes: list[str]
) -> CertificateRecord:
    share, first = run.share(sets), sets[0]
    alpha = min(held.constraint.alpha for held in sets if held.keep == "refusals")
    searched = Leakage(checked=True, against=f"the trained rows of {values['run']}", prompts=len(share.examples))
    require_writable(place)
    return _opened(
        values, first.before, first.after, share.examples, replace(_limit(values, alpha), buffer=0.0), kind=kind,
        output=place, openings=min(held.openings for held in sets), source=str(share.write(place / PROMPTS)),
        splits=run.record, leakage=searched, setup=_setup(values, first, {}), share=share, notes=notes,
    )  # fmt: skip
