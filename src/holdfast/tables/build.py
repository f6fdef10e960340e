"""All tables of a report, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.registry import nearest
from holdfast.tables.antibody import antibody
from holdfast.tables.details import details
from holdfast.tables.main import main
from holdfast.tables.poison_sweep import poison_sweep
from holdfast.tables.primal_dual import primal_dual
from holdfast.tables.profiling import profiling
from holdfast.tables.quantiles import quantiles
from holdfast.tables.results import Result, require_distinct
from holdfast.tables.sensitivity import sensitivity
from holdfast.tables.table import Table

BUILDERS: dict[str, Callable[[Sequence[Result]], list[Table]]] = {
    "main": main,
    "poison_sweep": poison_sweep,
    "sensitivity": sensitivity,
    "quantiles": quantiles,
    "profiling": profiling,
    "primal_dual": primal_dual,
    "antibody": antibody,
    "details": details,
}


def build(results: Sequence[Result], names: Sequence[str] = ()) -> list[Table]:
    """The named tables, all of them where none is named; a kind for which there are no results has none.

    Raises:
        ConfigError: an unknown name.
        DataError: see `fill`; or nothing at all can be shown.
    """
    for name in names:
        if name not in BUILDERS:
            raise ConfigError(f"unknown table {name!r}", remedy=nearest(name, list(BUILDERS)))
    require_distinct(results)
    tables = [table for name in dict.fromkeys(names or BUILDERS) for table in BUILDERS[name](results)]
    if not tables:
        raise DataError(
            f"{len(results)} results hold nothing for {', '.join(names) if names else 'any table'}",
            remedy="run the cells that the table compares, or leave --table out to see which tables there are",
        )
    return _with_own_files(tables)


def left_out(results: Sequence[Result], tables: Sequence[Table]) -> list[str]:
    """Ids of the results that entered no table."""
    used = frozenset[str]().union(*(table.used for table in tables))
    return sorted(result.cell for result in results if result.cell not in used)


def _with_own_files(tables: Sequence[Table]) -> list[Table]:
    """Two names that differ only in signs would share a file; the later ones are numbered."""
    taken: set[str] = set()
    found = []
    for table in tables:
        slug, number = table.slug, 1
        while slug in taken:
            number += 1
            slug = f"{table.slug}-{number}"
        taken.add(slug)
        found.append(replace(table, slug=slug))
    return found
