"""Ratios, drift, the file after every measurement, and the picture."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from benchmarks.step_results.picture import COLOURS, LABELS, draw
from matplotlib.colors import to_rgba

from holdfast_lab.bench import run as running
from holdfast_lab.bench.run import Record, run
from holdfast_lab.bench.settings import PATHS, Settings

PNG = b"\x89PNG"
EVERY = tuple(PATHS)
MEDIANS = {
    "trl_sft": 100.0, "trl_best": 80.0, "sft": 90.0, "two_pass": 200.0, "fused": 130.0, "holdfast": 110.0,
    "run_file": 120.0,
}  # fmt: skip


def figures(cell, scale: float = 1.0) -> dict:
    median = scale * MEDIANS[cell.path] * (2 if cell.checkpointing else 1) * (cell.value or 1)
    swept = {"sweep": cell.sweep, "value": cell.value} if cell.sweep else {}
    return {
        "shape": cell.shape, "path": cell.path, "checkpointing": cell.checkpointing, "median_ms": median,
        "p90_ms": median, "peak_mib": 10 * median, "reserved_mib": 0.0, "tokens_per_s": 1.0, "steps_ms": [], **swept,
    }  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """Replaces measuring: figures from `MEDIANS`, errors for the paths named, and what was asked for."""
    asked, failing, drift = [], set(), [1.0]

    def fake(cell, _cache):
        asked.append(cell)
        if cell.path in failing:
            return {k: v for k, v in figures(cell).items() if k in ("shape", "path", "checkpointing")} | {"error": "no"}
        return figures(cell, drift[0])

    monkeypatch.setattr(running, "measure", fake)
    monkeypatch.setattr(running, "reference_throughput", lambda shape, _: {"shape": shape, "share": 0.9})
    return asked, failing, drift


def test_ratios_are_to_the_baseline_of_the_same_checkpointing(tmp_path, measured):
    record = run(Settings(shapes=("tiny",), paths=EVERY), tmp_path / "speed.json", lambda *_: None)
    by = {(row["path"], row["checkpointing"]): row for row in record.rows}
    for on in (True, False):
        assert by["two_pass", on]["x_trl_sft"] == pytest.approx(2.0)
        assert by["holdfast", on]["x_memory"] == pytest.approx(1.1)
        assert by["trl_sft", on]["x_trl_sft"] == by["trl_best", on]["x_trl_best"] == 1.0
        assert by["holdfast", on]["x_trl_best"] == pytest.approx(110 / 80)


def test_order_warm_up_and_the_second_baseline(tmp_path, measured):
    asked, _, _ = measured
    settings = Settings(shapes=("tiny",), paths=("trl_sft", "fused"))
    record = run(settings, tmp_path / "speed.json", lambda *_: None)
    assert [(c.path, c.checkpointing) for c in asked] == [
        ("trl_sft", True),  # thrown away
        ("trl_sft", True), ("fused", True), ("trl_sft", False), ("fused", False),
        ("trl_sft", True), ("trl_sft", False),
    ]  # fmt: skip
    assert (asked[0].steps, asked[1].steps) == (3, 25)
    assert [(d["checkpointing"], d["x_first"]) for d in record.drift] == [(True, 1.0), (False, 1.0)]


def test_drift_is_against_the_first_baseline(tmp_path, measured):
    _, _, scale = measured
    seen = []

    def listen(kind, found):
        seen.append((kind, found))
        scale[0] = 1.1 if found.get("path") == "holdfast" else scale[0]

    record = run(Settings(shapes=("tiny",), paths=EVERY, checkpointing=(True,)), tmp_path / "speed.json", listen)
    assert record.drift == [
        {"shape": "tiny", "checkpointing": True, "median_ms": pytest.approx(220), "x_first": pytest.approx(1.1)}
    ]
    assert [kind for kind, _ in seen] == ["row"] * len(MEDIANS) + ["drift", "reference"]


def test_a_failing_path_is_a_row_and_the_others_are_measured(tmp_path, measured):
    measured[1].add("fused")
    record = run(Settings(shapes=("tiny", "tiny-hybrid"), paths=EVERY), tmp_path / "speed.json", lambda *_: None)
    assert [row["path"] for row in record.rows if "error" in row] == ["fused"] * 4
    assert len(record.rows) == 4 * len(MEDIANS)
    assert all(row["x_trl_sft"] is None for row in record.rows if "error" in row)


def test_a_failing_baseline_leaves_ratios_open(tmp_path, measured):
    measured[1].add("trl_sft")
    record = run(Settings(shapes=("tiny",), paths=EVERY), tmp_path / "speed.json", lambda *_: None)
    assert {row["x_trl_sft"] for row in record.rows} == {None}
    assert record.drift == []
    assert {row["x_trl_best"] for row in record.rows} == {None, *(MEDIANS[p] / 80 for p in MEDIANS if p != "trl_sft")}


def test_the_file_is_complete_after_every_row(tmp_path, measured):
    path, lengths = tmp_path / "out" / "speed.json", []

    def listen(kind, _):
        if kind == "row":
            lengths.append(len(json.loads(path.read_text())["rows"]))

    run(Settings(shapes=("tiny",), paths=EVERY), path, listen)
    assert lengths == list(range(1, 2 * len(MEDIANS) + 1))
    stored = json.loads(path.read_text())
    assert set(stored) == {"version", "rows", "drift", "reference", "settings", "provenance"}
    assert set(stored["provenance"]) == {"versions", "commit", "hardware", "kernels"}
    assert stored["settings"]["shapes"] == ["tiny"]
    assert stored["settings"]["target_modules"] == ["q_proj", "k_proj", "v_proj"]


def test_a_sweep_is_compared_value_by_value(tmp_path, measured):
    settings = Settings(shapes=("tiny",), sweep="batch", values=(2, 4))
    record = run(settings, tmp_path / "sweep.json", lambda *_: None)
    assert {(row["path"], row["x_trl_sft"]) for row in record.rows} == {
        ("trl_sft", 1.0),
        ("two_pass", 2.0),
        ("holdfast", 1.1),
    }
    assert (record.drift, record.reference) == ([], [])


def test_a_reference_pass_that_fails_is_noted(tmp_path, measured, monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(running, "reference_throughput", broken)
    record = run(Settings(shapes=("tiny",), paths=("trl_sft",)), tmp_path / "speed.json", lambda *_: None)
    assert record.reference == [{"shape": "tiny", "error": "CUDA out of memory"}]


def test_nothing_measured_is_not_drawn(tmp_path):
    settings = Settings(shapes=("tiny",), paths=EVERY)
    record = Record(settings, tmp_path / "speed.json")
    cell = settings.cells("tiny")[0]
    record.add(cell, {"shape": "tiny", "path": cell.path, "checkpointing": True, "error": "no"})
    assert draw(record.to_json()) is None
    record.add(replace(cell, path="sft"), figures(replace(cell, path="sft")))
    assert draw(record.to_json()).startswith(PNG)


def test_five_panels_two_by_two_have_no_empty_axes_and_every_path_its_colour(tmp_path, measured, monkeypatch):
    """A path that only the second result has is in the legend by its own bars."""
    from matplotlib.figure import Figure

    figures_made = []
    inner = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures_made.append(self) or inner(self, *a, **k))
    few = run(Settings(shapes=("tiny",), paths=("trl_sft",)), tmp_path / "a.json", lambda *_: None).to_json()
    many = run(Settings(shapes=("tiny",), paths=EVERY), tmp_path / "b.json", lambda *_: None).to_json()
    assert draw(few, many, few, few, few) is not None
    figure = figures_made[-1]
    assert [ax.axison for ax in figure.axes] == [True] * 5 + [False]
    (legend,) = figure.legends
    shown = {
        text.get_text(): handle.get_facecolor()
        for text, handle in zip(legend.texts, legend.legend_handles, strict=True)
    }
    assert shown == {LABELS[path]: to_rgba(COLOURS[path]) for path in LABELS}
