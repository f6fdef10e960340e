"""A study beside another one: the order of the rows, their moves, and in how many seeds holdfast lies below each."""

from __future__ import annotations

import pytest
from tests.unit.tables.making import PROTOCOL, result_json, results, write_results
from tools.study_page.__main__ import main
from tools.study_page.replicated import replicated

from holdfast.core.errors import DataError

OTHER = PROTOCOL | {"template": "alpaca"}


def study(rows: dict[str, dict[int, float]], *, start: float = 0.1, protocol=PROTOCOL, **more):
    """Harm by row and seed; accuracy falls with harm, so that the order of one is the other's reversed."""
    cells = [
        result_json(defense, seed=seed, protocol=protocol, HS=harm, FA=1 - harm, **more)
        for defense, seeds in rows.items()
        for seed, harm in seeds.items()
    ]
    return [*cells, result_json("aligned", protocol=protocol, HS=start, FA=0.2, **more)]


FIRST = {"holdfast": {1: 0.2, 2: 0.3}, "mix": {1: 0.4, 2: 0.2}, "sft": {1: 0.8, 2: 0.9}}
AGAIN = {"holdfast": {5: 0.25}, "mix": {5: 0.3}, "sft": {5: 0.7}, "lisa": {5: 0.1}}


def lines(text: str) -> dict[str, list[str]]:
    """The table's rows by their first cell."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return {first.strip(): rest for first, *rest in cells}


def test_each_row_of_both_with_its_move_and_every_seed():
    found = lines(replicated(results(study(FIRST)), results(study(AGAIN))))
    assert found["mix"][2:] == ["+0.000", "-0.200, +0.100", "-0.050", "2 of 3"]
    assert found["SFT"][2:] == ["-0.150", "-0.600, -0.600", "-0.450", "3 of 3"]
    assert found["Aligned (SFT)"][2:] == ["+0.000", "+0.100, +0.200", "+0.150", "0 of 3"]
    assert found["holdfast (ours)"][2:] == ["+0.000", "-", "-", "-"]
    assert "Lisa" not in found


def test_the_aligned_model_is_one_measurement_whatever_it_is_compared_with():
    start = lines(replicated(results(study(FIRST)), results(study(AGAIN))))["Aligned (SFT)"]
    assert start[:2] == ["0.100", "0.100"]  # not a mean over holdfast's seeds, which would have a spread


def test_the_order_of_the_rows_and_the_largest_move():
    text = replicated(results(study(FIRST)), results(study(AGAIN)))
    assert "3 rows in both, Spearman: HS +1.00, FA +1.00; largest move -0.150 (SFT)" in text
    turned = {"holdfast": {5: 0.9}, "mix": {5: 0.8}, "sft": {5: 0.1}}
    assert "Spearman: HS -1.00, FA -1.00; largest move -0.750 (SFT)" in replicated(
        results(study(FIRST)), results(study(turned))
    )


def test_two_rows_have_no_rank_correlation():
    few = {name: FIRST[name] for name in ("holdfast", "mix")}
    assert "2 rows in both, Spearman: HS undefined, FA undefined" in replicated(
        results(study(few)), results(study(AGAIN))
    )


def test_what_the_protocols_differ_in_is_said():
    assert replicated(results(study(FIRST)), results(study(AGAIN))).startswith("One protocol.")
    text = replicated(results(study(FIRST)), results(study(AGAIN, protocol=OTHER)))
    assert text.startswith("The protocols differ in `template`.")


@pytest.mark.parametrize("other", [{"task": "gsm8k"}, {"model": "Another"}, {"ratio": 0.25}])
def test_a_study_of_another_task_model_or_ratio_has_nothing_beside_it(other):
    text = replicated(results(study(FIRST, **other)), results(study(AGAIN)))
    assert text.startswith("The two studies have no row in common")


def test_a_row_by_the_same_name_on_another_alignment_is_another_row():
    there = [*study(FIRST), result_json("antibody", seed=1, align="sft", HS=0.9, FA=0.1)]
    here = [*study(AGAIN), result_json("antibody", seed=5, align="antibody", HS=0.1, FA=0.1)]
    text = replicated(results(there), results(here))
    assert "Antibody" not in lines(text)
    assert "- there alone: Antibody" in text
    assert "- here alone: Lisa / Antibody" in text


def test_one_study_may_have_a_defense_on_two_alignments():
    both = [
        result_json("antibody", seed=s, align=a, HS=h, FA=0.5) for s, a, h in ((1, "sft", 0.9), (1, "antibody", 0.4))
    ]
    found = lines(replicated(results([*study(FIRST), *both]), results([*study(AGAIN), *both_again(both)])))
    assert found["Antibody on SFT-aligned"][2] == found["Antibody"][2] == "+0.010"


def both_again(cells):
    """The same rows with another seed, a hundredth more harmful."""
    return [
        result_json("antibody", seed=5, align=one["align"], HS=one["metrics"]["HS"]["value"] + 0.01, FA=0.5)
        for one in cells
    ]


def test_a_tie_is_not_below():
    level = AGAIN | {"mix": {5: 0.25}}
    assert lines(replicated(results(study(FIRST)), results(study(level))))["mix"][-1] == "1 of 3"


def test_a_row_without_harm_is_left_out_and_one_without_utility_is_not_ordered_by_it():
    cells = study({name: AGAIN[name] for name in ("holdfast", "mix", "sft")})
    bare = [result_json("lisa", seed=5, FA=0.5), result_json("penalty", seed=5, HS=0.9)]
    there = FIRST | {"lisa": {1: 0.5}, "penalty": {1: 0.95}}
    text = replicated(results(study(there)), results([*cells, *bare]))
    assert "4 rows in both, Spearman: HS +1.00, FA +1.00 (3 rows)" in text
    assert "- there alone: Lisa" in text
    assert "inf" not in text
    assert "nan" not in text


def test_studies_without_holdfast_have_moves_and_no_distances():
    there, here = ({name: rows[name] for name in ("mix", "sft")} for rows in (FIRST, AGAIN))
    found = lines(replicated(results(study(there)), results(study(here))))
    assert found["SFT"][2:] == ["-0.150", "-", "-", "-"]


def test_a_row_with_other_settings_is_named():
    def one(seed: int, tau: float):
        return result_json("holdfast", seed=seed, HS=0.2, FA=0.5, constraint={"tau": tau, "alpha": 0.05, "beta": 10.0})

    text = replicated(results([one(1, 0.1)]), results([one(5, 0.5)]))
    assert "- holdfast (ours) ran with other settings: tau: 0.1 / 0.5" in text
    assert "other settings" not in replicated(results([one(1, 0.1)]), results([one(5, 0.1)]))


def test_a_study_beside_itself_is_refused():
    with pytest.raises(DataError, match="are one measurement, expected two studies"):
        replicated(results(study(FIRST)), results(study(FIRST)))


def test_one_study_of_two_protocols_is_refused():
    mixed = [*study(FIRST), result_json("lisa", seed=1, protocol=OTHER, HS=0.2, FA=0.5)]
    with pytest.raises(DataError, match=r"table replicated, there: .* different protocols"):
        replicated(results(mixed), results(study(AGAIN)))


def written(tmp_path, other: str):
    write_results(tmp_path / "again", study(AGAIN))
    write_results(tmp_path / "first", study(FIRST))
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- replicated: {other} -->\nearlier text\n<!-- end -->\nafter\n")
    return main([str(tmp_path / "again"), "--page", str(page)]), page.read_text()


def test_a_page_names_the_other_results_by_a_folder_beside_it(tmp_path):
    code, text = written(tmp_path, "first")
    assert code == 0
    assert lines(text)["mix"][-1] == "2 of 3"
    assert "earlier text" not in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")


@pytest.mark.parametrize(
    ("other", "said"), [("nowhere", "nowhere is not a folder"), ("first of study.yaml", "takes no study")]
)
def test_a_block_that_cannot_be_made_is_named_and_the_page_is_left(tmp_path, capsys, other, said):
    code, text = written(tmp_path, other)
    err = capsys.readouterr().err
    assert code == 2
    assert f"{tmp_path / 'page.md'}:2: replicated: " in err
    assert said in err
    assert "earlier text" in text
