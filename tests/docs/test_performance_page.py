"""The tables of what a step costs are those that the stored results give."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
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


PAGE = (ROOT / "docs" / "performance.md").read_text()


def text_of(title: str) -> str:
    """What stands under a heading of the page."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def section(title: str) -> list[str]:
    """Rows of the tables under a heading of the page."""
    return [line for line in text_of(title).splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(
    ("folder", "title"),
    [("defense_cost", "Every defense"), ("defense_cost_two_pass", "Every defense, in two passes")],
)
def test_the_cost_tables_are_printed_from_the_stored_results(folder, title):
    rows = printed("report", str(RESULTS / folder), "--tables", "--format", "markdown")
    assert len(rows) > 14
    assert section(title) == rows


def test_what_is_said_of_the_cost_table_is_in_it():
    found = [json.loads(path.read_text()) for path in (RESULTS / "defense_cost").glob("*.json")]
    text = text_of("Every defense")
    assert {one["defense"] for one in found if one["path"] != "fused, recorded"} == {"antibody"}
    step = {(one["defense"], one["setting"]): one["metrics"]["step_ms"]["value"] for one in found}
    mean = {(one["defense"], one["setting"]): 1e3 * statistics.mean(one["steps_s"]) for one in found}
    memory = {(one["defense"], one["setting"]): one["metrics"]["gpu_mb"]["value"] for one in found}
    ours, kl, plain = ("holdfast", "unit=nll_token"), ("holdfast", "unit=kl_token"), ("sft", "")
    times, means = ([f"{by[row] / by[plain]:.1f}" for row in (ours, kl)] for by in (step, mean))
    assert f"costs {times[0]} times by the median in nll_token and {times[1]} in kl_token" in text
    figures = f"({mean[ours]:.0f} and {mean[kl]:.0f} against {mean[plain]:.0f} ms)"
    assert f"it is {means[0]} and {means[1]} {figures}" in text
    level = f"({step[ours]:.0f} ms in nll_token, {step[kl]:.0f} in kl_token) is at the level of mix"
    assert f"{level} ({step['mix', '']:.0f})" in text
    assert f"SafeGrad ({step['safegrad', '']:.0f}) and kl ({step['kl', '']:.0f})" in text
    assert f"packed and recorded too: {step[plain]:.1f} ms" in text
    acted = [one["events"] for one in found if one["defense"] in ("holdfast", "mean_constraint")]
    assert sorted(30 - events.get("inactive", 0) for events in acted) == [10, 29, 30]
    others = [memory[name, ""] / memory[plain] for name in ("mix", "safegrad", "kl")]
    times = (
        f"{memory[ours] / memory[plain]:.2f} times the memory where those take {min(others):.2f} to {max(others):.2f}"
    )
    assert times in text
    assert f"The penalty ({step['penalty', '']:.0f})" in text


def stored_rows(name: str) -> list[dict[str, Any]]:
    return list(json.loads((RESULTS / f"{name}.json").read_text())["rows"])


def stored(name: str) -> dict[tuple[str, int | None], dict[str, Any]]:
    return {(row["path"], row.get("value")): row for row in stored_rows(name)}


def test_kl_token_costs_what_the_page_says():
    rows = stored("speed_kl_token")
    ours, theirs, two = (rows[path, None] for path in ("holdfast", "trl_sft", "two_pass"))
    mean = sum(ours["steps_ms"]) / sum(theirs["steps_ms"])
    said = f"{ours['median_ms']:.0f} against TRL's {theirs['median_ms']:.0f} ms at the shape of Llama-3.1-8B: "
    said += f"{ours['x_trl_sft']:.2f} times ({mean:.2f} by the mean), at {ours['x_memory']:.2f} times the memory; "
    assert f"{said}two passes {two['x_trl_sft']:.2f} times" in PAGE
    assert f"{ours['events']['restoration']} of {sum(ours['events'].values())} steps restored" in PAGE


def test_the_sweeps_are_what_the_page_says():
    text = text_of("How the cost grows")
    batch, safety, length, rank = (stored(f"sweep_{name}") for name in ("batch", "safety_batch", "length", "rank"))

    def times(rows, values, key="x_trl_sft", path="holdfast"):
        figures = [f"{rows[path, value][key]:.2f}" for value in values]
        return f"{', '.join(figures[:-1])} and {figures[-1]}"

    rows = (5, 10, 20, 40)
    assert f"holdfast takes {times(batch, rows)} times TRL's step with 5, 10, 20 and 40 of them" in text
    assert f"at {times(batch, rows, 'x_memory')} times the memory: TRL pads" in text
    x = [f"{safety['holdfast', n]['x_trl_sft']:.2f}" for n in (5, 20, 40)]
    assert f"{x[0]} times TRL's step with 5 of them, {x[1]} with 20, {x[2]} with 40" in text
    assert f"at {times(safety, (5, 20, 40), 'x_memory')} times the memory" in text
    assert f"Two passes: {times(safety, (5, 20, 40), path='two_pass')} times" in text
    of_trl = [safety["trl_sft", n]["median_ms"] for n in (5, 20, 40)]
    assert f"where nothing that concerns it changed, {min(of_trl):.0f} to {max(of_trl):.0f} (" in text
    lengths = (64, 128, 256)
    long = [f"{length['holdfast', n]['x_trl_sft']:.2f}" for n in lengths]
    assert f"{long[0]} times TRL's step at 64 tokens a row, {long[1]} at 128, {long[2]} at 256" in text
    assert f"at {times(length, lengths, 'x_memory')} times the memory" in text
    held = times(length, lengths, "x_memory", "two_pass")
    assert f"two passes {times(length, lengths, path='two_pass')} times, at {held}" in text
    assert length["trl_sft", 64]["median_ms"] == pytest.approx(length["trl_sft", 128]["median_ms"], rel=0.01)
    assert f"8, 32 and 128 take {times(rank, (8, 32, 128))} times" in text
    common = ((batch, 10), (rank, 32))
    means = [sum(rows["holdfast", n]["steps_ms"]) / sum(rows["trl_sft", n]["steps_ms"]) for rows, n in common]
    assert f"those two points are at {means[0]:.2f} and {means[1]:.2f}" in text
    here = [batch["trl_sft", 10]["median_ms"], rank["trl_sft", 32]["median_ms"]]
    mine = [batch["holdfast", 10], rank["holdfast", 32]]
    assert f"came out at {mine[0]['x_trl_sft']:.2f} in one process and {mine[1]['x_trl_sft']:.2f} in another" in text
    told = f"TRL's step at {here[0]:.0f} and {here[1]:.0f} ms and ours at {mine[0]['median_ms']:.0f} and "
    assert f"{told}{mine[1]['median_ms']:.0f}" in text
    assert f"took {here[1]:.0f} to {here[0]:.0f} ms in these processes" in text
    assert {f"{row['x_memory']:.2f}" for row in mine} == {"1.00"}
    first = next(row for row in stored_rows("speed") if row["path"] == "holdfast" and not row["checkpointing"])
    assert f"{first['median_ms'] / here[1]:.2f} and 1.08" in PAGE


def test_the_picture_of_the_sweeps_is_drawn_from_the_stored_runs(tmp_path):
    names = ("batch", "safety_batch", "length", "rank")
    shown = [part for name in names for part in ("--show", str(RESULTS / f"sweep_{name}.json"))]
    printed("bench", *shown, "--picture", str(tmp_path / "sweeps.png"))
    ours, stored_one = (matplotlib.image.imread(folder / "sweeps.png") for folder in (tmp_path, RESULTS))
    assert np.array_equal(ours, stored_one)


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
