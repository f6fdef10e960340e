"""A study beside another one: the order of the rows, their moves, and in how many seeds holdfast lies below each."""

from __future__ import annotations

import pytest
from tests.unit.tables.making import PROTOCOL, result_json, results, write_results
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.core.errors import DataError
from holdfast.tables.replicated import replicated

OTHER = PROTOCOL | {"template": "alpaca"}


def study(rows: dict[str, dict[int, float]], *, start: float = 0.1, protocol=PROTOCOL, task="sst2"):
    """Harm by row and seed; accuracy falls with harm, so that the order of one is the other's reversed."""
    cells = [
        result_json(defense, seed=seed, task=task, protocol=protocol, HS=harm, FA=1 - harm)
        for defense, seeds in rows.items()
        for seed, harm in seeds.items()
    ]
    return [*cells, result_json("aligned", task=task, protocol=protocol, HS=start, FA=0.2)]


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


def test_a_study_of_other_tasks_has_nothing_beside_it():
    assert replicated(results(study(FIRST, task="gsm8k")), results(study(AGAIN))) == ""


def test_one_study_of_two_protocols_is_refused():
    mixed = [*study(FIRST), result_json("lisa", seed=1, protocol=OTHER, HS=0.2, FA=0.5)]
    with pytest.raises(DataError, match="different protocols"):
        replicated(results(mixed), results(study(AGAIN)))


def written(tmp_path, other: str):
    write_results(tmp_path / "again", study(AGAIN))
    write_results(tmp_path / "first", study(FIRST))
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- replicated: {other} -->\nearlier text\n<!-- end -->\nafter\n")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "again"), "--tables", "--page", str(page)])
    return done, page.read_text()


def test_a_page_names_the_other_results_by_a_folder_beside_it(tmp_path):
    done, text = written(tmp_path, "first")
    assert done.exit_code == 0, done.output
    assert lines(text)["mix"][-1] == "2 of 3"
    assert "earlier text" not in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")


def test_a_folder_that_is_not_there_is_named_and_the_page_is_left(tmp_path):
    done, text = written(tmp_path, "nowhere")
    assert done.exit_code != 0
    assert "nowhere is not a folder" in str(done.exception)
    assert "earlier text" in text
