"""The tables of what a step costs are those that the stored results give."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from holdfast.cli.main import app

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def printed(*arguments: str) -> list[str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return [line for line in done.stdout.splitlines() if line.startswith("| ")]


def section(title: str) -> list[str]:
    """Rows of the tables under a heading of the page."""
    _, _, rest = (ROOT / "docs" / "performance.md").read_text().partition(f"\n## {title}\n")
    return [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| ")]


def test_the_cost_table_is_printed_from_the_stored_results():
    rows = printed("report", str(RESULTS / "defense_cost"), "--tables", "--format", "markdown")
    assert len(rows) > 20
    assert section("Every defense, in two passes") == rows


def test_the_comparison_with_trl_is_printed_from_the_stored_run():
    rows = printed("bench", "--show", str(RESULTS / "speed_first.json"))
    assert len(rows) > 15
    assert section("Beside TRL's plain SFT") == rows
