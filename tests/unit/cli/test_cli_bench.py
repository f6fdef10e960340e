"""`holdfast bench`: all paths on a tiny model, refusals, exit codes."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
from matplotlib.image import imread

from holdfast.bench import run as running
from holdfast.bench.settings import PATHS


def test_every_path_of_a_tiny_model(holdfast, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "reference_throughput", partial(running.reference_throughput, n=16))
    output = tmp_path / "out" / "speed.json"
    code, out, err = holdfast(
        "bench", "--shape", "tiny", "--steps", 2, "--warm-up", 1, "--checkpointing", "off", "--batch", 3,
        "--safety-batch", 3, "--output", output,
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads(output.read_text())["rows"]
    assert {row["path"]: row.get("error") for row in rows} == dict.fromkeys(PATHS)
    for row in rows:
        assert {"shape", "path", "checkpointing", "median_ms", "p90_ms", "peak_mib", "reserved_mib", "tokens_per_s",
                "x_trl_sft", "x_memory", "steps_ms"} <= set(row)  # fmt: skip
        assert len(row["steps_ms"]) == 2
        assert f"tiny           {row['path']:9s} off " in out
    assert rows[0]["x_trl_sft"] == 1.0
    assert "trl_sft measured again" in out
    assert "of the bare forward pass" in out
    assert output.with_suffix(".png").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--shape", "huge"], "huge"),
        (["--shape", "tiny", "--paths", "sft,fast"], "fast"),
        (["--shape", "tiny", "--sweep", "batch", "--values", "2,x"], "expected whole numbers"),
        (["--shape", "tiny", "--output", "speed.txt"], "expected a .json file"),
    ],
)
def test_refused_before_anything_is_measured(holdfast, monkeypatch, options, named):
    monkeypatch.setattr(running, "run", lambda *_: pytest.fail("measured"))
    code, _, err = holdfast("bench", *options)
    assert code == 2
    assert named in err


def test_names_and_values_separated_by_commas(holdfast, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(running, "run", lambda settings, *_: asked.append(settings) or sys.exit(0))
    holdfast("bench", "--shape", "tiny,tiny-hybrid", "--shape", "tiny", "--paths", "trl_sft, fused", "--sweep", "rank",
             "--values", "2,4", "--checkpointing", "on", "--output", tmp_path / "x.json")  # fmt: skip
    assert asked[0].shapes == ("tiny", "tiny-hybrid")
    assert asked[0].paths == ("trl_sft", "fused")
    assert (asked[0].values, asked[0].checkpointing) == ((2, 4), (True,))


def failed(cell, _cache):
    return {"shape": cell.shape, "path": cell.path, "checkpointing": cell.checkpointing, "error": "out of memory"}


def test_only_a_benchmark_without_any_figure_fails(holdfast, monkeypatch, tmp_path):
    monkeypatch.setattr(running, "measure", failed)
    code, out, err = holdfast("bench", "--shape", "tiny", "--no-reference", "--output", tmp_path / "x.json")
    assert code == 7
    assert "failed: out of memory" in out
    assert "every path failed" in err
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 10


def test_an_interrupt_names_the_file(holdfast, monkeypatch, tmp_path):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "measure", stopped)
    code, _, err = holdfast("bench", "--shape", "tiny", "--output", tmp_path / "x.json")
    assert code == 130
    assert "x.json" in err


def test_stored_results_are_drawn_into_one_picture(holdfast, monkeypatch, tmp_path):
    monkeypatch.setattr(running, "measure", measured)
    for sweep in ("rank", "batch"):
        swept = ["--sweep", sweep, "--values", "4,8", "--checkpointing", "off"]
        code, _, err = holdfast("bench", "--shape", "tiny", *swept, "--output", tmp_path / f"{sweep}.json")
        assert code == 0, err
    stored = ["--show", tmp_path / "rank.json", "--show", tmp_path / "batch.json"]
    code, out, err = holdfast("bench", *stored, "--picture", tmp_path / "both.png")
    assert code == 0, err
    assert [name in out for name in ("holdfast, rank = 8", "holdfast, batch = 8")] == [True, True]
    one, both = (imread(tmp_path / name) for name in ("rank.png", "both.png"))
    assert both.shape[1] > 1.3 * one.shape[1]  # two panels


def measured(cell, _cache):
    figures = dict.fromkeys(("median_ms", "p90_ms", "peak_mib", "reserved_mib", "tokens_per_s"), 1.0)
    names = {"shape": cell.shape, "path": cell.path, "checkpointing": cell.checkpointing}
    return names | figures | {"steps_ms": [1.0]} | ({"sweep": cell.sweep, "value": cell.value} if cell.sweep else {})


def test_a_picture_is_refused_where_it_cannot_be(holdfast, monkeypatch, tmp_path):
    code, _, err = holdfast("bench", "--shape", "tiny", "--picture", tmp_path / "x.png")
    assert (code, "--picture without --show" in err) == (2, True)
    monkeypatch.setattr(running, "measure", failed)
    holdfast("bench", "--shape", "tiny", "--no-reference", "--output", tmp_path / "x.json")
    code, _, err = holdfast("bench", "--show", tmp_path / "x.json", "--picture", tmp_path / "x.png")
    assert (code, "nothing was measured" in err) == (2, True)
    assert not (tmp_path / "x.png").exists()
    monkeypatch.setattr(running, "measure", measured)
    holdfast("bench", "--shape", "tiny", "--no-reference", "--no-drift", "--output", tmp_path / "y.json")
    code, _, err = holdfast("bench", "--show", tmp_path / "y.json", "--picture", tmp_path / "y.pdf")
    assert (code, "is no .png file" in err) == (2, True)


def test_results_measured_otherwise_are_not_drawn_under_one_heading(holdfast, monkeypatch, tmp_path):
    monkeypatch.setattr(running, "measure", measured)
    for rank in (8, 16):
        holdfast("bench", "--shape", "tiny", "--rank", rank, "--no-reference", "--output", tmp_path / f"{rank}.json")
    stored = ["--show", tmp_path / "8.json", "--show", tmp_path / "16.json"]
    code, _, err = holdfast("bench", *stored, "--picture", tmp_path / "x.png")
    assert (code, "another rank cannot be drawn together: 8 and 16" in err) == (2, True)
    assert not (tmp_path / "x.png").exists()
