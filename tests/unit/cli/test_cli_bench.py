"""`holdfast bench`: all paths on a tiny model, refusals, exit codes."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

from holdfast_lab.bench import run as running
from holdfast_lab.bench.settings import PATHS


def test_every_path_of_a_tiny_model(holdfast, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "reference_throughput", partial(running.reference_throughput, n=16))
    output = tmp_path / "out" / "speed.json"
    code, out, err = holdfast(
        "bench", "--shape", "tiny", "--steps", 2, "--warm-up", 1, "--checkpointing", "off", "--batch", 3,
        "--safety-batch", 3, "--paths", ",".join(PATHS), "--output", output,
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
    assert "padding_free False, packing False" in out
    assert "padding_free True, packing False" in out
    assert "trl_sft measured again" in out
    assert "of the bare forward pass" in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--shape", "huge"], "huge"),
        (["--shape", "tiny", "--paths", "sft,fast"], "fast"),
        (["--shape", "tiny", "--target-modules", "q_proj,lm_head"], "--target-modules: unknown lm_head"),
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
    assert asked[0].target_modules == ("q_proj", "k_proj", "v_proj")


def test_target_modules_are_measured_and_recorded(holdfast, tmp_path):
    output = tmp_path / "x.json"
    holdfast(
        "bench", "--shape", "tiny", "--steps", 1, "--warm-up", 0, "--paths", "trl_best,holdfast", "--no-drift",
        "--checkpointing", "off", "--no-reference", "--target-modules", "o_proj, down_proj", "--output", output,
    )  # fmt: skip
    found = json.loads(output.read_text())
    assert found["settings"]["target_modules"] == ["o_proj", "down_proj"]
    assert [row.get("error") for row in found["rows"]] == [None, None]


def failed(cell, _cache):
    return {"shape": cell.shape, "path": cell.path, "checkpointing": cell.checkpointing, "error": "out of memory"}


def test_only_a_benchmark_without_any_figure_fails(holdfast, monkeypatch, tmp_path):
    monkeypatch.setattr(running, "measure", failed)
    code, out, err = holdfast("bench", "--shape", "tiny", "--no-reference", "--output", tmp_path / "x.json")
    assert code == 7
    assert "failed: out of memory" in out
    assert "every path failed" in err
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 2 * (len(PATHS) - 1)  # without trl_best


def test_an_interrupt_names_the_file(holdfast, monkeypatch, tmp_path):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "measure", stopped)
    code, _, err = holdfast("bench", "--shape", "tiny", "--output", tmp_path / "x.json")
    assert code == 130
    assert "x.json" in err
