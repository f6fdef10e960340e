"""The kinds of tables, each a function from results to tables: the paper's, and the details of every variant."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import nearest
from holdfast_lab.tables import lines
from holdfast_lab.tables.lines import QUANTILES, Line, lines_of
from holdfast_lab.tables.results import Result, require_distinct
from holdfast_lab.tables.table import Block, Column, Table, fill

SHORT = ("HS", "HS_qK", "FA")
DETAILS = (
    "HS", "HS_0.5", "HS_plus", "HS_qK", "refusal_rate", "over_refusal", "FA", "FA_strict", "task_loss",
    "violation_rate", "unscored",
)  # fmt: skip
BEFORE, PLAIN = "aligned", "sft"
PAPER_ORDER = ("tau", "alpha", "beta")
OTHER = ""  # the section of settings that are not one name=value


def main(results: Sequence[Result]) -> list[Table]:
    """Models x defenses x tasks at one ratio; every model has a section with the rows of all: gaps are seen."""
    every, notes = lines.without_elsewhere(lines.plain(lines.measured(results)))
    attacked, ratio = _attacked(every)
    title = "Harm and utility" + (f" at poison ratio p = {ratio:g}" if ratio is not None else "")
    return [_over_tasks("main", title, attacked, lines_of(attacked), ratio, "main", notes=notes)] if attacked else []


def poison_sweep(results: Sequence[Result]) -> list[Table]:
    """A table per model and task that was run at another ratio than the main table's: harm and utility at each."""
    measured, notes = lines.without_elsewhere(lines.plain(lines.measured(results)))
    in_main = lines.attack_ratio(measured)
    tables = []
    for model, task, group in lines.by_model_and_task(measured):
        ratios = sorted({result.poison_ratio for result in group if result.poison_ratio is not None})
        if set(ratios) - {in_main}:
            columns = [column for p in ratios for column in _columns(SHORT, model, f"p = {p:g}", task, p)]
            constant = ("Base and Aligned do not depend on p",) if any(r.is_reference for r in group) else ()
            tables.append(_of_task("poison_sweep", "Poison sweep", group, columns, notes=notes + constant))
    return tables


def quantiles(results: Sequence[Result]) -> list[Table]:
    """A table per model and task whose judge gave probabilities: HS and percentiles of the per-prompt harm."""
    every, notes = lines.without_elsewhere(lines.plain(lines.measured(results)))
    attacked, ratio = _attacked(every)
    columns = _columns(("HS", *(f"HS_q{k}" for k in QUANTILES), "FA"))
    return [
        _of_task("quantiles", "Quantiles of harm", group, columns, ratio, notes)
        for _, _, group in lines.by_model_and_task(attacked)
        if any(name.startswith("HS_q") for result in group for name in result.metrics)
    ]


def details(results: Sequence[Result]) -> list[Table]:
    """A table per model and task at the attack's ratio, with every metric that some row has; not one of the paper's."""
    attacked, ratio = _attacked(lines.measured(results))
    tables = []
    for model, _, group in lines.by_model_and_task(attacked):
        there = {name for result in group for name in result.metrics}
        columns = [column for column in _columns(DETAILS, model) if column.metric in there]
        tables.append(_of_task("details", "Details", group, columns, ratio))
    return tables


def profiling(results: Sequence[Result]) -> list[Table]:
    """What a training step costs, a section per model and task; nothing is marked: cost is not what is compared."""
    timed = [result for result in results if "step_ms" in result.metrics]
    blocks = [Block(lines.place_title(m, t), m, lines_of(group), t) for m, t, group in lines.by_model_and_task(timed)]
    columns, title = _columns(("step_ms", "p90_ms", "gpu_mb", "samples_per_s", "x_sft")), "Cost of a training step"
    return [fill("profiling", "profiling", title, columns, blocks, timed, marks=False)] if timed else []


def primal_dual(results: Sequence[Result]) -> list[Table]:
    """Holdfast against the primal-dual method, per model; sections are tasks, and only the best is marked."""
    both = [result for result in lines.plain(lines.measured(results)) if result.defense in ("holdfast", "primal_dual")]
    attacked, ratio = _attacked(both, by=lambda result: result.defense == "primal_dual")
    tables = []
    for model in lines.ordered_models(result.model for result in attacked if result.defense == "primal_dual"):
        group = [result for result in attacked if result.model == model]
        tasks = lines.ordered_tasks(result.task for result in group if result.defense == "primal_dual")
        title = f"Barrier filter and primal-dual method, {model} at p = {ratio:g}"
        blocks = [Block(lines.task_title(task), model, lines_of(group), task, ratio, same_seeds=True) for task in tasks]
        file, columns = lines.slug("primal_dual", model), _columns(SHORT, model)
        tables.append(fill("primal_dual", file, title, columns, blocks, group, head="Method", second=False))
    return tables


