"""Whether a run's certify shares can certify at all, known before it is trained; and their entry in the ledger."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from holdfast.certification.binomial import fewest_prompts, most_regressions
from holdfast.certification.openings import Ledger, ScopedLedger, default_ledger
from holdfast.core.errors import ConfigError
from holdfast.core.files import unwritable
from holdfast.core.percent import exact_percent
from holdfast.data.bundled import KINDS, bundled, public_ids
from holdfast.data.examples import Example, prompt_text
from holdfast.data.near_duplicates import clusters
from holdfast.data.shingles import prompt_marks
from holdfast.data.split_record import SplitRecord
from holdfast.data.splits import Split
from holdfast.defaults import default
from holdfast.runs.config import RunConfig
from holdfast.runs.config.resolve import ResolvedRun
from holdfast.runs.stages.prepare import Prepared
from holdfast.screening.settings import Keep, uses_of

logger = logging.getLogger(__name__)

CONFIDENCE: float = default("certify.confidence")
_REMEDY = "Declare `openings: {}` under `safety` before the first opening, or use other prompts"


def warn_about_data(plan: ResolvedRun, data: Prepared) -> None:
    """Log which data are given and not used, and which written safety sets cannot, or only just, certify the run."""
    config = plan.config
    unused = {"harmful": config.harmful is not None and data.harmful is None}
    unused["unaligned"] = config.unaligned is not None and "unaligned" not in plan.needs
    for key in (key for key, given in unused.items() if given):
        logger.warning("`%s` is given, and %s does not use it in this stage", key, config.defense.name)
    warn_of_shares(plan, data, list(data.safety))


def warn_of_shares(plan: ResolvedRun, data: Prepared, names: Sequence[str], scope: str = "") -> None:
    """Log which certify shares are too small, or opened already; `scope` as in `ledger_of`, of sets that were asked."""
    for name in names:
        notes = share_notes(plan, name, data.safety[name], scope if name in plan.config.prompt_sets else None)
        for found in filter(None, notes.values()):
            logger.warning("%s: %s", name, found)


def share_notes(plan: ResolvedRun, name: str, split: Split, scope: str | None = None) -> dict[str, str | None]:
    """What to know about the size of a set's certify share, and about its openings."""
    block, run = plan.config.safety[name], plan.config.output_dir
    alpha, openings = plan.constraints[name].alpha, block.openings
    return {
        "certify_note": certify_note(split.record, alpha=alpha, openings=openings),
        "openings_note": openings_note(block.data, split.certify, openings=openings, run=run, scope=scope),
    }


def certify_note(record: SplitRecord, *, alpha: float, openings: int) -> str | None:
    """What to know about a certify share that is absent, too small, or just large enough; None when it has room.

    Near-duplicate prompts count as one; each opening gets an equal part of the allowed error.
    """
    share = record.fractions[2] if record.fractions is not None else 0.0
    return _enough_note(record.clusters["certify"], record.counts["certify"], share, alpha=alpha, openings=openings)


def bundled_share(prompts: Sequence[str], keep: Keep, limit: int | None = None) -> list[Example]:
    """The certify prompts that a set has before its model is asked: whole bundled kinds of the sources it names."""
    names = [name for name in prompts if name in KINDS and "certify" in uses_of(name, keep)]
    return [example for name in names for example in bundled(name, "certify", limit)]


def asked_note(
    prompts: Sequence[str], keep: Keep, *, alpha: float, openings: int, limit: int | None = None
) -> str | None:
    """How many certify prompts a set has whose model was not asked yet: of the bundled prompts alone.

    Only those count that the model before refuses (or answers), which nobody knows yet.
    """
    certify = bundled_share(prompts, keep, limit)
    if not certify:
        return "no bundled certify prompts: they can come from dropped task rows alone, once the model is asked"
    groups = len(set(clusters([prompt_text(example) for example in certify])))
    if most_regressions(groups, alpha, CONFIDENCE, parts=openings) is None:
        return _enough_note(groups, len(certify), 0.0, alpha=alpha, openings=openings)
    verb = "refuses" if keep == "refusals" else "answers"
    needed = fewest_prompts(alpha, CONFIDENCE, parts=openings)
    return f"up to {groups} certify prompts: those that the model {verb} count, and {needed} are needed"


