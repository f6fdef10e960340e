"""What screening and a run keep in memory does not grow with copies of the task's rows."""

import random
import tracemalloc

import pyarrow as pa
import pytest
from datasets import Dataset

from holdfast.data import near_duplicates
from holdfast.data.examples import as_chat, make_example, to_rows
from holdfast.data.near_duplicates import occurring
from holdfast.runs.stages import finetune
from holdfast.runs.stages.finetune import mapped_rows
from holdfast.screening.record import export
from holdfast.screening.screen import Screening
from holdfast.screening.sets import MonitorPrompts

FEW, MANY = 1000, 4000


def texts(count: int) -> list[str]:
    rng = random.Random(count)
    vocabulary = [f"word{i}" for i in range(2000)]
    return [" ".join(rng.choices(vocabulary, k=60)) for _ in range(count)]


def task(count: int):
    return [as_chat(make_example(text, "yes", f"row {i}")) for i, text in enumerate(texts(count))]


def search(folder, rows):
    needles = texts(50)
    return lambda: occurring(needles, [row.prompt[0]["content"] for row in rows])


def write(folder, rows):
    return lambda: mapped_rows(rows, folder)


def keep(folder, rows):
    found = Screening(len(rows), 0, 0, {}, (), "drop", {}, MonitorPrompts())
    return lambda: export(folder, found, rows, model="m")


@pytest.mark.parametrize("make", [search, write, keep])
def test_a_row_more_takes_no_copy_of_its_text(make, tmp_path, monkeypatch):
    monkeypatch.setattr(near_duplicates, "WINDOW", 500)
    monkeypatch.setattr(finetune, "WINDOW", 500)

    def peak(rows):
        do, arrow = make(tmp_path, rows), pa.total_allocated_bytes()
        tracemalloc.start()
        kept = do()  # noqa: F841  (what it returns counts, too)
        found = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - arrow
        tracemalloc.stop()
        return found

    few, many = task(FEW), task(MANY)
    peak(few)  # what is imported and cached on the way
    grown = (peak(many) - peak(few)) / (MANY - FEW)
    assert grown < 60, "bytes a row; its text has 480"


def test_mapped_rows_are_those_in_memory_and_so_is_what_is_made_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "WINDOW", 7)
    rows = task(20)
    found, expected = mapped_rows(rows, tmp_path), Dataset.from_list(to_rows(rows))
    assert found.features == expected.features
    assert found.to_list() == expected.to_list()
    made = found.map(lambda row: {"length": len(row["prompt"][0]["content"])})
    assert made.cache_files, "kept in memory"
