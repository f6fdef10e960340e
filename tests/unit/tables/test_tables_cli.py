"""`holdfast tables FOLDER`: prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
from tests.unit.tables.making import result_json, write_results

REPORTED = """table,model,task,poison_ratio,method,setting,metric,mean,std
main,Big,sst2,0.5,SFT,,HS,0.91,0.01
"""


@pytest.fixture
def study(tmp_path):
    values = [
        result_json("aligned", HS=0.2, HS_q90=0.3, FA=0.5),
        result_json("sft", HS=(0.6, 0.5, 0.7), HS_q90=0.9, FA=0.9),
        result_json("holdfast", HS=0.3, HS_q90=0.4, FA=0.8),
    ]
    return write_results(tmp_path / "study", values)


def test_tables_are_printed(holdfast, study):
    code, out, err = holdfast("tables", study)
    assert (code, err) == (0, "")
    assert out.index("Harm and utility at poison ratio p = 0.5") < out.index("Quantiles of harm") < out.index("Details")
    assert "holdfast (ours)" in out
    assert "0.300*" in out


@pytest.mark.parametrize(
    ("form", "sign"),
    [("terminal", "── Smol"), ("markdown", "| SFT |"), ("latex", r"\toprule"), ("csv", "table,model,task")],
)
def test_every_format_prints(holdfast, study, form, sign):
    code, out, _ = holdfast("tables", study, "--table", "main", "--format", form)
    assert code == 0
    assert sign in out
    assert "Details" not in out


def test_intervals_are_shown_on_request(holdfast, study):
    assert "[0.500, 0.700]" in holdfast("tables", study, "--table", "main", "--intervals")[1]
    assert "[0.500, 0.700]" not in holdfast("tables", study, "--table", "main")[1]


def test_output_dir_gets_a_file_per_table_and_format_and_the_figures(holdfast, study, tmp_path):
    target = tmp_path / "tables"
    code, out, _ = holdfast("tables", study, "--output", target)
    assert code == 0
    names = {path.name for path in target.iterdir()}
    where = "smollm2-135m-instruct-sst2"
    tables = {
        f"{stem}.{end}" for stem in ("main", f"quantiles-{where}", f"details-{where}") for end in ("md", "tex", "csv")
    }
    drawn = {f"{kind}-smollm2-135m-instruct.{end}" for kind in ("harm_utility",) for end in ("svg", "png")}
    assert names == tables | drawn
    assert {line.rsplit("/", 1)[-1] for line in out.splitlines()} == names
    rows = list(csv.DictReader(io.StringIO((target / "main.csv").read_text())))
    assert {row["method"] for row in rows} == {"Aligned (SFT)", "SFT", "holdfast (ours)"}


def test_output_dir_with_one_format(holdfast, study, tmp_path):
    holdfast("tables", study, "--table", "main", "--format", "latex", "--output-dir", tmp_path / "t")
    assert {path.name for path in (tmp_path / "t").iterdir() if "harm" not in path.name} == {"main.tex"}


def test_json_has_figures_marks_and_notes(holdfast, study):
    found = json.loads(holdfast("tables", study, "--table", "main", "--json")[1])
    (table,) = found["tables"]
    assert table["name"] == "main"
    ours = next(x for x in table["figures"] if x["method"] == "holdfast (ours)" and x["metric"] == "HS")
    assert (ours["mean"], ours["n_seeds"], ours["mark"], ours["poison_ratio"]) == (0.3, 1, "best", 0.5)
    assert found["files"] == []
    assert found["left_out"] == []


def test_the_papers_figures_come_from_the_option_or_the_environment(holdfast, study, tmp_path, monkeypatch):
    file = tmp_path / "reported.csv"
    file.write_text(REPORTED)
    asked = ("tables", study, "--table", "main")
    assert "paper" not in holdfast(*asked)[1]
    code, out, err = holdfast(*asked, "--reported", file)
    assert (code, "0.910" in out) == (0, False)
    assert "the paper has no SmolLM2-135M-Instruct; --reported-model chooses" in err
    assert "0.910 ± 0.010" in holdfast(*asked, "--reported", file, "--reported-model", "Big")[1]
    monkeypatch.setenv("HOLDFAST_REPORTED", str(file))
    assert "0.910 ± 0.010" in holdfast(*asked, "--reported-model", "Big")[1]


def test_several_studies_make_one_table_and_the_same_study_twice_does_not(holdfast, study, tmp_path):
    other = write_results(tmp_path / "other", [result_json("lisa", HS=0.4, FA=0.9)])
    code, out, _ = holdfast("tables", study, other, "--table", "main")
    assert code == 0
    assert "Lisa" in out
    code, out, err = holdfast("tables", study, study)
    assert (code, out) == (3, "")
    assert "expected each cell once" in err


def test_failed_cells_are_told(holdfast, study):
    (study / "errors").mkdir()
    (study / "errors" / "lost.cell.json").write_text("{}")
    assert "1 cells of the study failed: lost.cell" in holdfast("tables", study)[2]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["--table", "mian"], 2, "did you mean 'main'?", id="unknown table"),
        pytest.param(["--reported-model", "Big"], 2, "without reported figures", id="model alone"),
        pytest.param(["--reported", "none.csv"], 2, "none.csv is not a file", id="no file"),
        pytest.param(["--table", "profiling"], 3, "hold nothing for profiling", id="empty table"),
    ],
)
def test_refusals_name_cause_and_remedy_and_write_nothing(holdfast, study, arguments, code, said):
    before = sorted(study.rglob("*"))
    found, out, err = holdfast("tables", study, *arguments)
    assert (found, out) == (code, "")
    assert said in err
    assert "What to do" in err
    assert sorted(study.rglob("*")) == before


def test_a_refused_report_leaves_no_files(holdfast, study, tmp_path):
    write_results(study, [result_json("lisa", protocol={"other": 1})])
    code, _, err = holdfast("tables", study, "--output-dir", tmp_path / "t")
    assert code == 3
    assert "follow different protocols" in err
    assert not (tmp_path / "t").exists()
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    assert holdfast("tables", study, "--table", "profiling", "--output-dir", blocked)[0] == 3
    assert blocked.read_text() == "mine"


def test_a_folder_that_is_not_a_study_is_refused(holdfast, tmp_path):
    code, _, err = holdfast("tables", tmp_path)
    assert code == 3
    assert "holds no result" in err


def test_tables_need_neither_torch_nor_scipy(study):
    """They are made on a laptop from files; figures need matplotlib alone."""
    script = (
        "import sys; from pathlib import Path\n"
        "from holdfast_lab.tables.kinds import build; from holdfast_lab.tables.results import read_results\n"
        "from holdfast_lab.tables.figures import figures\n"
        "found = read_results(Path(sys.argv[1])); build(found)\n"
        "assert 'matplotlib' not in sys.modules\n"
        "assert figures(found)\n"
        "print(sorted({'torch', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(study)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_old_spelling_names_the_new_one(holdfast, study):
    code, _, err = holdfast("report", study, "--tables")
    assert code == 2
    assert "write holdfast tables STUDY" in err
