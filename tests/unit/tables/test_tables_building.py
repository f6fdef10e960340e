"""Building tables: rows, order, marks, missing cells, seeds; one test a promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.tables.making import SEEDS, result_json, results

from holdfast.core.errors import ConfigError, DataError
from holdfast_lab.tables.kinds import KINDS, build, left_out, parse_setting
from holdfast_lab.tables.lines import quantile, slug
from holdfast_lab.tables.table import Cell, Row, Table

ROOT = Path(__file__).parents[3]


def row(table: Table, label: str, section: int = 0) -> Row:
    return next(one for one in table.sections[section].rows if one.label == label)


def cell(table: Table, label: str, metric: str, group: str = "", section: int = 0) -> Cell:
    at = [j for j, c in enumerate(table.columns) if c.metric == metric and (not group or c.group == group)]
    return row(table, label, section).cells[at[0]]


def labels(table: Table, section: int = 0) -> list[str]:
    return [one.label for one in table.sections[section].rows]


def test_rows_stand_in_the_papers_order_and_own_labels_follow_the_plain_row():
    defenses = ["zeta", "holdfast", "asft", "sft", "lisa", "vaccine", "aligned", "base", "alpha"]
    values = [result_json(name) for name in defenses]
    values.append(result_json("holdfast", label="A variant"))
    table = build(results(values), ["main"])[0]
    assert labels(table) == [
        "Base", "Aligned (SFT)", "SFT", "Vaccine", "Lisa", "AsFT", "holdfast (ours)", "A variant", "alpha", "zeta",
    ]  # fmt: skip


def test_mean_and_sample_deviation_over_seeds():
    values = [result_json("sft", seed=seed, HS=hs, FA=0.9) for seed, hs in zip(SEEDS, (0.1, 0.2, 0.6), strict=True)]
    found = cell(build(results(values), ["main"])[0], "SFT", "HS")
    assert found.mean == pytest.approx(0.3, abs=1e-15)
    # ((0.2)^2 + (0.1)^2 + (0.3)^2) / 2 = 0.07
    assert found.std == pytest.approx(0.07**0.5, abs=1e-15)
    assert (found.seeds, found.low, found.high) == (3, None, None)


def test_one_seed_has_its_interval_and_no_deviation():
    table = build(results([result_json("sft", HS=(0.5, 0.4, 0.6), FA=0.9)]), ["main"])[0]
    found = cell(table, "SFT", "HS")
    assert (found.std, found.low, found.high, found.seeds) == (None, 0.4, 0.6, 1)
    assert "one seed" in table.notes


def test_references_are_never_marked_and_directions_differ():
    values = [
        result_json("base", HS=0.01, FA=0.99),
        result_json("aligned", HS=0.02, FA=0.98),
        result_json("sft", HS=0.6, FA=0.95),
        result_json("lisa", HS=0.4, FA=0.90),
        result_json("holdfast", HS=0.3, FA=0.92),
    ]
    table = build(results(values), ["main"])[0]
    marks = {name: tuple(cell(table, name, metric).mark for metric in ("HS", "FA")) for name in labels(table)}
    assert marks == {
        "Base": (None, None),
        "Aligned (SFT)": (None, None),
        "SFT": (None, "best"),
        "Lisa": ("second", None),
        "holdfast (ours)": ("best", "second"),
    }


def test_ties_are_decided_by_what_is_printed():
    """0.3001 and 0.2999 print alike and share the mark; the second best is the next printed value."""
    harm = {"sft": 0.3001, "lisa": 0.2999, "asft": 0.4002, "holdfast": 0.3998, "vaccine": 0.5}
    table = build(results([result_json(k, HS=v, FA=0.9) for k, v in harm.items()]), ["main"])[0]
    found = {one.label: one.cells[0].mark for one in table.sections[0].rows}
    assert found == {"SFT": "best", "Lisa": "best", "AsFT": "second", "holdfast (ours)": "second", "Vaccine": None}
    assert {one.cells[2].mark for one in table.sections[0].rows} == {None}, "all tie: nothing is better"


def test_missing_cells_stay_and_are_counted():
    values = [
        result_json("sft", model="A", HS=0.5, HS_q90=0.8, FA=0.9),
        result_json("lisa", model="A", HS=0.5, HS_q90=0.8, FA=0.9),
        result_json("sft", model="B", HS=0.5, HS_q90=0.8, FA=0.9),
        result_json("sft", model="A", task="gsm8k", HS=0.5, HS_q90=0.8, FA=0.9),
    ]
    table = build(results(values), ["main"])[0]
    assert [labels(table, i) for i in range(2)] == [["SFT", "Lisa"]] * 2
    assert [one.mean for one in row(table, "Lisa", 1).cells] == [None] * 6
    # Lisa: 6 on B and 3 on A's GSM8K; SFT: 3 on B's GSM8K.
    assert "12 of 24 figures are missing, shown as -" in table.notes


def test_rows_with_fewer_seeds_are_named():
    values = [result_json("sft", seed=seed) for seed in SEEDS]
    values += [result_json("lisa", seed=seed) for seed in SEEDS[:2]]
    notes = build(results(values), ["main"])[0].notes
    assert "mean ± sample standard deviation over 3 seeds" in notes
    assert "fewer seeds: SmolLM2-135M-Instruct (K = 90) / Lisa / SST-2 (2)" in notes


def test_k_is_50_for_llama_and_90_otherwise():
    assert [quantile(name) for name in ("Llama-3.1-8B", "Qwen-3.5-4B", "SmolLM2-135M-Instruct")] == [50, 90, 90]
    both = {"HS": 0.5, "HS_q50": 0.45, "HS_q90": 0.8, "FA": 0.9}
    values = [result_json("sft", model=name, **both) for name in ("Llama-3.1-8B", "Qwen-3.5-4B")]
    table = build(results(values), ["main"])[0]
    assert [section.title for section in table.sections] == ["Qwen-3.5-4B (K = 90)", "Llama-3.1-8B (K = 50)"]
    assert [cell(table, "SFT", "HS_qK", section=i).mean for i in (0, 1)] == [0.8, 0.45]
    assert [cell(table, "SFT", "HS_qK", section=i).metric for i in (0, 1)] == ["HS_q90", "HS_q50"]


def test_main_is_at_half_poison_and_the_sweep_has_every_ratio():
    values = [result_json("sft", ratio=ratio, HS=ratio, FA=0.9) for ratio in (0.05, 0.5, 0.8)]
    values.append(result_json("base", HS=0.3, FA=0.6))
    found = results(values)
    assert cell(build(found, ["main"])[0], "SFT", "HS").mean == 0.5
    sweep = build(found, ["poison_sweep"])[0]
    assert [cell(sweep, "SFT", "HS", f"p = {p}").mean for p in ("0.05", "0.5", "0.8")] == [0.05, 0.5, 0.8]
    assert [cell(sweep, "Base", "HS", f"p = {p}").mean for p in ("0.05", "0.5", "0.8")] == [0.3] * 3
    assert cell(sweep, "Base", "HS").poison_ratio is None


def test_no_sweep_where_one_ratio_was_run():
    found = results([result_json("sft", ratio=0.1)])
    assert "p = 0.1" in build(found, ["main"])[0].title
    with pytest.raises(DataError, match="nothing for poison_sweep"):
        build(found, ["poison_sweep"])


def test_a_setting_enters_the_sensitivity_and_not_the_main_table():
    values = [result_json("holdfast"), result_json("holdfast", setting="tau=0.05"), result_json("sft")]
    found = results(values)
    assert labels(build(found, ["main"])[0]) == ["SFT", "holdfast (ours)"]
    assert labels(build(found, ["details"])[0]) == ["SFT", "holdfast (ours)", "holdfast (ours), tau=0.05"]


def test_sensitivity_sections_values_and_the_default_row():
    default = {"tau": 0.1, "alpha": 0.05, "beta": 10.0}
    settings = ["beta=1", "tau=0.2", "tau=0.01", "alpha=0.2", "unit=nll_sum", "a mixture"]
    values = [result_json("holdfast", constraint=default, HS=0.5, FA=0.9)]
    values += [result_json("holdfast", setting=text, HS=0.4, FA=0.9) for text in settings]
    table = build(results(values), ["sensitivity"])[0]
    assert [section.title for section in table.sections] == [
        "tau sweep, alpha = 0.05, beta = 10",
        "alpha sweep, tau = 0.1, beta = 10",
        "beta sweep, tau = 0.1, alpha = 0.05",
        "unit sweep, tau = 0.1, alpha = 0.05, beta = 10",
        "other settings, tau = 0.1, alpha = 0.05, beta = 10",
    ]
    assert [labels(table, i) for i in range(5)] == [
        ["0.01", "0.1", "0.2"],
        ["0.05", "0.2"],
        ["1", "10"],
        ["default", "nll_sum"],
        ["a mixture", "default"],
    ]
    assert (row(table, "0.1").setting, row(table, "0.1").cells[0].mean) == ("tau=0.1", 0.5)


def test_the_default_is_not_shown_twice_where_its_value_was_run():
    values = [
        result_json("holdfast", constraint={"tau": 0.1}, HS=0.5, FA=0.9),
        result_json("holdfast", setting="tau=0.10", HS=0.4, FA=0.9),
    ]
    table = build(results(values), ["sensitivity"])[0]
    assert labels(table) == ["0.10"]


def test_the_default_under_the_name_of_its_value_stands_once():
    """A study runs equal work once and writes it under both names."""
    values = [
        result_json("holdfast", HS=0.5, FA=0.9),
        result_json("holdfast", setting="tau=0.1", HS=0.5, FA=0.9),
        result_json("holdfast", setting="tau=0.2", HS=0.4, FA=0.9),
        result_json("holdfast", setting="beta=1", HS=0.3, FA=0.9),
    ]
    table = build(results(values), ["sensitivity"])[0]
    assert [labels(table, i) for i in (0, 1)] == [["0.1", "0.2"], ["1", "default"]]


def test_two_spellings_of_one_value_are_refused():
    values = [result_json("holdfast", setting=text, cell=text) for text in ("tau=0.1", "tau = 0.1")]
    with pytest.raises(DataError, match=r"two rows are called '0.1'"):
        build(results(values), ["sensitivity"])


def test_a_sweep_of_one_seed_is_compared_with_the_default_on_that_seed():
    values = [
        result_json("holdfast", seed=seed, HS=hs, FA=0.9) for seed, hs in zip(SEEDS, (0.1, 0.5, 0.9), strict=True)
    ]
    values.append(result_json("holdfast", setting="tau=0.05", seed=1337, HS=0.4, FA=0.9))
    table = build(results(values), ["sensitivity"])[0]
    assert cell(table, "default", "HS").mean == 0.5
    assert cell(table, "0.05", "HS").mark == "best"
    assert "tau sweep: compared on the seeds that all rows have (1337)" in table.notes


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("tau=0.05", ("tau", "0.05")),
        (" tau = 0.05 ", ("tau", "0.05")),
        ("unit=nll_sum", ("unit", "nll_sum")),
        ("tau=0.05,beta=1", ("", "tau=0.05,beta=1")),
        ("=5", ("", "=5")),
        ("paper", ("", "paper")),
    ],
)
def test_settings_of_one_name(setting, found):
    assert parse_setting(setting) == found


def test_primal_dual_has_a_section_per_task_and_marks_the_best_alone():
    values = [
        result_json(name, task=task, HS=hs, FA=0.94)
        for name, hs in (("holdfast", 0.3), ("primal_dual", 0.4), ("sft", 0.1))
        for task in ("gsm8k", "sst2")
    ]
    table = build(results(values), ["primal_dual"])[0]
    assert [section.title for section in table.sections] == ["SST-2", "GSM8K"]
    assert labels(table) == ["holdfast (ours)", "Primal-Dual"]
    assert [cell(table, name, "HS").mark for name in labels(table)] == ["best", None]
    assert [cell(table, name, "FA").mark for name in labels(table)] == [None, None]


def test_antibody_composition_leaves_plain_sft_and_floors_unmarked():
    values = [
        result_json("aligned", HS=0.1, FA=0.99),
        result_json("aligned", align="antibody", HS=0.05, FA=0.99),
        result_json("sft", HS=0.5, FA=0.97),
        result_json("antibody", align="antibody", HS=0.27, FA=0.86),
        result_json("holdfast", HS=0.34, FA=0.95),
        result_json("holdfast", align="antibody", HS=0.37, FA=0.90),
        result_json("lisa", HS=0.01, FA=0.99),
    ]
    found = results(values)
    table = build(found, ["antibody"])[0]
    assert labels(table) == [
        "Aligned (SFT)",
        "Aligned (Antibody)",
        "SFT",
        "Antibody",
        "holdfast (ours) on SFT-aligned",
        "holdfast (ours) on Antibody-aligned",
    ]
    assert [one.cells[0].mark for one in table.sections[0].rows] == [None, None, None, "best", None, None]
    assert [one.cells[2].mark for one in table.sections[0].rows] == [None, None, None, None, "best", None]
    main = build(found, ["main"])[0]
    assert labels(main) == ["Aligned (SFT)", "SFT", "Lisa", "holdfast (ours)"]
    assert "in tables of their own: Antibody" in main.notes


def test_profiling_marks_nothing_and_does_not_meet_the_other_results():
    cost = {"step_ms": 136.84, "p90_ms": 160.0, "gpu_mb": 14512.0, "samples_per_s": 28.16, "x_sft": 1.0}
    values = [result_json("sft"), result_json("sft", **cost), result_json("holdfast", **(cost | {"step_ms": 282.2}))]
    found = results(values)
    table = build(found, ["profiling"])[0]
    assert [one.text(one.mean) for one in row(table, "SFT").cells] == ["136.8", "160.0", "14512", "28.16", "1.00"]
    assert {cell.mark for cell in table.cells} == {None}
    assert cell(build(found, ["main"])[0], "SFT", "HS").seeds == 1


def test_quantiles_only_where_the_judge_gave_probabilities():
    levels = {f"HS_q{k}": k / 100 for k in (10, 25, 50, 75, 90, 95, 99, 100)}
    values = [result_json("sft", HS=0.5, FA=0.9, **levels), result_json("sft", task="gsm8k", HS=0.5, FA=0.1)]
    tables = build(results(values), ["quantiles"])
    assert [table.title for table in tables] == ["Quantiles of harm, SmolLM2-135M-Instruct / SST-2 at p = 0.5"]
    assert [one.mean for one in row(tables[0], "SFT").cells[1:-1]] == list(levels.values())


def test_one_figure_from_two_cells_is_refused():
    found = results([result_json("sft", cell="a"), result_json("sft", cell="b")])
    with pytest.raises(DataError, match=r"cells a and b are the same figure .*seed 42"):
        build(found, ["main"])


def test_two_rows_of_one_name_are_refused():
    found = results([result_json("lisa", label="Mine"), result_json("asft", label="Mine")])
    with pytest.raises(DataError, match=r"two rows are called 'Mine' \(lisa on sft and asft on sft\)"):
        build(found, ["main"])


def test_results_in_no_table_are_told():
    values = [result_json("sft"), result_json("holdfast", setting="tau=1", ratio=0.1, cell="lost", HS=0.1)]
    found = results(values)
    assert left_out(found, build(found, ["main"])) == ["lost"]
    assert left_out(found, build(found)) == []
    assert left_out(found, [])[-1] == "lost"


def test_unknown_tables_are_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown table 'mian'") as refused:
        build(results([result_json("sft")]), ["mian"])
    assert "'main'" in refused.value.remedy


def test_names_that_differ_in_signs_get_files_of_their_own():
    assert slug("quantiles", "Org/My Model", "sst2") == "quantiles-org-my-model-sst2"
    assert slug("..", "/") == "x-x"
    values = [result_json("sft", model=name, cell=name.replace("/", "_")) for name in ("a/b", "a b")]
    slugs = [table.slug for table in build(results(values), ["details"])]
    assert sorted(slugs) == ["details-a-b-sst2", "details-a-b-sst2-2"]


def test_every_table_of_the_paper_has_a_builder():
    paper = {"main", "poison_sweep", "sensitivity", "quantiles", "profiling", "primal_dual", "antibody"}
    assert set(KINDS) == paper | {"details"}


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_several_alignments_have_one_order_in_every_process(seed):
    """Rows that differ in nothing but their alignment once stood in the order of a set of strings."""
    code = (
        "from tests.unit.tables.making import result_json, results\n"
        "from holdfast_lab.tables.lines import lines_of\n"
        "aligners = ('antibody', 'sft', 'booster', 'vaccine')\n"
        "print([x.align for x in lines_of(results([result_json('aligned', align=a) for a in aligners]))])\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['sft', 'vaccine', 'booster', 'antibody']"
