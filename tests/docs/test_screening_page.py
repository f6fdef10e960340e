"""The table of what screening finds is that of the stored records."""

from __future__ import annotations

from pathlib import Path

from benchmarks.screening import table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_records():
    page = (ROOT / "docs" / "screening.md").read_text("utf-8")
    assert f"{table.START}\n\n{table.table(ROOT / 'benchmarks/results/screening')}\n\n{table.END}" in page


def test_found_by_the_judge_alone_is_not_found_by_refusals():
    parts = [{"of": 8, "found": 4, "by_judge_alone": 3}, {"of": 2, "found": 1, "by_judge_alone": 0}]
    assert table.shares(parts) == "20 % (2 of 10) | 50 % (5 of 10)"
