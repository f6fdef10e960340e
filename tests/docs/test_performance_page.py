"""The cost table in the documents is the one that the stored results give."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from holdfast.cli.main import app

ROOT = Path(__file__).parents[2]


def test_the_cost_table_is_printed_from_the_stored_results():
    results = str(ROOT / "benchmarks" / "results" / "defense_cost")
    done = CliRunner().invoke(app, ["report", results, "--tables", "--format", "markdown"])
    assert done.exit_code == 0, done.output
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    page = (ROOT / "docs" / "performance.md").read_text().splitlines()
    assert len(rows) > 20
    assert [line for line in page if line.startswith("| ")] == rows
