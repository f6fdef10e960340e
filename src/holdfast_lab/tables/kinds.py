"""The kinds of tables, each a function from results to tables: the paper's, and the details of every variant."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import nearest
from holdfast_lab.tables.lines import (
    QUANTILES,
    Line,
    at_ratio,
    attack_ratio,
    by_model_and_task,
    defense_title,
    lines_of,
    measured,
    ordered_models,
    ordered_tasks,
    place_title,
    plain,
    quantile,
    slug,
    task_title,
    with_own_names,
    without_elsewhere,
)
from holdfast_lab.tables.results import Result, require_distinct
from holdfast_lab.tables.table import Block, Column, Table, fill

SHORT = ("HS", "HS_qK", "FA")
PROFILE = ("step_ms", "p90_ms", "gpu_mb", "samples_per_s", "x_sft")
SETTINGS = ("HS", "HS_q50", "HS_q90", "HS_q99", "FA")
DETAILS = (
    "HS", "HS_0.5", "HS_plus", "HS_qK", "refusal_rate", "over_refusal", "FA", "FA_strict", "task_loss",
    "violation_rate", "unscored",
)  # fmt: skip
BEFORE, PLAIN = "aligned", "sft"
PAPER_ORDER = ("tau", "alpha", "beta")
OTHER = ""  # the section of settings that are not one name=value


def main(results: Sequence[Result]) -> list[Table]:
    """Models x defenses x tasks at one ratio; every model has a section with the rows of all: gaps are seen."""
    found, notes = without_elsewhere(plain(measured(results)))
    ratio = attack_ratio(found)
    found = at_ratio(found, ratio)
    title = "Harm and utility" + (f" at poison ratio p = {ratio:g}" if ratio is not None else "")
    return [_over_tasks("main", title, found, lines_of(found), ratio, "main", notes=notes)] if found else []


def poison_sweep(results: Sequence[Result]) -> list[Table]:
    """A table per model and task that was run at another ratio than the main table's: harm and utility at each."""
    found, notes = without_elsewhere(plain(measured(results)))
    shown_in_main = {attack_ratio(found)}
    tables = []
    for model, task, group in by_model_and_task(found):
        ratios = sorted({result.poison_ratio for result in group if result.poison_ratio is not None})
        if not ratios or set(ratios) == shown_in_main:
            continue
        columns = [Column(f"p = {ratio:g}", name, task, ratio) for ratio in ratios for name in _with_k(SHORT, model)]
        constant = ("Base and Aligned do not depend on p",) if any(r.is_reference for r in group) else ()
        tables.append(_of_task("poison_sweep", "Poison sweep", group, columns, notes=notes + constant))
    return tables


def quantiles(results: Sequence[Result]) -> list[Table]:
    """A table per model and task whose judge gave probabilities: HS and percentiles of the per-prompt harm."""
    found, notes = without_elsewhere(plain(measured(results)))
    ratio = attack_ratio(found)
    names = ["HS", *(f"HS_q{k}" for k in QUANTILES), "FA"]
    return [
        _of_task("quantiles", "Quantiles of harm", group, [Column("", name, task) for name in names], ratio, notes)
        for _, task, group in by_model_and_task(at_ratio(found, ratio))
        if any(name.startswith("HS_q") for result in group for name in result.metrics)
    ]


def details(results: Sequence[Result]) -> list[Table]:
    """A table per model and task at the attack's ratio, with every metric that some row has; not one of the paper's."""
    found = measured(results)
    ratio = attack_ratio(found)
    tables = []
    for model, _, group in by_model_and_task(at_ratio(found, ratio)):
        there = {name for result in group for name in result.metrics}
        columns = [Column("", name) for name in _with_k(DETAILS, model) if name in there]
        tables.append(_of_task("details", "Details", group, columns, ratio))
    return tables


def profiling(results: Sequence[Result]) -> list[Table]:
    """What a training step costs, a section per model and task; nothing is marked: cost is not what is compared."""
    found = [result for result in results if "step_ms" in result.metrics]
    blocks = [Block(place_title(m, t), m, lines_of(group), t) for m, t, group in by_model_and_task(found)]
    columns, title = [Column("", name) for name in PROFILE], "Cost of a training step"
    return [fill("profiling", "profiling", title, columns, blocks, found, marks=False)] if found else []