def antibody(results: Sequence[Result]) -> list[Table]:
    """The composition with a defense of the alignment stage, the paper's Antibody: who starts from which alignment.

    A table per alignment defense that others were started from, and one for Antibody wherever it was run. The aligned
    models are floors and plain SFT is the attack: neither takes part in the marks.
    """
    measured = [result for result in lines.measured(results) if not result.setting and result.defense != "base"]
    composed = {r.align for r in measured if r.align not in (PLAIN, r.defense) and not r.is_reference}
    tables = []
    for aligner in sorted(composed | {"antibody"} & {result.defense for result in measured}):
        started = {r.defense for r in measured if r.align == aligner and not r.is_reference}
        group = [r for r in measured if r.align in (PLAIN, aligner) and r.defense in {BEFORE, PLAIN, aligner, *started}]
        if any(r.align == aligner for r in group):  # its fine-tuning part alone is composed with nothing
            tables.append(_composition(aligner, group))
    return tables


def _composition(aligner: str, group: list[Result]) -> Table:
    attacked, ratio = _attacked(group, by=lambda result: result.align == aligner)
    order = {BEFORE: 0, PLAIN: 1, aligner: 2}
    rows = [
        line  # what was run on both alignments says so
        if line.is_reference or line.defense in (PLAIN, aligner) or line.align != PLAIN
        else replace(line, shown=f"{line.title} on SFT-aligned")
        for line in lines_of(attacked)
    ]
    rows.sort(key=lambda line: order.get(line.defense, 3))
    title = f"Composition with {lines.defense_title(aligner)}" + (f" at p = {ratio:g}" if ratio is not None else "")
    file, floors = lines.slug("antibody", *({aligner} - {"antibody"})), frozenset({PLAIN})
    return _over_tasks("antibody", title, attacked, rows, ratio, file, head="Method", second=False, without=floors)


def sensitivity(results: Sequence[Result]) -> list[Table]:
    """A table per model, task and defense that was run with settings; the default stands in every section.

    The default's own values are read from the result's `provenance.constraint`; where they are unknown, its row is
    called `default`, unless a row has its very metrics and so is the default under the name of its value.
    A section is compared on the seeds that all its rows have.
    """
    measured = [result for result in lines.measured(results) if not result.is_reference]
    swept = [result for result in measured if result.setting]
    ratio = lines.attack_ratio(swept)
    defaults = [result for result in lines.at_ratio(measured, ratio) if not result.setting]
    tables = []
    for model, task, group in lines.by_model_and_task(lines.at_ratio(swept, ratio)):
        for family in dict.fromkeys(_family(line) for line in lines_of(group)):
            own = [r for r in group if _family(r) == family]
            default = [r for r in defaults if (r.model, r.task, _family(r)) == (model, task, family)]
            title = (
                f"Sensitivity of {replace(Line.of(own[0]), setting='').title}, {lines.place_title(model, task, ratio)}"
            )
            file = lines.slug("sensitivity", model, task, *dict.fromkeys(family[:2]))
            columns, blocks = _columns(("HS", "HS_q50", "HS_q90", "HS_q99", "FA")), _sweeps(own, default, ratio)
            tables.append(fill("sensitivity", file, title, columns, blocks, [*own, *default], head="Value"))
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
        swept = [line for line in lines_of(own) if parse_setting(line.setting)[0] == name]
        rows = [replace(line, shown=parse_setting(line.setting)[1]) for line in swept]
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
        title = ", ".join(filter(None, [f"{name} sweep" if name != OTHER else "other settings", fixed]))
        blocks.append(Block(title, own[0].model, rows, own[0].task, ratio, same_seeds=True))
    return blocks


def _number(value: str) -> float | str:
    try:
        return value if math.isnan(number := float(value)) else number
    except ValueError:
        return value


def _attacked(
    results: Sequence[Result], by: Callable[[Result], bool] = lambda result: True
) -> tuple[list[Result], float | None]:
    """The results at the attack's ratio, references included, and this ratio; an attack is a result that `by` names."""
    ratio = lines.attack_ratio(filter(by, results))
    return lines.at_ratio(results, ratio), ratio


def _columns(
    names: Sequence[str], model: str = "", group: str = "", task: str | None = None, ratio: float | None = None
) -> list[Column]:
    """A column for each metric; K of HS_qK is the model's."""
    return [Column(group, name.replace("qK", f"q{lines.quantile(model)}"), task, ratio) for name in names]


def _over_tasks(
    name: str, title: str, results: list[Result], rows: list[Line], ratio: float | None, file: str, **more: Any
) -> Table:
    tasks, models = lines.ordered_tasks(r.task for r in results), lines.ordered_models(r.model for r in results)
    columns = [Column(lines.task_title(task), metric, task, ratio) for task in tasks for metric in SHORT]
    blocks = [Block(f"{model} (K = {lines.quantile(model)})", model, rows, poison_ratio=ratio) for model in models]
    return fill(name, file, title, columns, blocks, results, **more)


def _of_task(
    name: str, title: str, group: list[Result], columns: list[Column], ratio: float | None = None,
    notes: Sequence[str] = (),
) -> Table:  # fmt: skip
    model, task = group[0].model, group[0].task
    block, title = Block("", model, lines_of(group), task, ratio), f"{title}, {lines.place_title(model, task, ratio)}"
    return fill(name, lines.slug(name, model, task), title, columns, [block], group, notes=notes)


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
    files = lines.with_own_names([table.slug for table in tables])
    return [replace(table, slug=file) for table, file in zip(tables, files, strict=True)]


def left_out(results: Sequence[Result], tables: Sequence[Table]) -> list[str]:
    used = frozenset[str]().union(*(table.used for table in tables))
    return sorted(result.cell for result in results if result.cell not in used)
