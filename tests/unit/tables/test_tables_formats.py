"""Formats: one table in text, Markdown, LaTeX and long form; labels mean themselves in each."""

from __future__ import annotations

import csv
import io
import re

import pytest
from tests.unit.tables.making import SEEDS, result_json, results

from holdfast_lab.tables.formats import COLUMNS, Style, latex, long_form, markdown, text
from holdfast_lab.tables.formats import escape_latex as latex_escape
from holdfast_lab.tables.formats import escape_markdown as markdown_escape
from holdfast_lab.tables.kinds import build

HOSTILE = "50% & more_of {this} \\ #1 $x^2$ ~ <b>|pipe|</b>\nnext `code` *star* [link]"


@pytest.fixture
def table():
    values = [result_json("base", HS=0.3, HS_q90=0.7, FA=0.6)]
    for seed, shift in zip(SEEDS, (0, -0.04, 0.04), strict=True):
        values.append(result_json("sft", seed=seed, HS=0.55 + shift, HS_q90=0.9, FA=0.95))
        values.append(result_json("holdfast", seed=seed, HS=0.34 + shift, HS_q90=0.72, FA=0.93))
    values.append(result_json("lisa", HS=(0.4, 0.3, 0.5), FA=0.94))
    return build(results(values), ["main"])[0]


def hostile():
    values = [result_json("sft", label=HOSTILE, model=HOSTILE, cell="a"), result_json("lisa", model=HOSTILE, cell="b")]
    return build(results(values), ["main"])[0]


def test_text_has_marks_missing_cells_and_notes(table):
    lines = text(table, Style(), width=100).splitlines()
    sft = next(line for line in lines if line.startswith("SFT "))
    assert sft.split() == ["SFT", "0.550", "±", "0.040", "0.900°±", "0.000", "0.950*±", "0.000"]
    ours = next(line for line in lines if line.startswith("holdfast"))
    assert "0.340*± 0.040" in ours
    assert next(line for line in lines if line.startswith("Lisa")).split() == ["Lisa", "0.400°", "-", "0.940°"]
    assert any("1 of 12 figures are missing" in line for line in lines)
    assert any("* best, ° second best" in line for line in lines)
    assert len({len(line) for line in lines if line.startswith("──")}) == 1


def test_intervals_are_shown_for_one_seed_alone_and_only_when_asked(table):
    assert "[" not in text(table, Style(), width=100)
    shown = text(table, Style(intervals=True), width=100)
    assert "0.400°[0.300, 0.500]" in shown
    assert shown.count("[") == 1
    assert r"0.400</u> \[0.300, 0.500\]" in markdown(table, Style(intervals=True))
    assert r"\underline{0.400}\,{\tiny [0.300, 0.500]}" in latex(table, Style(intervals=True))


def test_text_is_stacked_by_heading_where_it_is_too_wide():
    values = [result_json("sft", task=task, HS=0.5, FA=0.9) for task in ("sst2", "ag_news", "gsm8k")]
    wide = build(results(values), ["main"])[0]
    lines = text(wide, Style(), width=60).splitlines()
    assert max(map(len, lines)) <= 60
    headings = [line for line in lines if "SST-2" in line or "AG News" in line or "GSM8K" in line]
    assert len(headings) == 2
    assert sum(line.startswith("SFT") for line in lines) == 2
    assert sum(line.startswith("Defense") for line in text(wide, Style(), width=200).splitlines()) == 1


