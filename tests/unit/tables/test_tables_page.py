"""Pages of which parts are generated: what is replaced, what is left alone, what is refused."""

from __future__ import annotations

import pytest
from tests.unit.tables.making import result_json, write_results
from tools.study_page.__main__ import main
from tools.study_page.page import regenerate

from holdfast.core.errors import ConfigError

REPORTED = """table,model,task,poison_ratio,method,setting,metric,mean,std
main,Big,sst2,0.5,SFT,,HS,0.919191,0.01
main,Big,sst2,0.5,Lisa,,HS,0.5,0.01
main,Big,sst2,0.5,Ours,,HS,0.3,0.01
"""


def test_blocks_are_replaced_and_prose_is_kept():
    text = (
        "before\n<!-- table: main of a.yaml -->\nold\n<!-- end -->\nafter\n<!-- paper: main -->\nkept\n<!-- end -->\n"
    )
    seen = []

    def make(block):
        seen.append((block.kind, block.name, block.study, block.line))
        return "new\n" if block.kind == "table" else None

    found = regenerate(text, "page", make)
    assert found == text.replace("old", "new")
    assert seen == [("table", "main", "a.yaml", 2), ("paper", "main", None, 6)]
    assert regenerate(found, "page", make) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- table: main -->\nx\n", "page:1: the block 'main' has no end"),
        ("x\n<!-- end -->\n", "page:2: an end without a block"),
        ("<!-- table: main -->\n<!-- table: main -->\n<!-- end -->\n", "page:2: a block inside the block 'main'"),
        ("<!-- tabel: main -->\n<!-- end -->\n", "page:1: a block of kind 'tabel'"),
        ("only prose\n", "no block"),
    ],
)
def test_broken_pages_are_refused_by_line(text, said):
    with pytest.raises(ConfigError, match=said):
        regenerate(text, "page", lambda block: "")


@pytest.fixture
def study_page(monkeypatch, capsys):
    monkeypatch.delenv("HOLDFAST_REPORTED", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def study(tmp_path):
    def figure(value):
        return (value, value - 0.01, value + 0.01)

    values = [
        result_json("aligned", HS=figure(0.2), FA=figure(0.3)),
        *(result_json("sft", ratio=p, HS=figure(0.5 + p), FA=figure(0.9)) for p in (0.1, 0.5)),
        *(result_json("holdfast", ratio=p, HS=figure(0.3), FA=figure(0.8)) for p in (0.1, 0.5)),
        result_json("lisa", HS=figure(0.25), FA=figure(0.85)),
    ]
    return write_results(tmp_path / "study", values)


def page_of(tmp_path, *blocks):
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {block} -->\n<!-- end -->\n" for block in blocks), encoding="utf-8")
    return page


def test_a_page_says_who_is_on_the_front_and_how_harm_grows(study_page, study, tmp_path):
    page = page_of(tmp_path, "table: pareto", "table: pairs", "table: slopes", "table: sensitivity", "figures: drawn")
    code, out, _ = study_page(study, "--page", page)
    assert code == 0
    text = page.read_text()
    assert "holdfast (ours) is **not on the front**: Lisa beyond the intervals" in text
    assert "| SFT | -0.700" in text
    assert "more harm, less utility" in next(line for line in text.splitlines() if line.startswith("| Lisa | +"))
    slopes = [line for line in text.splitlines() if "0.1 to 0.5 (2)" in line]
    assert [line.rsplit("| ", 1)[1] for line in slopes] == ["rises |", "no significant slope |"]
    assert "No cell of this kind has been measured yet." in text
    drawn = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert drawn == {f"harm_{kind}-smollm2-135m-instruct.png" for kind in ("utility", "poison")}
    assert all(f"(drawn/{name})" in text for name in drawn)
    assert len(out.splitlines()) == 3


def test_the_papers_figures_are_needed_for_their_blocks_and_never_enter_the_page(study_page, study, tmp_path):
    page, file = page_of(tmp_path, "paper: main", "paper: antibody"), tmp_path / "reported.csv"
    file.write_text(REPORTED)
    before = page.read_text()
    code, _, err = study_page(study, "--page", page)
    assert (code, page.read_text()) == (0, before)
    assert "left as they are without the paper's figures: page.md:1, page.md:3" in err
    study_page(study, "--page", page, "--reported", file, "--reported-model", "Big")
    text = page.read_text()
    assert "order of 3 rows against the paper's, Spearman: SST-2 HS +0.50" in text
    assert "No row of this table can be compared with the paper's figures yet." in text
    assert "0.919" not in text


def test_an_unknown_table_is_refused_and_the_page_left(study_page, study, tmp_path):
    page = page_of(tmp_path, "table: mian")
    before = page.read_text()
    code, _, err = study_page(study, "--page", page)
    assert (code, page.read_text()) == (2, before)
    assert "did you mean 'main'?" in err
    assert "What to do" in err


def test_a_page_that_is_not_there_is_refused(study_page, study, tmp_path):
    code, _, err = study_page(study, "--page", tmp_path / "none.md")
    assert (code, "none.md is not a file" in err) == (2, True)
    page = page_of(tmp_path, "table: headline")
    assert study_page(study, "--page", page)[:2] == (0, f"{page}\n")
    assert "| holdfast (ours) | 0.300" in page.read_text()
    assert "Lisa" not in page.read_text()


def test_variants_of_ours_and_rows_on_other_alignments_stay_out_of_the_front(study_page, study, tmp_path):
    better = {"HS": (0.01, 0.0, 0.02), "FA": (0.99, 0.98, 1.0)}
    more = [result_json("holdfast", setting="tau=0", **better), result_json("holdfast", align="antibody", **better)]
    write_results(study, [*more, result_json("asft", setting="lam=1", **better)])
    page = page_of(tmp_path, "table: pareto")
    assert study_page(study, "--page", page)[0] == 0
    assert "holdfast (ours) is **not on the front**: Lisa / AsFT, lam=1 beyond" in page.read_text()
    assert "tau=0" not in page.read_text()
    assert "Antibody" not in page.read_text()


def test_the_front_says_when_rows_start_from_different_runs_of_an_alignment(study_page, study, tmp_path):
    page = page_of(tmp_path, "table: pareto")
    values = [
        result_json(name) | {"provenance": {"kept_sha256": digest}} for name, digest in (("mix", "a"), ("kl", "b"))
    ]
    write_results(study, values)
    study_page(study, "--page", page)
    assert "Rows start from more than one run of an alignment: SFT (2)." in page.read_text()
