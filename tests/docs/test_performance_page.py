"""The tables of what a step costs are those that the stored results give."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
from benchmarks.shapes import NAMES
from benchmarks.step_results.__main__ import main
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast_lab.bench.settings import empty_model
from tests.docs.pictures import plotted_data

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "performance.md").read_text()


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def section(title: str) -> list[str]:
    """Rows of the tables under a heading of the page."""
    return table_rows(PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0])


@pytest.mark.parametrize(
    ("folder", "title"), [("defense_cost", "Every defense"), ("defense_cost_two_pass", "Every defense, in two passes")]
)
def test_the_cost_tables_are_printed_from_the_stored_results(folder, title):
    done = CliRunner().invoke(app, ["tables", str(RESULTS / folder), "--format", "markdown"])
    assert done.exit_code == 0, done.output
    rows = table_rows(done.stdout)
    assert len(rows) > 14
    assert section(title) == rows


def test_the_comparison_with_trl_is_printed_from_the_stored_run(capsys):
    assert main([str(RESULTS / "speed.json")]) == 0
    rows = table_rows(capsys.readouterr().out)
    assert len(rows) > 15
    shown = section("Beside TRL's plain SFT")
    assert [line for line in shown if "parameters" not in line and "e9 |" not in line] == rows


def test_the_default_of_a_run_file_is_the_stored_one():
    shown = []
    for lengths, name in (("GSM8K", "gsm8k"), ("SST-2", "sst2")):
        rows = json.loads((RESULTS / "cost" / f"bench_run_file_{name}.json").read_text())["rows"]
        sft, run_file = ({row["path"]: row for row in rows}[path] for path in ("sft", "run_file"))
        own, held = (mean(row["steps_ms"]) for row in (sft, run_file))
        medians = run_file["median_ms"] / sft["median_ms"]
        memory = run_file["peak_mib"] / sft["peak_mib"]
        times = f"{held:.0f} ms, {held / own:.2f} times | {medians:.2f} times | {memory:.2f} times |"
        shown.append(f"| {lengths} | {own:.0f} ms | {times}")
    assert section("The default of a run file")[1:] == shown


@pytest.mark.parametrize(
    ("picture", "names"),
    [("speed", ["speed"]), ("sweeps", ["sweep_batch", "sweep_safety_batch", "sweep_length", "sweep_rank"])],
)
def test_the_pictures_are_drawn_from_the_stored_runs(picture, names, tmp_path):
    files = [str(RESULTS / f"{name}.json") for name in names]
    assert main([*files, "--picture", str(tmp_path / "drawn.png")]) == 0
    assert plotted_data(tmp_path / "drawn.png") == plotted_data(RESULTS / f"{picture}.png")


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