def _enough_note(n: int, rows: int, share: float, *, alpha: float, openings: int) -> str | None:
    if n == 0:
        return "no certify share: this run cannot be certified"
    allowed = most_regressions(n, alpha, CONFIDENCE, parts=openings)
    once = "" if n == rows else " (near-duplicates count once)"
    if allowed is not None:
        return f"{n} certify prompts{once}: none may regress" if allowed == 0 else None
    over = f" over {openings} openings" if openings > 1 else ""
    claim = f"{n} certify prompts{once} cannot certify alpha {exact_percent(alpha)} at {exact_percent(CONFIDENCE)}"
    try:
        needed = fewest_prompts(alpha, CONFIDENCE, parts=openings)
    except ConfigError as error:
        return f"{claim} confidence{over}: {error.what}"
    total = f" (about {math.ceil(needed / share - 1e-9)} safety prompts at these fractions)" if share else ""
    return f"{claim} confidence{over}: {needed} are needed{total}"


def ledger_of(source: str | None, certify: Sequence[Example], scope: str | None = None) -> Ledger:
    """The ledger that a certify share is entered in: the one of its data file or hub id, or the cache's.

    Shares of sets that were built by asking lie in the cache's, not beside the task file: a copy of the task has the
    same prompts. Their public prompts count within `scope`, `scope_of` model and task.
    """
    path = default_ledger(source or "")
    return Ledger(path) if scope is None else ScopedLedger(path, scope, public_ids(certify))


def openings_note(
    source: str | None, certify: Sequence[Example], *, openings: int, run: str | Path, scope: str | None = None
) -> str | None:
    """What to know about openings of the certify share that were used, or that other runs than `run` wait for.

    `source` and `scope` as for `ledger_of`.
    """
    if not certify:
        return None
    book, here = ledger_of(source, certify, scope), str(Path(run).absolute())
    texts = prompt_marks(certify)
    used = book.used(list(texts), texts)
    declared = min(openings, used.declared or openings)
    waiting = sorted({share.run for share in book.closed(list(texts), texts=texts)} - {here})
    if used.count and set(used.by) != {here}:
        left = "" if used.count < declared else f": this run cannot be certified. {_REMEDY.format(used.count + 1)}"
        return f"openings used: {used.count} of {declared} ({', '.join(dict.fromkeys(used.by))}){left}"
    if waiting and len(waiting) + 1 > declared:
        return (
            f"openings used: 0 of {declared}, and the certify prompts are also those of {', '.join(waiting)}: only "
            f"{declared} of these runs can be certified. {_REMEDY.format(len(waiting) + 1)}"
        )
    return None


def close_shares(config: RunConfig, data: Prepared, scope: str = "") -> None:
    """Note the certify shares of a run as closed, so that an audit of their files can be refused.

    In the ledgers beside the data files, or in the cache's. Where a ledger cannot be written the run goes on: what
    cannot be noted there cannot be opened there either.
    """
    for name, block in config.safety.items():
        asked = name in config.prompt_sets
        if (block.data is None and not asked) or not (certify := data.safety[name].certify):
            continue
        book = ledger_of(block.data, certify, scope if asked else None)
        if (there := unwritable(book.path.parent)) is not None:
            logger.warning("%s: %s is read-only: no opening can be entered there, certify needs --ledger", name, there)
            continue
        texts = prompt_marks(certify)
        book.close(str(Path(config.output_dir).absolute()), name, list(texts), declared=block.openings, texts=texts)
