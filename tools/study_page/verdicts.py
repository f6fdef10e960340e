"""The front, holdfast against every row, slopes over the poison ratio and bounds on the mean KL, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tools.study_page.compared import (
    OURS,
    PLAIN,
    attacked,
    column_title,
    compared_rows,
    figure,
    mean_of,
    signed,
    start_of,
)
from tools.study_page.kl_bound import bounded, mean_bound, threshold
from tools.study_page.pareto import HARM, Comparison, compare, difference, dominators
from tools.study_page.slope import slope
from tools.study_page.stored import kept_sha256

from holdfast_lab.tables.formats import escape_markdown as escape
from holdfast_lab.tables.formats import table_line
from holdfast_lab.tables.lines import (
    LOSS,
    by_model_and_task,
    defense_title,
    lines_of,
    measured,
    metric,
    place_title,
    utility_of,
)
from holdfast_lab.tables.results import Result, require_one_protocol
from holdfast_lab.tables.table import MISSING

HEADLINE = ("aligned", "sft", "mix", "safegrad", "primal_dual", OURS)
EVIDENCE = {
    "seeds": "t interval over seeds",
    "given": "same prompts, paired, mean of these seeds",
    "prompts": "same prompts, paired",
    "ends": "from the two intervals",
}


def pareto(results: Sequence[Result]) -> str:
    """Per model and task: every row, what dominates it, and the answer for holdfast's own rows."""
    parts = []
    for model, task, group, ratio in attacked(results):
        rows, utility = compared_rows(group), utility_of(group)
        found = {name: dominators(rows, name, utility) for name in rows}
        parts += [f"**{escape(place_title(model, task, ratio))}** (utility: {metric(utility).title})", ""]
        parts += [f"- {_standing(name, *found[name])}" for name in rows if rows[name][0].defense == OURS]
        parts += _alignments(group)
        head = [
            "Row",
            column_title(HARM),
            column_title(utility),
            "Seeds",
            "Dominated beyond the intervals by",
            "By value alone by",
        ]
        parts += ["", table_line(head), table_line(["---", "---:", "---:", "---:", "---", "---"])]
        for name in sorted(rows, key=lambda one: _or_last(mean_of(rows[one], HARM))):
            figures = [figure(rows[name], one) for one in (HARM, utility)]
            names = [" / ".join(map(escape, them)) or MISSING for them in found[name]]
            parts.append(table_line([escape(name), *figures, str(len(rows[name])), *names]))
        parts.append("")
    return "\n".join(parts).rstrip() + "\n" if parts else ""


def pairs(results: Sequence[Result]) -> str:
    """Per model and task: holdfast (defaults) minus the aligned model and every other row, and what intervals tell."""
    parts = []
    for model, task, group, ratio in attacked(results):
        rows, utility = compared_rows(group), utility_of(group)
        ours = rows.pop(defense_title(OURS), None)
        if ours is None:
            continue
        shown = metric(utility).title
        parts += [f"**{escape(place_title(model, task, ratio))}**, holdfast minus the row", ""]
        parts.append(
            table_line(
                [
                    "Row",
                    "HS, difference",
                    "each seed",
                    f"{shown}, difference",
                    "Interval",
                    "p (HS), p (utility)",
                    "Significant",
                ]
            )
        )
        parts.append(table_line(["---", "---:", "---:", "---:", "---", "---:", "---"]))
        for name, other in {**start_of(group, ours), **rows}.items():
            found = compare(ours, other, utility)
            if found is not None:
                each = ", ".join(f"{value:+.3f}" for value in found.harm.each)
                figures = [signed(found.harm), each, signed(found.utility)]
                parts.append(
                    table_line([escape(name), *figures, _evidence(found), _p_values(found), _significant(found)])
                )
        parts.append("")
    return "\n".join(parts).rstrip() + "\n" if parts else ""


def slopes(results: Sequence[Result]) -> str:
    """Per model and task: the slope of HS over p of every row that was run at two ratios or more, and its two ends."""
    parts = []
    found = [result for result in measured(results) if not result.is_reference and not result.setting]
    require_one_protocol(found, "slopes")
    for model, task, group in by_model_and_task(found):
        lines = []
        for name, row in compared_rows(group).items():
            if (one := slope(row)) is not None:
                first, last = _common(*([r for r in row if r.poison_ratio == one.ratios[i]] for i in (0, -1)))
                apart = difference(last, first, HARM)
                ends = [figure(first, HARM), figure(last, HARM), MISSING if apart is None else signed(apart)]
                value = f"{one.value:+.3f} \\[{one.low:+.3f}, {one.high:+.3f}\\]"
                verdict = "rises" if one.rises else "falls" if one.falls else "no significant slope"
                span = f"{one.ratios[0]:g} to {one.ratios[-1]:g} ({len(one.ratios)})"
                each = ", ".join(f"{x:+.3f}" for x in one.each)
                lines.append(table_line([escape(name), span, *ends, value, each, verdict]))
        if lines:
            head = ["Row", "p", "HS, lowest p", "HS, highest p", "HS, highest minus lowest p"]
            head += ["Slope (HS per unit of p)", "each seed", "Significant slope"]
            parts += [f"**{escape(place_title(model, task))}**", "", table_line(head)]
            parts += [table_line(["---", "---", "---:", "---:", "---:", "---:", "---:", "---"]), *lines, ""]
    return "\n".join(parts).rstrip() + "\n" if parts else ""


