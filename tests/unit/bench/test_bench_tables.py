"""A stored benchmark as tables."""

from __future__ import annotations

import json

import pytest
from benchmarks.step_results.__main__ import main
from benchmarks.step_results.tables import markdown, read_record
from PIL import Image

from holdfast.core.errors import DataError

ROW = {"shape": "tiny", "path": "trl_sft", "checkpointing": True, "median_ms": 10.04, "p90_ms": 12.0, "x_trl_sft": 1.0,
       "peak_mib": None, "x_memory": None, "tokens_per_s": 99.6}  # fmt: skip


def record(**changes):
    found = {"rows": [ROW, {**ROW, "path": "holdfast", "checkpointing": False, "x_trl_sft": 0.5}]}
    found |= {"drift": [{"shape": "tiny", "checkpointing": True, "x_first": 1.25}]}
    found |= {"reference": [{"shape": "tiny", "tokens_per_s": 7.0, "share": 0.9}, {"shape": "tiny", "error": "no"}]}
    return found | changes


def test_a_table_has_a_line_for_every_row():
    lines = markdown(record()).splitlines()
    assert lines[0] == "**tiny**"
    assert lines[4] == "| trl_sft | on | 10.0 | 12.0 | 1.00 | - | - | 100 |"
    assert lines[5] == "| holdfast | off | 10.0 | 12.0 | 0.50 | - | - | 100 |"
    assert "checkpointing on: 1.25" in lines[7]
    assert "7 tokens/s, 90 % of bare forward passes" in lines[7]


def test_errors_and_sweeps_are_named():
    failed = {"shape": "tiny", "path": "sft", "checkpointing": True, "error": "out of memory"}
    text = markdown(record(rows=[failed, {**ROW, "sweep": "rank", "value": 4}]))
    assert "| sft | on | failed: out of memory |" in text
    assert "| trl_sft, rank = 4 | on |" in text


@pytest.mark.parametrize("content", [None, "no json", "[]", "{}"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "speed.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match="speed"):
        read_record(path)


def test_a_stored_result_is_read_back(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps(record()))
    assert read_record(path) == record()


def stored(folder, name: str, *rows: dict, **settings) -> str:
    fixed = {"task": "sst2", "batch": 10, "safety_batch": 10, "rank": 32, "unit": "nll_token", "sweep": ""}
    file = folder / f"{name}.json"
    machine = {"provenance": {"hardware": "here"}}
    file.write_text(json.dumps(record(rows=list(rows)) | {"settings": fixed | settings} | machine))
    return str(file)


def test_results_are_drawn_into_one_picture(tmp_path, capsys):
    swept = [{**ROW, "sweep": name, "value": 4} for name in ("rank", "batch")]
    files = [stored(tmp_path, row["sweep"], row, sweep=row["sweep"]) for row in swept]
    assert main([*files, "--picture", str(tmp_path / "both.png")]) == 0
    out = capsys.readouterr().out
    assert [name in out for name in ("trl_sft, rank = 4", "trl_sft, batch = 4")] == [True, True]
    panels = json.loads(Image.open(tmp_path / "both.png").text["Description"])  # type: ignore[attr-defined]
    assert [panel["lines"] for panel in panels] == [[[[4.0, 10.04]]]] * 2


@pytest.mark.parametrize(
    ("rows", "picture", "said"),
    [
        ([{"shape": "tiny", "path": "sft", "checkpointing": True, "error": "no"}], "x.png", "nothing was measured"),
        ([ROW], "x.pdf", "is no .png file"),
    ],
)
def test_a_picture_is_refused_where_it_cannot_be(tmp_path, capsys, rows, picture, said):
    assert main([stored(tmp_path, "x", *rows), "--picture", str(tmp_path / picture)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / picture).exists()


def test_results_measured_otherwise_are_not_drawn_under_one_heading(tmp_path, capsys):
    files = [stored(tmp_path, str(rank), ROW, rank=rank) for rank in (8, 16)]
    assert main([*files, "--picture", str(tmp_path / "x.png")]) == 2
    assert "another rank cannot be drawn together: 8 and 16" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_results_without_target_modules_are_of_q_k_and_v(tmp_path, capsys):
    named = [{}, {"target_modules": ["q_proj", "k_proj", "v_proj"]}, {"target_modules": ["all-linear"]}]
    older, same, other = (stored(tmp_path, str(n), ROW, **one) for n, one in enumerate(named))
    assert main([older, same, "--picture", str(tmp_path / "x.png")]) == 0
    assert main([older, other, "--picture", str(tmp_path / "y.png")]) == 2
    assert "another target_modules cannot be drawn together" in capsys.readouterr().err
