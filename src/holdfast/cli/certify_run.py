"""`holdfast certify RUN`: the certificates of a finished run.

A safety set of given pairs gets one of its own. The sets that were built by asking the model get one together: it opens
the certify prompts of those that keep refusals, and with `--also answers` of those that keep answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.auditing.certificate_spec import Setup
from holdfast.auditing.certify_prompts import Leakage
from holdfast.certification.record import CertificateRecord
from holdfast.config import load_config
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.files import require_writable
from holdfast.data.split_record import RECORD_NAME
from holdfast.finished import FinishedRun, FinishedSet, finished_run
from holdfast.screening.certify_share import PROMPTS

STEERING = ("kl", "likelihood")
Open = Callable[..., CertificateRecord]
Limit = Callable[[dict[str, Any], float | None], ChanceConstraint]
Found = dict[str, tuple[Path, CertificateRecord]]


def certify_run(values: dict[str, Any], kind: str, opened: Open, limit: Limit) -> Found:
    """The certificates of a run, by safety set (`""` where there is one), each with its folder.

    Args:
        values: the options.
        opened: opens prompts with the options.
        limit: the limit of a certificate that is not by likelihood, from the options and alpha.
    """
    run = finished_run(values["run"])
    strange = sorted(set(values["given"]) - {"max_new_tokens"})
    strange += ["tau"] if values["tau"] is not None and values["judge"] is None else []
    if strange:
        raise ConfigError(f"{', '.join(strange)}: a run's own settings hold", remedy="leave it out")
    pairs, asked = [one for one in run.sets if one.keep is None], [one for one in run.sets if one.keep is not None]
    refusals = [one for one in asked if one.keep == "refusals"]
    if asked:
        _require_replies(values, asked, refusals)
    several = len(pairs) + bool(asked) > 1
    notes = _several(len(pairs) + bool(asked), values["confidence"])
    found: Found = {}
    for one in pairs:
        name = one.name if several else ""
        place = one.folder if values["output"] is None else values["output"] / name
        found[name] = (place, _of_pairs(values, kind, one, place, opened, limit, notes))
    if asked:
        name = refusals[0].name if several else ""
        place = refusals[0].folder if values["output"] is None else values["output"] / name
        chosen = [*refusals, *(one for one in asked if one.keep == "answers" and "answers" in (values["also"] or ()))]
        found[name] = (place, _of_share(values, kind, run, chosen, place, opened, limit, notes))
    return found


def _require_replies(values: dict[str, Any], asked: list[FinishedSet], refusals: list[FinishedSet]) -> None:
    """Refuse what the certify prompts of sets that were built by asking cannot answer."""
    names = ", ".join(one.name for one in asked)
    if values["by"] in STEERING and values["judge"] is None:
        raise UnsupportedError(
            f"--by {values['by']} of {names}: these sets were built by asking the model, and their certify prompts "
            "carry no replies to take a likelihood of",
            remedy="leave out --by (behaviour); `holdfast audit RUN` has the figures of the replies that are held",
        )
    if not refusals:
        raise ConfigError(
            f"{names}: the run keeps answers only, and a certificate claims that refusals are kept",
            remedy="hold refusals too (`safety: auto`), or name prompts: --before MODEL --after ADAPTER --prompts FILE",
        )


def _setup(values: dict[str, Any], one: FinishedSet, reading: dict[str, Any]) -> Setup:
    return Setup(
        template=one.template, max_length=one.max_length, device=values["device"],
        dtype=one.dtype if values["dtype"] == "auto" else values["dtype"], before_revision=one.revision,
        tokenizer="after", reading=reading, trust_remote_code=values["trust_remote_code"],
    )  # fmt: skip


def _of_pairs(
    values: dict[str, Any], kind: str, one: FinishedSet, place: Path, opened: Open, limit: Limit, notes: list[str]
) -> CertificateRecord:
    """The certificate of a set of given pairs."""
    block = load_config(values["run"] / "config.yaml").safety[one.name].model_dump()
    reading = {name: block[name] for name in ("columns", "split", "subset", "limit", "revision") if block[name]}
    # Reading a finished run refuses certify prompts that its task data holds, so that search was made.
    searched = Leakage(checked=True, against=f"the task data of {values['run']}", prompts=len(one.split.certify))
    steering = values["by"] in STEERING and values["judge"] is None
    if steering and (one.constraint.unit == "kl_token") != (values["by"] == "kl"):
        raise ConfigError(
            f"the run limits {one.constraint.unit}, which is not --by {values['by']}",
            remedy=f"certify --by {'kl' if one.constraint.unit == 'kl_token' else 'likelihood'}, or by behaviour",
        )
    return opened(
        values, one.before, one.after, one.split.certify,
        one.constraint if steering else replace(limit(values, one.constraint.alpha), buffer=0.0), kind=kind,
        output=place, openings=one.openings, source=one.source, splits=one.folder / RECORD_NAME, leakage=searched,
        setup=_setup(values, one, reading), notes=notes,
    )  # fmt: skip


def _of_share(
    values: dict[str, Any],
    kind: str,
    run: FinishedRun,
    sets: list[FinishedSet],
    place: Path,
    opened: Open,
    limit: Limit,
    notes: list[str],
) -> CertificateRecord:
    """The certificate of the sets that were built by asking; the smallest alpha among those of refusals holds."""
    share, first = run.share(sets), sets[0]
    refusals = [one for one in sets if one.keep == "refusals"]
    alpha = min(one.constraint.alpha for one in refusals)
    searched = Leakage(checked=True, against=f"the trained rows of {values['run']}", prompts=len(share.examples))
    require_writable(place)
    return opened(
        values, first.before, first.after, share.examples, replace(limit(values, alpha), buffer=0.0), kind=kind,
        output=place, openings=min(one.openings for one in sets), source=str(share.write(place / PROMPTS)),
        splits=run.record, leakage=searched, setup=_setup(values, first, {}), share=share, notes=notes,
    )  # fmt: skip


def _several(certificates: int, confidence: float) -> list[str]:
    if certificates == 1:
        return []
    return [
        f"Each of the {certificates} safety sets is certified at confidence {confidence:g} of its own; that all "
        "statements hold together is less certain than that."
    ]
