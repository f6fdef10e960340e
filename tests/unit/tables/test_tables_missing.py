"""The line that says which cells of a study are missing."""

from __future__ import annotations

from tools.study_page.missing import Wanted, missing_line


def wanted(tasks=("sst2", "gsm8k"), ratios=(0.5,), seeds=(1, 2), rows=("SFT", "Lisa, x")):
    found = [Wanted(f"{task}.base", task, "Base", "base") for task in tasks]
    return found + [
        Wanted(f"{task}.{row}.{ratio}.{seed}", task, row, row, ratio, seed)
        for task in tasks
        for ratio in ratios
        for seed in seeds
        for row in rows
    ]


def test_nothing_is_missing():
    assert missing_line(wanted(), {one.cell for one in wanted()}, "s.yaml").endswith(
        "s.yaml are there: none is missing."
    )


def test_what_is_missing_is_said_by_task_seed_and_row():
    there = {"sst2.base", "sst2.SFT.0.5.1"}
    line = missing_line(wanted(), there, "s.yaml")
    assert line == (
        "2 of the 10 cells of s.yaml are there. Missing: SST-2 (3): seed 1: Lisa, x; seed 2: every row; GSM8K, all 5."
    )


def test_ratios_with_the_same_seeds_stand_together_and_references_are_named():
    cells = wanted(tasks=("sst2",), ratios=(0.1, 0.25, 0.5))
    there = {one.cell for one in cells if one.poison_ratio == 0.5}
    line = missing_line(cells, there, "s.yaml")
    assert line.endswith("SST-2 (9): Base; p = 0.1, 0.25, seeds 1, 2: every row.")


def test_a_second_time_only_the_count_is_said():
    assert missing_line(wanted(), {"sst2.base"}, "s", again=True) == (
        "1 of the 10 cells of s are there; the missing ones are listed above."
    )