def primal_dual(results: Sequence[Result]) -> list[Table]:
    """Holdfast against the primal-dual method, per model; sections are tasks, and only the best is marked."""
    found = [result for result in plain(measured(results)) if result.defense in ("holdfast", "primal_dual")]
    ratio = attack_ratio(result for result in found if result.defense == "primal_dual")
    found = at_ratio(found, ratio)
    tables = []
    for model in ordered_models(result.model for result in found if result.defense == "primal_dual"):
        group = [result for result in found if result.model == model]
        tasks = ordered_tasks(result.task for result in group if result.defense == "primal_dual")
        lines = lines_of(group)
        title = f"Barrier filter and primal-dual method, {model} at p = {ratio:g}"
        columns = [Column("", name) for name in _with_k(SHORT, model)]
        blocks = [Block(task_title(task), model, lines, task, ratio, same_seeds=True) for task in tasks]
        file = slug("primal_dual", model)
        tables.append(fill("primal_dual", file, title, columns, blocks, group, head="Method", second=False))
    return tables


def antibody(results: Sequence[Result]) -> list[Table]:
    """The composition with a defense of the alignment stage, the paper's Antibody: who starts from which alignment.

    A table per alignment defense that others were started from, and one for Antibody wherever it was run. The aligned
    models are floors and plain SFT is the attack: neither takes part in the marks.
    """
    found = [result for result in measured(results) if not result.setting and result.defense != "base"]
    composed = {r.align for r in found if r.align not in (PLAIN, r.defense) and not r.is_reference}
    tables = []
    for aligner in sorted(composed | {"antibody"} & {result.defense for result in found}):
        started = {r.defense for r in found if r.align == aligner and not r.is_reference}
        group = [r for r in found if r.align in (PLAIN, aligner) and r.defense in {BEFORE, PLAIN, aligner, *started}]
        if any(r.align == aligner for r in group):  # its fine-tuning part alone is composed with nothing
            tables.append(_composition(aligner, group))
    return tables


def _composition(aligner: str, found: list[Result]) -> Table:
    ratio = attack_ratio(result for result in found if result.align == aligner)
    found = at_ratio(found, ratio)
    order = {BEFORE: 0, PLAIN: 1, aligner: 2}
    lines = [
        line  # what was run on both alignments says so
        if line.is_reference or line.defense in (PLAIN, aligner) or line.align != PLAIN
        else replace(line, shown=f"{line.title} on SFT-aligned")
        for line in lines_of(found)
    ]
    lines.sort(key=lambda line: order.get(line.defense, 3))
    title = f"Composition with {defense_title(aligner)}" + (f" at p = {ratio:g}" if ratio is not None else "")
    file, floors = slug("antibody", *({aligner} - {"antibody"})), frozenset({PLAIN})
    return _over_tasks("antibody", title, found, lines, ratio, file, head="Method", second=False, without=floors)


def sensitivity(results: Sequence[Result]) -> list[Table]:
    """A table per model, task and defense that was run with settings; the default stands in every section.

    The default's own values are read from the result's `provenance.constraint`; where they are unknown, its row is
    called `default`, unless a row has its very metrics and so is the default under the name of its value.
    A section is compared on the seeds that all its rows have.
    """
    found = [result for result in measured(results) if not result.is_reference]
    swept = [result for result in found if result.setting]
    ratio = attack_ratio(swept)
    defaults = [result for result in at_ratio(found, ratio) if not result.setting]
    tables = []
    for model, task, group in by_model_and_task(at_ratio(swept, ratio)):
        for family in dict.fromkeys(_family(line) for line in lines_of(group)):
            own = [r for r in group if _family(r) == family]
            default = [r for r in defaults if (r.model, r.task, _family(r)) == (model, task, family)]
            title = f"Sensitivity of {replace(Line.of(own[0]), setting='').title}, {place_title(model, task, ratio)}"
            file, columns = (
                slug("sensitivity", model, task, *dict.fromkeys(family[:2])),
                [Column("", m) for m in SETTINGS],
            )
            blocks, entering = _sweeps(own, default, ratio), [*own, *default]
            tables.append(fill("sensitivity", file, title, columns, blocks, entering, head="Value"))
    return tables


def _family(row: Result | Line) -> tuple[str, str, str]:
    return row.defense, row.label, row.align


