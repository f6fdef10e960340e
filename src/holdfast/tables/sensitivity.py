"""The sensitivity: a defense with one setting changed at a time; a section per setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from holdfast.tables.choosing import at_ratio, attack_ratio, by_model_and_task, measured, place_title
from holdfast.tables.grid import Block, Plan, fill
from holdfast.tables.lines import Line, lines_of
from holdfast.tables.results import Result
from holdfast.tables.table import Column, Table
from holdfast.tables.wording import defense_title, slug

METRICS = ("HS", "HS_q50", "HS_q90", "HS_q99", "FA")
PAPER_ORDER = ("tau", "alpha", "beta")
OTHER = ""  # the section of settings that are not one name=value


def sensitivity(results: Sequence[Result]) -> list[Table]:
    """A table per model, task and defense that was run with settings; the default stands in every section.

    The default's own values are read from the result's `provenance.constraint`; where they are not told, its row is
    called `default`, unless a row has its very metrics and so is the default under the name of its value.
    A section is compared on the seeds that all its rows have.
    """
    found = [result for result in measured(results) if not result.is_reference]
    swept = [result for result in found if result.setting]
    ratio = attack_ratio(swept)
    tables = []
    for model, task, group in by_model_and_task(at_ratio(swept, ratio)):
        families = dict.fromkeys((line.defense, line.label, line.align) for line in lines_of(group))
        for family in families:
            own = [r for r in group if (r.defense, r.label, r.align) == family]
            default = [
                r
                for r in at_ratio(found, ratio)
                if (r.model, r.task, r.setting) == (model, task, "") and (r.defense, r.label, r.align) == family
            ]
            name = defense_title(family[0]) if family[1] == family[0] else family[1]
            if family[2] not in ("sft", family[0]):
                name += f" on {defense_title(family[2])}-aligned"
            plan = Plan(
                "sensitivity",
                slug("sensitivity", model, task, *dict.fromkeys(family[:2])),
                f"Sensitivity of {name}, {place_title(model, task, ratio)}",
                [Column("", metric) for metric in METRICS],
                _blocks(own, default, model, task, ratio),
                [*own, *default],
                head="Value",
            )
            tables.append(fill(plan))
    return tables


def parse_setting(setting: str) -> tuple[str, str]:
    """(name, value) of `name=value`; anything else is (OTHER, the whole setting)."""
    name, equals, value = (part.strip() for part in setting.partition("="))
    single = bool(name and equals and value) and not set(value) & set("=,; ")
    return (name, value) if single else (OTHER, setting)


def _blocks(
    own: Sequence[Result], default: Sequence[Result], model: str, task: str, ratio: float | None
) -> list[Block]:
    names = {parse_setting(result.setting)[0] for result in own}
    order = sorted(names, key=lambda x: (x == OTHER, PAPER_ORDER.index(x) if x in PAPER_ORDER else 9, x))
    values = default[0].constraint if default else {}
    blocks = []
    for name in order:
        lines = [line for line in lines_of(own) if parse_setting(line.setting)[0] == name]
        rows = [replace(line, shown=parse_setting(line.setting)[1]) for line in lines]
        told = f"{values[name]:g}" if name in values else ""
        there = any(_number(row.shown) == _number(told) for row in rows) if told else _same_work(rows, own, default)
        if default and not there:
            setting = f"{name}={told}" if told else ""
            rows.append(replace(Line.of(default[0]), shown=told or "default", told=setting))
        rows.sort(key=lambda row: _order(row.shown))
        fixed = ", ".join(f"{key} = {values[key]:g}" for key in PAPER_ORDER if key in values and key != name)
        title = f"{name} sweep" if name != OTHER else "other settings"
        blocks.append(Block(f"{title}, {fixed}" if fixed else title, model, rows, task, ratio, same_seeds=True))
    return blocks


def _same_work(lines: Sequence[Line], own: Sequence[Result], default: Sequence[Result]) -> bool:
    """Whether one of the rows is the default under the name of its value: the same metrics from the same seed."""
    return any(
        line.holds(result) and result.seed == other.seed and result.metrics == other.metrics
        for line in lines
        for result in own
        for other in default
    )


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _order(value: str) -> tuple[float, str]:
    """Numbers by size, then words."""
    number = _number(value)
    return (number, value) if isinstance(number, float) and not math.isnan(number) else (math.inf, value)
