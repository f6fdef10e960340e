"""The examples that degraded most, and their text where it can still be read."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.data.examples import Example, Turns
from holdfast.data.sources import read_examples
from holdfast.reporting.evidence import SafetyEvidence, Source

SHOWN = 10


@dataclass(frozen=True)
class Worst:
    """One example; prompt and reply are None where its text is not shown."""

    id: str
    category: str
    degradation: float
    tokens: int
    violated: bool
    prompt: str | None = None
    reply: str | None = None


@dataclass(frozen=True)
class WorstExamples:
    """The examples with the largest D, worst first; `note` says what is missing and why."""

    role: str
    rows: tuple[Worst, ...]
    note: str

    @property
    def has_text(self) -> bool:
        return any(row.prompt is not None for row in self.rows)


def worst_examples(one: SafetyEvidence, *, text: bool) -> WorstExamples:
    """The worst monitor examples; of a plain audit, the worst audited ones.

    Nothing of a certify split: its ids are left out, and an audit beside a certificate shows no example at all, since
    the certificate may be about the same prompts.
    """
    if one.table is None or one.limit is None:
        return WorstExamples("monitor", (), "There is no table of single examples.")
    roles = set(one.table.roles.tolist())
    role = "monitor" if "monitor" in roles else "audit"
    if role not in roles:
        return WorstExamples("monitor", (), "The run has no monitor examples.")
    if role == "audit" and one.certificate is not None:
        return WorstExamples(role, (), "Single examples stay closed: the certificate may be about the same prompts.")
    rows = _rows(one, role)
    if not text:
        return WorstExamples(role, rows, "The text was left out on request.")
    texts, note = _texts(one.source, {row.id for row in rows})
    shown = (
        replace(row, prompt=_plain(texts[row.id].prompt), reply=_plain(texts[row.id].completion))
        if row.id in texts
        else row
        for row in rows
    )
    return WorstExamples(role, tuple(shown), note)


def _rows(one: SafetyEvidence, role: str) -> tuple[Worst, ...]:
    assert one.table is not None
    assert one.limit is not None
    table, values = one.table, one.table.degradations.get(one.limit.unit)
    if values is None:
        return ()
    chosen = [int(i) for i in np.flatnonzero(table.roles == role) if table.ids[i] not in one.closed]
    chosen.sort(key=lambda i: (-math.inf if math.isnan(values[i]) else -values[i], table.ids[i]))
    return tuple(
        Worst(table.ids[i], table.categories[i], float(values[i]), int(table.tokens[i]), bool(table.violated[i]))
        for i in chosen[:SHOWN]
    )


def _texts(source: Source | None, wanted: set[str]) -> tuple[dict[str, Example], str]:
    """The examples of the given ids; an id is a hash of the text, so a match is the very text that was measured."""
    if source is None or not source.data:
        return {}, "Where the safety data lies is not recorded, so the text is not shown."
    if not Path(source.data).is_file():
        return {}, "The safety data is no longer where it was (or is on the hub), so the text is not shown."
    try:
        examples = read_examples(source.data, columns=source.columns, limit=source.limit)
    except HoldfastError:
        return {}, "The safety data has changed and cannot be read, so the text is not shown."
    found = {example.id: example for example in examples if example.id in wanted}
    if len(found) == len(wanted):
        return found, ""
    return found, f"The safety data has changed: {len(wanted) - len(found)} of these examples are no longer in it."


def _plain(side: str | Turns) -> str:
    if isinstance(side, str):
        return side
    if len(side) == 1:
        return side[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in side)