def parse_setting(setting: str) -> tuple[str, str]:
    """(name, value) of `name=value`; anything else is (OTHER, the whole setting)."""
    name, equals, value = (part.strip() for part in setting.partition("="))
    single = bool(name and equals and value) and not set(value) & set("=,; ")
    return (name, value) if single else (OTHER, setting)


def _sweeps(own: Sequence[Result], default: Sequence[Result], ratio: float | None) -> list[Block]:
    names = {parse_setting(result.setting)[0] for result in own}
    order = sorted(names, key=lambda x: (x == OTHER, PAPER_ORDER.index(x) if x in PAPER_ORDER else 9, x))
    values = default[0].constraint if default else {}
    blocks = []
    for name in order:
        lines = [line for line in lines_of(own) if parse_setting(line.setting)[0] == name]
        rows = [replace(line, shown=parse_setting(line.setting)[1]) for line in lines]
        usual = f"{values[name]:g}" if name in values else ""
        there = any(_number(row.shown) == _number(usual) for row in rows)
        if not usual:  # a row is the default under the name of its value: the same metrics from the same seed
            mine = [result for result in own if any(row.holds(result) for row in rows)]
            there = any((x.seed, x.metrics) == (y.seed, y.metrics) for x in mine for y in default)
        if default and not there:
            setting = f"{name}={usual}" if usual else ""
            rows.append(replace(Line.of(default[0]), shown=usual or "default", stated=setting))
        rows.sort(key=lambda row: (n if isinstance(n := _number(row.shown), float) else math.inf, row.shown))
        fixed = ", ".join(f"{key} = {values[key]:g}" for key in PAPER_ORDER if key in values and key != name)
        title = f"{name} sweep" if name != OTHER else "other settings"
        title = f"{title}, {fixed}" if fixed else title
        blocks.append(Block(title, own[0].model, rows, own[0].task, ratio, same_seeds=True))
    return blocks


def _number(value: str) -> float | str:
    try:
        return value if math.isnan(number := float(value)) else number
    except ValueError:
        return value


def _with_k(names: Sequence[str], model: str) -> list[str]:
    return [name.replace("qK", f"q{quantile(model)}") for name in names]


def _over_tasks(
    name: str, title: str, results: list[Result], lines: list[Line], ratio: float | None, file: str, **more: Any
) -> Table:
    tasks, models = ordered_tasks(r.task for r in results), ordered_models(r.model for r in results)
    columns = [Column(task_title(task), metric, task, ratio) for task in tasks for metric in SHORT]
    blocks = [Block(f"{model} (K = {quantile(model)})", model, lines, poison_ratio=ratio) for model in models]
    return fill(name, file, title, columns, blocks, results, **more)


def _of_task(
    name: str, title: str, group: list[Result], columns: list[Column], ratio: float | None = None,
    notes: Sequence[str] = (),
) -> Table:  # fmt: skip
    model, task = group[0].model, group[0].task
    block, title = Block("", model, lines_of(group), task, ratio), f"{title}, {place_title(model, task, ratio)}"
    return fill(name, slug(name, model, task), title, columns, [block], group, notes=notes)


KINDS: dict[str, Callable[[Sequence[Result]], list[Table]]] = {
    kind.__name__: kind
    for kind in (main, poison_sweep, sensitivity, quantiles, profiling, primal_dual, antibody, details)
}


def build(results: Sequence[Result], names: Sequence[str] = ()) -> list[Table]:
    """The named tables, all of them where none is named; a kind for which there are no results has none."""
    for name in names:
        if name not in KINDS:
            raise ConfigError(f"unknown table {name!r}", remedy=nearest(name, list(KINDS)))
    require_distinct(results)
    tables = [table for name in dict.fromkeys(names or KINDS) for table in KINDS[name](results)]
    if not tables:
        raise DataError(
            f"{len(results)} results hold nothing for {', '.join(names) if names else 'any table'}",
            remedy="run the cells that the table compares, or leave --table out to see which tables there are",
        )
    files = with_own_names([table.slug for table in tables])
    return [replace(table, slug=file) for table, file in zip(tables, files, strict=True)]


def left_out(results: Sequence[Result], tables: Sequence[Table]) -> list[str]:
    used = frozenset[str]().union(*(table.used for table in tables))
    return sorted(result.cell for result in results if result.cell not in used)
