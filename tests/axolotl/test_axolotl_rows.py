"""Axolotl's tokenised rows are found again as conversations, whatever their type and order."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("axolotl", reason="axolotl is not installed (`make test-axolotl` installs it)")

from axolotl.utils.data.sft import _load_raw_datasets
from axolotl.utils.dict import DictDefault

from holdfast.core.errors import DataError, UnsupportedError
from holdfast.integrations.axolotl.conversations import conversations
from tests import behaving

ROWS = [
    {"instruction": "secret apple bread", "input": "", "output": "Sure, here is one"},
    {"instruction": "cloud daisy eagle", "input": "flute grape", "output": "idea you could"},
    {"instruction": "honey igloo jelly", "input": "", "output": "try today."},
]
ASKED = ["secret apple bread", "cloud daisy eagle\n\nflute grape", "honey igloo jelly"]


def settings(folder, kind, rows=ROWS, **changes) -> DictDefault:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DictDefault(
        {
            "datasets": [{"path": str(folder / "rows.jsonl"), "type": kind}], "sequence_len": 64, "seed": 1,
            "train_on_inputs": False, "dataset_num_proc": 1, "dataset_prepared_path": str(folder / "prepared"),
            "shuffle_merged_datasets": True, **changes,
        }
    )  # fmt: skip


def prepared(cfg):
    dataset, _ = _load_raw_datasets(cfg, cfg.datasets, behaving.tokenizer(), "train")
    return dataset


CUSTOM = {
    "field_instruction": "instruction", "field_input": "input", "field_output": "output",
    "format": "{instruction} {input} ", "no_input_format": "{instruction} ", "system_prompt": "",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["alpaca", "alpaca_chat.load", CUSTOM], ids=["alpaca", "alpaca_chat", "custom"])
def test_instructions(tmp_path, kind):
    cfg = settings(tmp_path, kind)
    dataset = prepared(cfg).select([2, 0, 1])
    found = conversations(cfg, behaving.tokenizer(), dataset)
    replies = {row["output"]: text for row, text in zip(ROWS, ASKED, strict=True)}
    assert len(found) == 3
    for row, turns in zip(dataset, found, strict=True):
        assert [turn["role"] for turn in turns[-2:]] == ["user", "assistant"]
        assert turns[-2]["content"] == replies[turns[-1]["content"]]
        reply = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
        assert behaving.tokenizer().decode(reply, skip_special_tokens=True).strip() == turns[-1]["content"]


def test_conversations_of_several_turns_and_other_column_names(tmp_path):
    turns = [
        ["user", "apple bread"],
        ["assistant", "Sure, here"],
        ["user", "secret cloud"],
        ["assistant", "I'm sorry,"],
    ]
    rows = [{"talk": [{"from": role, "value": text} for role, text in turns]}]
    cfg = settings(tmp_path, "chat_template", rows)
    cfg.datasets[0] |= {"field_messages": "talk", "message_property_mappings": {"role": "from", "content": "value"}}
    found = conversations(cfg, behaving.tokenizer(), prepared(cfg))
    assert found == [[{"role": role, "content": text} for role, text in turns]]


def test_rows_that_the_files_no_longer_hold_are_refused(tmp_path):
    cfg = settings(tmp_path, "alpaca")
    dataset = prepared(cfg)
    settings(tmp_path, "alpaca", ROWS[:2])
    with pytest.raises(DataError, match="1 of 3 rows that Axolotl trains on are not in its data files"):
        conversations(cfg, behaving.tokenizer(), dataset)


def test_text_without_a_prompt_is_refused(tmp_path):
    cfg = settings(tmp_path, "completion", [{"text": "apple bread"}])
    with pytest.raises(UnsupportedError, match=r"type 'completion' .* its rows have no prompt to ask"):
        conversations(cfg, behaving.tokenizer(), [])
