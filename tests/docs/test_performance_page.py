"""The tables of what a step costs are those that the stored results give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.bench.shapes import NAMES, empty_model
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
    rows = printed("bench", "--show", str(RESULTS / "speed.json"))
    assert len(rows) > 15
    assert [
        line for line in section("Beside TRL's plain SFT") if "parameters" not in line and "e9 |" not in line
    ] == rows


PEAK = 790e12  # FLOP/s


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3.5-4b", "smollm2-135m"])
def test_the_floor_is_four_operations_a_parameter_and_token(shape):
    record = json.loads((RESULTS / "speed.json").read_text())
    chosen = {"shape": shape, "path": "holdfast", "checkpointing": False}
    (row,) = (row for row in record["rows"] if chosen.items() <= row.items())
    tokens = row["tokens_per_s"] * sum(row["steps_ms"]) / 1e3 / len(row["steps_ms"])
    outside = ("embed_tokens", "lm_head")
    layers = sum(p.numel() for name, p in empty_model(shape).named_parameters() if not any(x in name for x in outside))
    floor = 4 * layers * tokens / PEAK
    (line,) = (line for line in section("Beside TRL's plain SFT") if line.startswith(f"| {NAMES[shape]} |"))
    found = [float(cell) for cell in line.strip("| ").split("|")[1:]]
    expected = [layers, 4 * layers * tokens / 1e12, 1e3 * floor, row["median_ms"], row["median_ms"] / 1e3 / floor]
    assert found == pytest.approx(expected, rel=0.06)


PAGE = (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.parametrize("name", ["audit_throughput", "audit_throughput_8b"])
def test_the_audit_is_as_fast_as_the_page_says(name):
    record = json.loads((RESULTS / f"{name}.json").read_text())
    seconds = record["median_seconds"]
    share = seconds["bare"] / seconds["audit"]
    assert share >= 0.85
    assert f"{100 * share:.0f} %" in PAGE
    assert f"{seconds['audit']:.2f} s against {seconds['bare']:.2f}" in PAGE


def test_measuring_alone_is_as_fast_as_the_page_says():
    found = [json.loads((RESULTS / f"audit_throughput{end}.json").read_text()) for end in ("", "_8b")]
    shares = [f"{one['ratio']['measure']:.2f}" for one in found]
    assert f"({' and '.join(shares)} of their time)" in PAGE


def test_the_hybrid_measured_again_is_what_the_page_says():
    rows = {row["path"]: row for row in json.loads((RESULTS / "speed_qwen.json").read_text())["rows"]}
    ours, theirs = rows["holdfast"], rows["trl_sft"]
    times = f"{ours['median_ms']:.0f} against TRL's {theirs['median_ms']:.0f} ms, {ours['x_trl_sft']:.2f} times"
    assert f"{times}, at {ours['x_memory']:.2f} times the memory" in PAGE
    assert f"({sum(ours['steps_ms']) / sum(theirs['steps_ms']):.2f} times by the mean" in PAGE


def test_reserved_memory_is_what_the_page_says():
    rows = json.loads((RESULTS / "speed.json").read_text())["rows"]

    def times(shape: str, checkpointing: bool) -> float:
        of = {r["path"]: r["reserved_mib"] for r in rows if (r["shape"], r["checkpointing"]) == (shape, checkpointing)}
        return float(of["holdfast"] / of["trl_sft"])

    shapes = ("llama-3.1-8b", "qwen3.5-4b", "smollm2-135m")
    off = [times(shape, False) for shape in shapes]
    on = [times(shape, True) for shape in shapes]
    without = f"{min(off):.2f} to {max(off):.2f} times TRL's without and {on[0]:.2f} to {on[1]:.2f} with checkpointing"
    assert f"{without} (135M: {on[2]:.2f})" in PAGE
