"""The composition with a defense of the alignment stage, the paper's Antibody: who starts from which alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.tables.choosing import at_ratio, attack_ratio, measured
from holdfast.tables.grid import Block, Plan, fill
from holdfast.tables.lines import Line, lines_of
from holdfast.tables.results import Result
from holdfast.tables.table import Column, Table
from holdfast.tables.wording import defense_title, ordered_models, ordered_tasks, quantile, slug, task_title

METRICS = ("HS", "HS_qK", "FA")
BEFORE, PLAIN = "aligned", "sft"


def antibody(results: Sequence[Result]) -> list[Table]:
    """A table per alignment defense that others were started from, and one for Antibody wherever it was run.

    The aligned models are floors and plain SFT is the attack: neither takes part in the marks.
    """
    found = [result for result in measured(results) if not result.setting and result.defense != "base"]
    composed = {r.align for r in found if r.align not in (PLAIN, r.defense) and not r.is_reference}
    aligners = sorted(composed | {"antibody"} & {result.defense for result in found})
    tables = []
    for aligner in aligners:
        started = {r.defense for r in found if r.align == aligner and not r.is_reference}
        group = [r for r in found if r.align in (PLAIN, aligner) and r.defense in {BEFORE, PLAIN, aligner, *started}]
        if any(r.align == aligner for r in group):  # its fine-tuning part alone is composed with nothing
            tables.append(_composition(aligner, group))
    return tables


def _composition(aligner: str, found: list[Result]) -> Table:
    ratio = attack_ratio(result for result in found if result.align == aligner)
    found = at_ratio(found, ratio)
    tasks = ordered_tasks(result.task for result in found)
    order = {"aligned": 0, PLAIN: 1, aligner: 2}
    lines = sorted((_named(line, aligner) for line in lines_of(found)), key=lambda line: order.get(line.defense, 3))
    plan = Plan(
        "antibody",
        slug("antibody") if aligner == "antibody" else slug("antibody", aligner),
        f"Composition with {defense_title(aligner)}" + (f" at p = {ratio:g}" if ratio is not None else ""),
        [Column(task_title(task), name, task, ratio) for task in tasks for name in METRICS],
        [
            Block(f"{model} (K = {quantile(model)})", model, lines, poison_ratio=ratio)
            for model in ordered_models(result.model for result in found)
        ],
        found,
        head="Method",
        second=False,
        without=frozenset({PLAIN}),
    )
    return fill(plan)


def _named(line: Line, aligner: str) -> Line:
    """Says the alignment of a row that was run on both."""
    if line.is_reference or line.defense in (PLAIN, aligner) or line.align != PLAIN:
        return line
    return replace(line, shown=f"{line.title} on SFT-aligned")
