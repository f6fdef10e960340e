"""The paper's figures beside ours: what is matched, the agreement, and the paper's own marks where it can be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.tables.making import from_reported, result_json, results

from holdfast.core.errors import ConfigError, DataError
from holdfast_lab.tables.formats import Style, text
from holdfast_lab.tables.kinds import build
from holdfast_lab.tables.reported import beside, read_reported, spearman
from holdfast_lab.tables.table import Table

HEADER = "table,model,task,poison_ratio,method,setting,metric,mean,std\n"
INVENTED = (
    HEADER
    + """main,Big-1.0,sst2,0.5,Base,,HS,0.11,
main,Big-1.0,sst2,0.5,SFT,,HS,0.91,0.01
main,Big-1.0,sst2,0.5,Lisa,,HS,0.81,0.02
main,Big-1.0,sst2,0.5,Ours,,HS,0.71,0.03
main,Big-1.0,gsm8k,0.5,Ours,,HS,0.61,0.03
poison_sweep,Big-1.0,sst2,any,Base,,HS,0.12,
poison_sweep,Big-1.0,sst2,0.1,Ours,,HS,0.51,0.03
sensitivity,Big-1.0,sst2,0.5,Ours,tau=0.1,HS,0.41,
antibody,Big-1.0,sst2,0.5,Ours on Antibody-Aligned,,HS,0.31,0.01
antibody,Big-1.0,sst2,0.5,Antibody,,HS,0.32,0.01
"""
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "reported.csv"
    path.write_text(INVENTED)
    return path


def shown(table: Table) -> dict[str, float | None]:
    rows = table.sections[0].rows
    return {row.label: row.cells[0].published.mean if row.cells[0].published else None for row in rows}


def small(names=("base", "sft", "lisa", "holdfast"), **changes):
    harm = {"base": 0.2, "sft": 0.6, "lisa": 0.5, "holdfast": 0.3}
    return results([result_json(name, HS=harm[name], FA=0.9, **changes) for name in names])


def test_a_chosen_model_stands_in_and_is_named(file):
    table = build(small(), ["main"])[0]
    found = beside(table, read_reported(file, "Big-1.0"))
    assert shown(found) == {"Base": 0.11, "SFT": 0.91, "Lisa": 0.81, "holdfast (ours)": 0.71}
    assert "SmolLM2-135M-Instruct is compared with the paper's Big-1.0" in found.notes
    lines = text(found, Style()).splitlines()
    ours = next(i for i, line in enumerate(lines) if line.startswith("holdfast (ours)"))
    assert lines[ours + 1].split() == ["paper", "0.710", "±", "0.030"]


def test_nothing_is_shown_without_a_counterpart(file):
    table = build(small(), ["main"])[0]
    assert beside(table, read_reported(file)) == table


def test_the_same_model_needs_no_choice_whatever_its_signs(file):
    table = build(small(model="big 1.0"), ["main"])[0]
    assert shown(beside(table, read_reported(file)))["SFT"] == 0.91


def test_table_task_and_ratio_must_be_the_same(file):
    reported = read_reported(file, "Big-1.0")
    other_ratio = build(small(ratio=0.25), ["main"])[0]
    assert shown(beside(other_ratio, reported)) == {"Base": 0.11, "SFT": None, "Lisa": None, "holdfast (ours)": None}
    values = [result_json("holdfast", ratio=ratio, HS=0.3, FA=0.9) for ratio in (0.1, 0.5)]
    sweep = build(results([*values, result_json("base")]), ["poison_sweep"])[0]
    assert shown(beside(sweep, reported)) == {"Base": 0.12, "holdfast (ours)": 0.51}
    gsm8k = build(small(task="gsm8k"), ["main"])[0]
    assert shown(beside(gsm8k, reported))["holdfast (ours)"] == 0.61


def test_settings_and_alignments_are_matched(file):
    reported = read_reported(file, "Big-1.0")
    values = [
        result_json("holdfast", constraint={"tau": 0.1}),
        result_json("holdfast", setting="tau=0.2"),
        result_json("holdfast", setting="alpha=0.2"),
        result_json("holdfast", align="antibody"),
        result_json("antibody", align="antibody"),
    ]
    found = results(values)
    assert shown(beside(build(found, ["sensitivity"])[0], reported)) == {"0.1": 0.41, "0.2": None}
    assert shown(beside(build(found, ["antibody"])[0], reported)) == {
        "Antibody": 0.32,
        "holdfast (ours) on SFT-aligned": None,
        "holdfast (ours) on Antibody-aligned": 0.31,
    }


def test_of_several_variants_the_plain_one_stands_beside_the_paper(file):
    values = [result_json("holdfast", label="A variant"), result_json("holdfast")]
    table = build(results(values), ["main"])[0]
    assert shown(beside(table, read_reported(file, "Big-1.0"))) == {"holdfast (ours)": 0.71, "A variant": None}


def test_agreement_needs_three_defenses_and_leaves_references_out(file):
    reported = read_reported(file, "Big-1.0")
    notes = beside(build(small(), ["main"])[0], reported).notes
    assert any(note.endswith("order of 3 rows against the paper's, Spearman: SST-2 HS +1.00") for note in notes)
    two = build(small(("base", "sft", "holdfast")), ["main"])[0]
    assert not any("Spearman" in note for note in beside(two, reported).notes)


def test_spearman_by_hand():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1, abs=1e-15)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1, abs=1e-15)
    # Ranks 1, 2.5, 2.5 against 1, 2, 3: covariance 1.5 over sqrt(1.5 * 2).
    assert spearman([0, 5, 5], [1, 2, 3]) == pytest.approx(1.5 / 3**0.5, abs=1e-15)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        pytest.param("a,b\n1,2\n", DataError, "no column 'table'", id="columns"),
        pytest.param(HEADER + "main,M,sst2,0.5,SFT,,HS,many,\n", DataError, "reported.csv:2: mean is not", id="mean"),
        pytest.param(HEADER + "main,M,sst2,0.5,SFT,,HS,0.5,inf\n", DataError, "reported.csv:2: std is not", id="std"),
        pytest.param("", DataError, "no column", id="empty"),
    ],
)
def test_damaged_files_are_refused_with_the_line(tmp_path, content, error, said):
    path = tmp_path / "reported.csv"
    path.write_text(content)
    with pytest.raises(error, match=said):
        read_reported(path)


def test_unknown_models_and_files_are_refused(tmp_path, file):
    with pytest.raises(ConfigError, match="reports no model 'Big-1'") as refused:
        read_reported(file, "Big-1")
    assert "Big-1.0" in refused.value.remedy
    with pytest.raises(ConfigError, match="is not a file"):
        read_reported(tmp_path / "none.csv")


PAPER = os.environ.get("HOLDFAST_REPORTED")
needs_paper = pytest.mark.skipif(not PAPER, reason="HOLDFAST_REPORTED is not set")
# (table, section, column, best, second best) as the paper prints them in bold and underlined.
MARKS = [
    ("main", "Qwen-3.5-4B (K = 90)", "SST-2 HS", {"holdfast (ours)"}, {"SafeLoRA"}),
    ("main", "Qwen-3.5-4B (K = 90)", "SST-2 HS_qK", {"SafeLoRA"}, {"holdfast (ours)"}),
    ("main", "Qwen-3.5-4B (K = 90)", "SST-2 FA", {"SaLoRA"}, {"SFT"}),
    ("main", "Qwen-3.5-4B (K = 90)", "AG News FA", {"Booster"}, {"Vaccine"}),
    ("main", "Qwen-3.5-4B (K = 90)", "GSM8K HS", {"AsFT"}, {"SafeLoRA"}),
    ("main", "Qwen-3.5-9B (K = 90)", "SST-2 HS", {"AsFT"}, {"SafeLoRA"}),
    ("main", "Qwen-3.5-9B (K = 90)", "SST-2 FA", {"Vaccine"}, {"SaLoRA", "SafeGrad"}),
    ("main", "Qwen-3.5-9B (K = 90)", "GSM8K FA", {"Booster"}, {"Lisa"}),
    ("main", "Llama-3.1-8B (K = 50)", "SST-2 HS", {"holdfast (ours)"}, {"SafeLoRA"}),
    ("main", "Llama-3.1-8B (K = 50)", "SST-2 HS_qK", {"AsFT"}, {"holdfast (ours)"}),
    ("main", "Llama-3.1-8B (K = 50)", "SST-2 FA", {"SafeGrad"}, {"Lisa"}),
    ("main", "Llama-3.1-8B (K = 50)", "GSM8K HS", {"SafeLoRA"}, {"holdfast (ours)"}),
    ("poison_sweep", "", "p = 0.25 HS_q90", {"SafeLoRA", "holdfast (ours)"}, {"AsFT"}),
    ("poison_sweep", "", "p = 0.25 FA", {"SaLoRA"}, {"SFT", "Vaccine"}),
    ("sensitivity", "tau sweep", "HS_q99", {"0.01", "0.1"}, {"0"}),
    ("sensitivity", "alpha sweep", "HS", {"0.1"}, {"0.01"}),
    ("primal_dual", "SST-2", "FA", set(), set()),
    ("primal_dual", "SST-2", "HS", {"Primal-Dual"}, set()),
    ("antibody", "Qwen-3.5-4B (K = 90)", "SST-2 FA", {"holdfast (ours) on SFT-aligned"}, set()),
    ("antibody", "Llama-3.1-8B (K = 50)", "GSM8K HS", {"holdfast (ours) on Antibody-aligned"}, set()),
]


@needs_paper
@pytest.mark.parametrize(
    ("name", "section", "column", "best", "second"),
    MARKS,
    ids=[f"{m[0]} {m[1]} {m[2]}".replace("  ", " ") for m in MARKS],
)
def test_the_papers_marks_follow_from_its_means(name, section, column, best, second):
    table = build(results(from_reported(Path(str(PAPER)), name)), [name])[0]
    rows = next(one for one in table.sections if one.title == section).rows
    titles = [f"{one.group} {one.shown.title}".strip() for one in table.columns]
    marks = {row.label: row.cells[titles.index(column)].mark for row in rows}
    assert {label for label, mark in marks.items() if mark == "best"} == best
    assert {label for label, mark in marks.items() if mark == "second"} == second


@needs_paper
@pytest.mark.parametrize(
    "name", ["main", "poison_sweep", "quantiles", "sensitivity", "profiling", "primal_dual", "antibody"]
)
def test_the_papers_tables_stand_beside_themselves(name):
    """Every figure is found again, so every name and setting of the paper is matched."""
    path = Path(str(PAPER))
    for table in build(results(from_reported(path, name)), [name]):
        found = beside(table, read_reported(path))
        cells = [cell for section in found.sections for row in section.rows for cell in row.cells]
        assert len(cells) >= 6
        for cell in cells:
            assert cell.mean is not None
            assert cell.published is not None
            assert cell.text(cell.mean) == cell.text(cell.published.mean)
            assert (cell.std is None) == (cell.published.std is None)
            if cell.std is not None and cell.published.std is not None:
                assert cell.text(cell.std) == cell.text(cell.published.std)
