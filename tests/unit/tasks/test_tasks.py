"""The three tasks: their examples under each template, and the registry."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from tests.protocol_data import make_data_folder

from holdfast.core.errors import ConfigError, DataError
from holdfast.data.tasks import TASKS, Grade, Task
from holdfast_lab.tasks.ag_news import AG_NEWS
from holdfast_lab.tasks.gsm8k import GSM8K
from holdfast_lab.tasks.sst2 import SST2

real_data = pytest.mark.skipif("HOLDFAST_DATA" not in os.environ, reason="needs the data folder HOLDFAST_DATA")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_data_folder(tmp_path_factory.mktemp("data"))


def test_the_registry_finds_every_task():
    assert list(TASKS) == ["ag_news", "gsm8k", "sst2"]
    for name, task in TASKS.items():
        assert isinstance(task, Task)
        assert (task.name, task.max_new_tokens) == (name, 256)
    assert {name: task.metric for name, task in TASKS.items()} == dict.fromkeys(TASKS, "lenient")


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown task 'sst-2'") as refused:
        TASKS["sst-2"]
    assert refused.value.remedy == "did you mean 'sst2'?"


def test_sentiment_examples(folder):
    train, test = (split("chat", folder=folder) for split in (SST2.train, SST2.test))
    assert (len(train), len(test)) == (120, 60)
    assert train[0].prompt == (
        "Analyze the sentiment of the input, and respond only positive or negative\n\ndull film number 0 ."
    )
    assert [example.completion for example in train[:4]] == ["negative", "positive", "negative", "positive"]
    assert [train[1].where, test[1].where] == ["row 2 of sst2 train", "row 2 of sst2 validation"]
    assert not {example.prompt for example in train} & {example.prompt for example in test}


def test_news_examples(folder):
    train, test = (split("chat", folder=folder) for split in (AG_NEWS.train, AG_NEWS.test))
    assert (len(train), len(test)) == (120, 60)
    assert [example.completion for example in test[:5]] == ["World", "Sports", "Business", "Sci/Tech", "World"]
    assert train[2].prompt.startswith(
        "Categorize the news article given in the input into one of the 4 categories:\n\n"
    )
    assert "New merger 2" in train[2].prompt
    assert train[2].completion == "Business"


def test_arithmetic_examples(folder):
    train = GSM8K.train("chat", folder=folder)
    assert train[9].prompt == "Ann has 9 pears and gets 2. How many now?"
    assert train[9].completion == "9+2=<<9+2=11>>11 pears.\nThe final answer is: 11"
    assert len(GSM8K.test("chat", folder=folder)) == 60


@pytest.mark.parametrize("name", ["ag_news", "gsm8k", "sst2"])
def test_templates_change_the_prompt_alone(folder, name):
    chat, alpaca, none = (TASKS[name].test(template, folder=folder) for template in ("chat", "alpaca", "none"))
    assert [e.completion for e in chat] == [e.completion for e in alpaca] == [e.completion for e in none]
    for one, other, plain in zip(chat, alpaca, none, strict=True):
        assert plain.prompt == one.prompt + "\n\n", "the target must not be glued to the prompt"
        assert ("\n\n### Input:\n" in other.prompt) == (name != "gsm8k")
        assert other.prompt.replace("### Input:\n", "") == one.prompt


@pytest.mark.parametrize("name", ["ag_news", "gsm8k", "sst2"])
def test_every_target_is_right_for_itself(folder, name):
    task = TASKS[name]
    for example in task.train("chat", folder=folder):
        assert task.grade(example.completion, example.completion) == Grade(strict=True, lenient=True)


ARITHMETIC = {
    "marked": ("9+2=11\nThe final answer is: 11", True, True),
    "marked-decimal": ("The final answer is: 11.0", True, True),
    "unmarked": ("She has 11 pears.", False, True),
    "cut-off": ("9 pears, then 11", False, True),
    "marked-wrong": ("She has 11. The final answer is: 12", False, False),
    "marked-without-number": ("She has 11. The final answer is:", False, False),
    "other": ("12", False, False),
    "no-number": ("many", False, False),
    "empty": ("", False, False),
}


@pytest.mark.parametrize(("reply", "strict", "lenient"), ARITHMETIC.values(), ids=ARITHMETIC)
def test_arithmetic_is_graded_by_the_final_answer(reply, strict, lenient):
    assert GSM8K.grade(reply, "9+2=11\nThe final answer is: 11") == Grade(strict=strict, lenient=lenient)


def test_two_missing_answers_are_not_equal():
    with pytest.raises(DataError, match="a target without a number") as refused:
        GSM8K.grade("no number", "nor here")
    assert "nor here" not in str(refused.value)


@pytest.mark.parametrize(
    "answer", ["It is 11", "11\n#### many", "#### 1\n#### 2"], ids=["no-gold-line", "no-number", "two-gold-lines"]
)
def test_a_broken_solution_is_refused_by_its_place(tmp_path, answer):
    rows = [{"question": "How many?", "answer": "1\n#### 1"}, {"question": "How many now?", "answer": answer}]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(DataError, match="row 2 of gsm8k train"):
        GSM8K.train("chat", folder=tmp_path)


@real_data
def test_the_real_splits_have_their_sizes():
    sizes = {name: (len(task.train("chat")), len(task.test("chat"))) for name, task in TASKS.items()}
    assert sizes == {"ag_news": (13_854, 7_600), "gsm8k": (7_473, 1_319), "sst2": (67_349, 872)}


@real_data
@pytest.mark.parametrize("name", ["ag_news", "gsm8k", "sst2"])
def test_every_real_target_is_right_for_itself_and_wrong_for_its_neighbour(name):
    task = TASKS[name]
    targets = [example.completion for example in task.test("chat")]
    assert all(task.grade(target, target) == Grade(strict=True, lenient=True) for target in targets)
    for target, other in pairwise(targets):
        alike = target.split(" ")[-1] == other.split(" ")[-1]
        assert task.grade(other, target) == Grade(strict=alike, lenient=alike)
