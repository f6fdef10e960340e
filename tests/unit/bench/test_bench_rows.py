"""Rows of a benchmark: exact token lengths for both trainers, real distributions, nothing but numbers stored."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from importlib.resources import files

import pytest

from holdfast.core.errors import ConfigError
from holdfast.data.encode import IGNORE, encode_all
from holdfast.data.sources import examples_from_rows
from holdfast.defaults import block, constraint_defaults
from holdfast_lab.bench.paths import (
    WORDS,
    Material,
    build,
    filter_options,
    rows,
    safety_pairs,
    stored,
    task_pairs,
    word_tokenizer,
)
from holdfast_lab.bench.settings import PATHS, SHAPES, TASKS, Settings

SMALL = Settings(shapes=("tiny",), paths=tuple(PATHS), steps=3, warm_up=1, batch=5, safety_batch=4)


def counted(labels: list[int]) -> tuple[int, int]:
    prompt = list(labels).count(IGNORE)
    return prompt, len(labels) - prompt


def test_options_of_the_filter_are_numbers_truths_and_words():
    expected = {"anchor": True, "every": 4, "value_decay": None, "dual": 0.1, "metric": "adam_unit"}
    assert filter_options("anchor=true every=4 value_decay=null dual=1e-1 metric=adam_unit") == expected


@pytest.mark.parametrize("task", TASKS)
def test_our_encoding_has_exactly_the_lengths(task):
    pairs = task_pairs(task, 40, seed=1)
    made = examples_from_rows(rows(pairs, seed=1, name="task"), name="task")
    found = encode_all(made, word_tokenizer(), max_length=None, role="safety").examples
    assert [counted(item.labels) for item in found] == pairs
    assert all(item.input_ids[-1] == word_tokenizer().eos_token_id for item in found)


def test_trl_reads_the_same_lengths(tmp_path):
    cell = SMALL.cells("tiny")[0]
    material = Material.of(cell)
    data = build(cell, material, tmp_path, tmp_path, []).train_dataset
    assert [counted(labels) for labels in data["labels"]] == task_pairs("sst2", 20, seed=cell.seed)
    assert word_tokenizer().unk_token_id not in {i for ids in data["input_ids"] for i in ids}


@pytest.mark.parametrize("path", ["trl_sft", "trl_best", "holdfast"])
@pytest.mark.parametrize("given", [("q_proj", "up_proj"), ("all-linear",), ("all-linear", "q_proj")])
def test_the_adapter_is_on_the_modules_asked_for(tmp_path, path, given):
    cell = replace(next(cell for cell in SMALL.cells("tiny") if cell.path == path), target_modules=given)
    trained = [n for n, p in build(cell, Material.of(cell), tmp_path, tmp_path, []).model.named_parameters()
               if p.requires_grad]  # fmt: skip
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-4] for name in trained} == (every if "all-linear" in given else set(given))


def test_ids_fit_every_vocabulary():
    top = max(word_tokenizer().get_vocab().values())
    assert top == WORDS + 2
    assert all(top < sizes["vocab_size"] for sizes in SHAPES.values())


def test_half_of_the_task_is_unsafe_pairs():
    mixed = Counter(task_pairs("gsm8k", 1000, seed=3))
    assert mixed == Counter(stored()["unsafe"]) + Counter(stored()["gsm8k"])
    assert Counter(safety_pairs(500, seed=3)) == Counter(stored()["safe"])


def test_a_length_of_its_own():
    assert set(task_pairs("sst2", 6, seed=0, length=65)) == {(32, 33)}
    assert set(safety_pairs(6, seed=0, length=65)) == {(32, 33)}


def test_prompts_are_unique_and_safety_ones_are_not_in_the_task():
    material = Material.of(Settings(shapes=("tiny",)).cells("tiny")[0])
    task = {row["prompt"] for row in material.task}
    safe = [row["prompt"] for split in material.safety.values() for row in split]
    assert (len(task), len(set(safe)), len(safe)) == (300, 72, 72)
    assert not task & set(safe)


def test_the_path_of_a_run_file_holds_its_two_sets(tmp_path):
    cell = next(cell for cell in SMALL.cells("tiny") if cell.path == "run_file")
    material = Material.of(cell)
    safety = build(cell, material, tmp_path, tmp_path, []).safety
    for keep, unit in (("refusals", "kl_first"), ("answers", "kl_token")):
        limit = constraint_defaults() | block(f"constraint.{keep}") | {"tau": cell.tau, "beta": 1 / cell.tau}
        assert safety[keep].constraint.unit == unit
        assert [getattr(safety[keep].constraint, name) for name in limit] == list(limit.values())
    asked = [{row["prompt"] for row in part["constraint"]} for part in (material.safety, material.answers)]
    assert not asked[0] & asked[1]


def test_the_paths_of_a_group_get_the_same_rows_and_other_seeds_others():
    first, last = SMALL.cells("tiny")[0], SMALL.cells("tiny")[4]
    assert Material.of(first).task == Material.of(last).task
    assert rows([(5, 5)], seed=1, name="task") != rows([(5, 5)], seed=2, name="task")


def test_only_numbers_are_stored():
    found = json.loads(files("holdfast_lab.bench").joinpath("lengths.json").read_text())
    assert set(found) == {"made", "pairs"}
    assert set(found["pairs"]) == {*TASKS, "safe", "unsafe"}
    for pairs in found["pairs"].values():
        assert len(pairs) == 500
        assert all(type(a) is int and type(b) is int and a >= 1 and b >= 2 for a, b in pairs)


def test_options_may_be_limits_of_the_sets_of_a_run_file(tmp_path):
    options = "anchor=true answers.unit=kl_first answers.first_k=4"
    cell = replace(next(cell for cell in SMALL.cells("tiny") if cell.path == "run_file"), options=options)
    trainer = build(cell, Material.of(cell), tmp_path, tmp_path, [])
    answers = trainer.run.data.safety["answers"].constraint
    assert (answers.unit, answers.first_k, trainer.run.data.safety["refusals"].constraint.first_k) == ("kl_first", 4, 8)
    assert trainer.defense.config.anchor


def test_limits_of_sets_that_a_path_does_not_hold_are_refused(tmp_path):
    paths = {cell.path: cell for cell in SMALL.cells("tiny")}
    for path, options, words in (
        ("run_file", "answer.first_k=4", "answer, this path holds refusals, answers"),
        ("holdfast", "answers.first_k=4", "answers, this path holds no set by name"),
    ):
        cell = replace(paths[path], options=options)
        with pytest.raises(ConfigError, match=words):
            build(cell, Material.of(cell), tmp_path, tmp_path, [])
