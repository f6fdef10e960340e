"""What a run found when it asked its model before training, in plain words: counts, and no text of any prompt."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.percent import percent, percent_up
from holdfast.report.evidence import Evidence
from holdfast.report.fields import Fields
from holdfast.report.wording import counted, one_line

SOURCES = {"task": "task prompts", "probes": "bundled probes", "everyday": "everyday prompts",
           "borderline": "borderline prompts"}  # fmt: skip
RULES = {
    "drop": "{dropped} of them were left out of training (conflicts: drop)",
    "keep": "they were trained on, and the model's refusals were held against them (conflicts: keep)",
    "fail": "such rows end a run (conflicts: fail)",
    "learn": "{dropped} of them were left out of training, and the others were meant to be learned (conflicts: learn)",
}


def screening_lines(evidence: Evidence) -> list[str]:
    """One sentence a fact; none where the model was not asked about rows or sets."""
    if evidence.result is None or "screening" not in evidence.result:
        return []
    found = evidence.result.inner("screening")
    sets = [_set(name, one) for name, one in found.objects("sets").items()]
    return [*_rows(found), *sets] if found.count("asked_rows") or sets else []


def _rows(found: Fields) -> list[str]:
    rows, asked = found.count("rows"), found.count("asked_rows")
    if not asked:
        return [f"The model was not asked about the {counted(rows, 'task row')}."]
    whom = "all of them" if asked == rows else f"{asked:,} of them"
    lines = [f"{counted(rows, 'task row')}; before training the model was asked about {whom}."]
    if conflicts := found.count("conflicts"):
        rule = RULES.get(found.text("rule"), "").format(dropped=f"{found.count('dropped'):,}")
        groups = counted(found.count("groups"), "group")
        lines.append(
            f"{counted(conflicts, 'row teaches', 'rows teach')} what it refuses, in {groups} of near-duplicate "
            f"prompts; {rule}."
        )
    else:
        lines.append("No row teaches what it refuses.")
    if "not_asked" in found:
        left = found.inner("not_asked")
        share = left.inner("conflict_share")
        lines.append(
            f"{counted(left.count('rows'), 'row')} were not asked about and were trained on: between "
            f"{percent(share.number('low'))} and {percent_up(share.number('high'))} of them teach what it refuses "
            "(95 %)."
        )
    return lines


def _set(name: str, one: Fields) -> str:
    """What is held: whose replies, to prompts of which sources, and what became of them."""
    kept = "refusals" if one.text("keep") == "refusals" else "answers"
    sources = " and ".join(
        f"{source.count('kept'):,} of {source.count('asked'):,} {_source(where)}"
        for where, source in one.objects("sources").items()
    )
    roles = one.inner("roles")
    return (
        f"Held as {one_line(name)}: the model's own {kept}, to {sources}. {roles.count('constraint'):,} steer, "
        f"{roles.count('monitor'):,} are watched, and {counted(roles.count('certify'), 'further prompt')} are kept for "
        "a certificate."
    )


def _source(where: str) -> str:
    """A bundled name in words; of a file its name alone, since a card is made to be published."""
    return SOURCES.get(where) or f"prompts of {one_line(Path(where).name if Path(where).is_absolute() else where)}"