def bounds(results: Sequence[Result]) -> str:
    """Per model and task: holdfast's settings in KL, by the bound they put on its mean, on the seeds that all have."""
    parts = []
    for model, task, group, ratio in attacked(results):
        usual = [result for result in bounded(group, OURS) if result.align == PLAIN and result.label == OURS]
        rows = {line: [r for r in usual if line.holds(r)] for line in lines_of(usual)}
        seeds = set.intersection(*({r.seed for r in row} for row in rows.values())) if len(rows) > 1 else set()
        if not seeds:
            continue
        rows = {line: [r for r in row if r.seed in seeds] for line, row in rows.items()}
        utility = utility_of(group)
        shown = (HARM, utility, "over_refusal")
        head = [
            "Setting",
            "t = tau - 1/beta",
            "mean KL at most",
            *map(column_title, shown),
            "HS, minus the aligned model",
        ]
        parts += [f"**{escape(place_title(model, task, ratio))}**, nats per token", "", table_line(head)]
        parts.append(table_line(["---", *["---:"] * 6]))
        for line, row in sorted(rows.items(), key=lambda one: mean_bound(one[1][0].constraint)):
            limit = row[0].constraint
            apart = [difference(row, aligned, HARM) for aligned in start_of(group, row).values()]
            moved = MISSING if not apart or apart[0] is None else signed(apart[0])
            figures = [
                f"{round(threshold(limit), 10):g}",
                f"{round(mean_bound(limit), 10):g}",
                *(figure(row, x) for x in shown),
            ]
            parts.append(table_line([escape(line.setting or "default"), *figures, moved]))
        parts.append("")
    return "\n".join(parts).rstrip() + "\n" if parts else ""


def _common(first: Sequence[Result], last: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Both at the seeds that both have, so that the figures shown are those of the difference beside them."""
    seeds = {r.seed for r in first} & {r.seed for r in last}
    return [r for r in first if r.seed in seeds], [r for r in last if r.seed in seeds]


def headline(results: Sequence[Result]) -> str:
    """A short table: the aligned model, plain SFT, the nearest baselines and holdfast, all tasks."""
    parts = []
    for model, task, group, ratio in attacked(results):
        lines = [line for line in lines_of(group) if line.defense in HEADLINE and line.is_plain]
        shown = (HARM, utility_of(group), "refusal_rate")
        parts += [table_line([escape(place_title(model, task, ratio)), *map(column_title, shown)])]
        parts.append(table_line(["---", "---:", "---:", "---:"]))
        for line in lines:
            row = [result for result in group if line.holds(result)]
            parts.append(table_line([escape(line.title), *(figure(row, name) for name in shown)]))
        parts.append("")
    return "\n".join(parts).rstrip() + "\n" if parts else ""


def _standing(name: str, beyond: Sequence[str], by_value: Sequence[str]) -> str:
    alone = [other for other in by_value if other not in beyond]
    if beyond:
        return f"{escape(name)} is **not on the front**: {' / '.join(map(escape, beyond))} beyond the intervals."
    rest = f"; by value alone {' / '.join(map(escape, alone))} would dominate it" if alone else ""
    return f"{escape(name)} is **on the front**: no row dominates it beyond the intervals{rest}."


def _alignments(group: Sequence[Result]) -> list[str]:
    """Rows of one recipe that started from different runs of it differ by more than their defense."""
    each: dict[str, set[str]] = {}
    for result in group:
        if (kept := kept_sha256(result)) is not None:
            each.setdefault(result.align, set()).add(kept)
    several = [f"{escape(defense_title(align))} ({len(found)})" for align, found in each.items() if len(found) > 1]
    return [f"- Rows start from more than one run of an alignment: {', '.join(several)}."] if several else []


def _or_last(value: float | None) -> float:
    return float("inf") if value is None else value


def _significant(found: Comparison) -> str:
    harm = "less harm" if found.harm.is_lower else "more harm" if found.harm.is_higher else "harm not significant"
    useful = found.utility.is_lower if found.metric == LOSS else found.utility.is_higher
    useless = found.utility.is_higher if found.metric == LOSS else found.utility.is_lower
    utility = "more utility" if useful else "less utility" if useless else "utility not significant"
    return f"{harm}, {utility}"


def _evidence(found: Comparison) -> str:
    kinds = dict.fromkeys((found.harm.evidence, found.utility.evidence))
    seeds = f" ({found.harm.seeds})" if found.harm.seeds > 1 else ""
    return ", ".join(EVIDENCE[kind] for kind in kinds) + seeds


def _p_values(found: Comparison) -> str:
    values = (found.harm.p_value, found.utility.p_value)
    if all(value is None for value in values):
        return MISSING
    return ", ".join(MISSING if value is None else f"{value:.2g}" for value in values)
