"""Reading results: what is accepted, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.unit.tables.making import PROTOCOL, result_json, results, write_results

from holdfast.core.errors import CheckpointError, DataError
from holdfast_lab.tables.formats import Style, text
from holdfast_lab.tables.kinds import build
from holdfast_lab.tables.results import differences, failed_cells, read_results


def spoil(folder: Path, **changes: object) -> Path:
    path = folder / "results" / "one.json"
    value = result_json("sft", cell="one", HS=0.5, FA=0.9) | changes
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return folder


def test_a_study_and_its_results_folder_read_the_same(tmp_path):
    folder = write_results(tmp_path, [result_json("base", HS=0.3), result_json("sft", HS=(0.5, 0.4, 0.6))])
    found = read_results(folder)
    assert found == read_results(folder / "results")
    sft = next(one for one in found if one.defense == "sft")
    assert (sft.metrics["HS"].value, sft.metrics["HS"].low, sft.metrics["HS"].high, sft.metrics["HS"].n) == (
        0.5,
        0.4,
        0.6,
        200,
    )
    assert (sft.poison_ratio, sft.seed, sft.is_reference) == (0.5, 42, False)
    base = next(one for one in found if one.defense == "base")
    assert (base.poison_ratio, base.seed, base.is_reference) == (None, None, True)


def test_the_constraint_is_read_where_it_is_told():
    told = {"tau": 0.1, "alpha": 0.05, "beta": 10, "unit": "nll_token"}
    found = results([result_json("holdfast", constraint=told)])
    assert found[0].constraint == {"tau": 0.1, "alpha": 0.05, "beta": 10.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"version": 2}, "version is 2, expected 1", id="version"),
        pytest.param({"defense": 3}, "defense is 3, expected text", id="defense"),
        pytest.param({"model": " "}, "model is empty", id="empty model"),
        pytest.param({"align": None}, "align is None, expected text", id="align"),
        pytest.param({"metrics": []}, "metrics is of type list, expected an object", id="metrics"),
        pytest.param({"metrics": {"HS": {"value": None}}}, "metrics.HS has value None", id="no value"),
        pytest.param({"metrics": {"HS": {"value": math.nan}}}, "metrics.HS has value nan", id="nan"),
        pytest.param({"metrics": {"HS": 0.5}}, "metrics.HS has value None", id="bare number"),
        pytest.param({"metrics": {"HS": {"value": 0.5, "low": "x"}}}, "metrics.HS has low of type str", id="low"),
        pytest.param({"metrics": {"HS": {"value": 10**400}}}, "HS has value a number of 401 digits", id="no float"),
        pytest.param({"poison_ratio": "half"}, "poison_ratio is of type str", id="ratio"),
        pytest.param({"seed": 1.5}, "seed is 1.5, expected a whole number or null", id="seed"),
        pytest.param({"protocol": "x"}, "protocol is of type str, expected an object", id="protocol"),
        pytest.param({"protocol_sha256": ""}, "protocol_sha256 is empty", id="hash"),
    ],
)
def test_a_mistyped_field_is_named_with_its_file(tmp_path, changes, said):
    with pytest.raises(DataError) as refused:
        read_results(spoil(tmp_path, **changes))
    assert said in refused.value.what
    assert "one.json" in refused.value.what


def test_an_error_never_repeats_a_foreign_text(tmp_path):
    with pytest.raises(DataError) as refused:
        read_results(spoil(tmp_path, metrics="a long text of someone else"))
    assert "someone" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        pytest.param('{"some": "settings"}', DataError, "not a result of a study", id="foreign"),
        pytest.param("[1, 2]", DataError, "not a result of a study", id="list"),
        pytest.param('{"version": 1, "cell', CheckpointError, "cannot be read as JSON", id="torn"),
    ],
)
def test_a_foreign_or_torn_file_is_refused(tmp_path, text, error, said):
    folder = write_results(tmp_path, [result_json("sft")])
    (folder / "results" / "other.json").write_text(text)
    with pytest.raises(error, match=said) as refused:
        read_results(folder)
    assert "other.json" in refused.value.what


def test_no_folder_and_no_results_are_refused(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no result"):
        read_results(tmp_path)


def test_a_cell_in_two_files_is_refused(tmp_path):
    folder = write_results(tmp_path, [result_json("sft", cell="twice")])
    (folder / "results" / "copy.json").write_text((folder / "results" / "twice.json").read_text())
    with pytest.raises(DataError, match="both cell 'twice'"):
        read_results(folder)


def test_two_protocols_in_one_table_are_refused_with_cells_and_fields():
    other = {"template": "chat", "train": {"learning_rate": 1e-5, "epochs": 1}, "judge": "trained"}
    found = results([result_json("sft", cell="a"), result_json("holdfast", cell="b", protocol=other)])
    with pytest.raises(DataError) as refused:
        build(found, ["main"])
    assert "cells a and b" in refused.value.what
    assert "judge: absent / 'trained', train.learning_rate: 0.0003 / 1e-05" in refused.value.what


def test_an_edited_protocol_with_the_old_hash_is_refused():
    edited = result_json("holdfast", cell="b") | {"protocol": {**PROTOCOL, "template": "alpaca"}}
    found = results([result_json("sft", cell="a"), edited])
    with pytest.raises(DataError, match="template: 'chat' / 'alpaca'"):
        build(found, ["main"])


def test_a_profile_may_follow_a_protocol_of_its_own():
    found = results([result_json("sft"), result_json("sft", protocol={"steps": 25}, step_ms=100.0)])
    assert {table.name for table in build(found)} == {"main", "details", "profiling"}


def test_differences_are_named_by_path():
    assert list(differences({"a": {"b": 1, "c": [1]}}, {"a": {"b": 2, "c": [1]}})) == ["a.b: 1 / 2"]
    assert list(differences({"a": 1}, {"a": 1})) == []


def test_failed_cells_are_those_without_a_result(tmp_path):
    folder = write_results(tmp_path, [result_json("sft", cell="done")])
    (folder / "errors").mkdir()
    for name in ("done", "lost"):
        (folder / "errors" / f"{name}.json").write_text("{}")
    assert failed_cells(folder) == ["lost"]
    assert failed_cells(tmp_path / "nowhere") == []


def test_a_label_cannot_pass_for_another_row():
    """In plain text a line break would start a row, and an escape sequence could hide one."""
    (found,) = results([result_json("sft", label="SFT\n\x1b[2Kholdfast (ours)  0.000*\u202e")])
    assert found.label == "SFT [2Kholdfast (ours) 0.000*"
    table = build([found])[0]
    lines = text(table, Style()).splitlines()
    assert not any(line.startswith("holdfast") for line in lines)


@pytest.mark.parametrize("model", ["1\u00b2", "9" * 5000, "\u0663B"], ids=["raised digit", "digits", "other digits"])
def test_any_model_name_has_a_place(model):
    tables = build(results([result_json("sft", model=model, cell="a"), result_json("sft", model="4B", cell="b")]))
    assert {section.model for section in tables[0].sections} == {model, "4B"}


def test_long_names_make_file_names_that_exist(tmp_path):
    found = results([result_json("holdfast", model="m" * 300, task="t" * 300, setting="tau=1", cell="a")])
    for table in build(found):
        (tmp_path / f"{table.slug}.csv").touch()