def test_markdown_is_a_pipe_table_with_as_many_cells_in_every_line(table):
    lines = [line for line in markdown(table, Style()).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {5}
    assert lines[0] == "| Defense | SST-2 HS ↓ | SST-2 HS\\_qK ↓ | SST-2 FA ↑ |"
    assert "| SFT | 0.550 ± 0.040 | <u>0.900</u> ± 0.000 | **0.950** ± 0.000 |" in lines


def test_markdown_labels_mean_themselves():
    written = markdown(hostile(), Style())
    line = next(line for line in written.splitlines() if "50%" in line and line.startswith("|"))
    assert len(re.findall(r"(?<!\\)\|", line)) == 5
    assert "\\<b\\>" in line
    assert "\\*star\\*" in line
    assert markdown_escape("a\nb") == "a b"


def test_latex_is_balanced_and_has_as_many_columns_in_every_row(table):
    written = latex(table, Style())
    assert written.count("{") - written.count(r"\{") == written.count("}") - written.count(r"\}")
    for environment in ("table*", "tabular"):
        assert written.count(rf"\begin{{{environment}}}") == written.count(rf"\end{{{environment}}}") == 1
    assert r"\begin{tabular}{lccc}" in written
    rows = [line for line in written.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert {line.count("&") for line in rows} == {3}
    assert r"SFT & 0.550\,{\tiny$\pm$0.040} & \underline{0.900}\,{\tiny$\pm$0.000} & \textbf{0.950}" in written
    assert r"HS$_{qK}$ $\downarrow$" in written
    assert r"\multicolumn{3}{c}{SST-2}" in written
    assert r"\cmidrule(lr){2-4}" in written
    order = [written.index(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")]
    assert order == sorted(order)


def test_latex_labels_mean_themselves():
    written = latex(hostile(), Style())
    body = written[written.index(r"\toprule") : written.index(r"\bottomrule")]
    row = next(line for line in body.splitlines() if line.strip().startswith(r"50\%"))
    assert len(re.findall(r"(?<!\\)&", row)) == 3
    assert "\n\n" not in written, "an empty line would end the caption"
    # Every special character that is left unescaped is one that the format itself writes.
    assert not re.search(r"(?<!\\)[%#]", body)


@pytest.mark.parametrize(
    ("raw", "escaped"),
    [
        pytest.param("a_b", r"a\_b", id="underscore"),
        pytest.param("\\", r"\textbackslash{}", id="backslash"),
        pytest.param("{}", r"\{\}", id="braces"),
        pytest.param("$&%#", r"\$\&\%\#", id="dollar ampersand percent hash"),
        pytest.param("^~", r"\textasciicircum{}\textasciitilde{}", id="circumflex tilde"),
        pytest.param("<|>", r"\textless{}\textbar{}\textgreater{}", id="angles and bar"),
        pytest.param("a\n\tb\x1b[0m", "a b [0m", id="control characters"),
        pytest.param("0.1 ± 2 × é", r"0.1 $\pm$ 2 $\times$ é", id="signs"),
    ],
)
def test_latex_escapes(raw, escaped):
    assert latex_escape(raw) == escaped


def test_long_form_has_the_columns_of_the_reported_figures_and_the_seeds(table):
    rows = list(csv.DictReader(io.StringIO(long_form([table], Style()))))
    assert tuple(rows[0]) == COLUMNS == (
        "table", "model", "task", "poison_ratio", "method", "setting", "metric", "mean", "std", "n_seeds",
    )  # fmt: skip
    found = {(row["method"], row["metric"]): row for row in rows}
    assert len(found) == len(rows) == 12
    ours = found["holdfast (ours)", "HS"]
    assert (ours["mean"], ours["std"], ours["n_seeds"], ours["poison_ratio"]) == ("0.34", "0.04", "3", "0.5")
    assert found["Base", "HS"]["poison_ratio"] == "any"
    assert (found["Lisa", "HS_q90"]["mean"], found["Lisa", "HS_q90"]["n_seeds"]) == ("", "0")
    with_intervals = csv.DictReader(io.StringIO(long_form([table], Style(intervals=True))))
    assert next(row for row in with_intervals if row["method"] == "Lisa")["high"] == "0.5"


def test_long_form_tells_a_reference_once_in_a_sweep():
    values = [result_json("sft", ratio=ratio) for ratio in (0.1, 0.5)] + [result_json("base")]
    sweep = build(results(values), ["poison_sweep"])[0]
    rows = list(csv.DictReader(io.StringIO(long_form([sweep], Style()))))
    assert [row["metric"] for row in rows if row["method"] == "Base"] == ["HS", "HS_q90", "FA"]
    assert [row["poison_ratio"] for row in rows if row["method"] == "SFT"] == ["0.1"] * 3 + ["0.5"] * 3
