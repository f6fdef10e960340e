"""Which tokens are scored: the safety set's completions whatever the task's format, the task's as TRL has it."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from tests import tiny
from tests.unit.trainers.building import COMMON, build, task
from trl import SFTConfig, SFTTrainer

USER, ASSISTANT = "user", "assistant"


def chat(row: dict[str, str]) -> dict[str, object]:
    return {
        "prompt": [{"role": USER, "content": row["prompt"].strip()}],
        "completion": [{"role": ASSISTANT, "content": row["completion"]}],
    }


def messages(row: dict[str, str]) -> dict[str, object]:
    made = chat(row)
    return {"messages": [*made["prompt"], *made["completion"]]}  # type: ignore[misc]


def text(row: dict[str, str]) -> dict[str, object]:
    return {"text": row["prompt"] + row["completion"]}


FORMATS = {"plain": dict, "chat": chat, "messages": messages, "text": text}
TASKS = {**{name: (make, {}) for name, make in FORMATS.items()}, "unmasked": (dict, {"completion_only_loss": False})}


def in_format(rows: list[dict[str, str]], name: str) -> Dataset:
    return Dataset.from_list([TASKS[name][0](row) for row in rows])


def expected_labels(row: dict[str, str], name: str) -> tuple[list[int], list[int]]:
    """Ids and labels written out: word-level tokens, one id a word."""
    ids = tiny.tokenizer().convert_tokens_to_ids
    if name == "plain":
        prompt, reply = row["prompt"].split(), [*row["completion"].split(), "<eos>"]
    else:
        prompt = ["<|user|>", *row["prompt"].split(), "<|end|>", "<|assistant|>"]
        reply = [*row["completion"].split(), "<|end|>"]
    return ids(prompt + reply), [-100] * len(prompt) + ids(reply)


@pytest.mark.parametrize("task_format", TASKS)
def test_safety_labels_and_task_labels(tmp_path, task_format):
    options = TASKS[task_format][1]
    plain = SFTTrainer(
        tiny.model(layers=1), SFTConfig(str(tmp_path), **COMMON, **options), processing_class=tiny.tokenizer(),
        train_dataset=in_format(list(task()), task_format), peft_config=tiny.lora(),
    )  # fmt: skip
    theirs = list(plain.get_train_dataloader())
    rows = tiny.rows(20, seed=2)
    for safety_format in ("plain", "chat", "messages"):
        given = {
            "train_dataset": in_format(list(task()), task_format), "safety_dataset": in_format(rows, safety_format),
        }  # fmt: skip
        trainer = build(tmp_path / safety_format, given=given, **options)
        expected = {tuple(ids): labels for ids, labels in (expected_labels(row, safety_format) for row in rows)}
        found = trainer.safety["safety"]
        certify = len(found.split.certify)
        assert len(found.all_encoded) == 20 - certify == 16
        for one in found.all_encoded:
            assert list(one.labels) == expected[one.input_ids]
        ours = list(trainer.get_train_dataloader())
        assert len(ours) == len(theirs) == 6
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[key], b[key]) for key in a)
    masked = all(int(batch["labels"][0, 1]) == -100 for batch in theirs)
    assert masked == (task_format in ("plain", "chat"))


def test_system_turns_and_earlier_replies_are_prompt(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "system", "content": "w1"},
                {"role": USER, "content": f"w{i + 2} w{2 * i + 3}"},
                {"role": ASSISTANT, "content": "w5"},
                {"role": USER, "content": f"w{i + 4} w{i}"},
                {"role": ASSISTANT, "content": "w7 w8"},
            ]
        }
        for i in range(16)
    ]
    trainer = build(tmp_path, given={"safety_dataset": Dataset.from_list(rows)})
    ids = tiny.tokenizer().convert_tokens_to_ids
    for one in trainer.safety["safety"].all_encoded:
        scored = [label for label in one.labels if label != -100]
        assert scored == ids(["w7", "w8", "<|end|>"])


def test_task_batches_of_a_run_are_trls_batches(tmp_path):
    """With evaluation and the safety pass on, each step trains on the rows TRL trains on."""

    def recorded(trainer) -> list[list[list[int]]]:
        seen, inner = [], trainer.compute_loss

        def spy(model, inputs, *args, **kwargs):
            if model.training:
                seen.append(inputs["input_ids"].tolist())
            return inner(model, inputs, *args, **kwargs)

        trainer.compute_loss = spy
        trainer.train()
        return seen

    theirs = recorded(
        SFTTrainer(
            tiny.model(layers=1), SFTConfig(str(tmp_path), **{**COMMON, "max_steps": 8}),
            processing_class=tiny.tokenizer(), train_dataset=task(), peft_config=tiny.lora(),
        )
    )  # fmt: skip
    ours = recorded(build(tmp_path, max_steps=8, eval_strategy="steps", eval_steps=1))
    assert len(theirs) == 8
    assert ours == theirs
