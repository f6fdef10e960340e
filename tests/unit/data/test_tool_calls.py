"""Conversations with tools: read, rendered as TRL renders them, asked, written and read again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from datasets import Dataset
from tests import tiny
from trl import SFTConfig, SFTTrainer

import holdfast as hf
from holdfast.core.errors import DataError
from holdfast.data.encode import encode_all
from holdfast.data.examples import completion_text, prompt_text, to_rows
from holdfast.data.sources import examples_from_rows, prompts_in_memory
from holdfast.judging.engines import open_engine
from holdfast.judging.prompts import prompt_ids
from holdfast.runs.stages.finetune import mapped_rows
from holdfast.screening.questions import questions_of

TEMPLATE = (
    "{% if tools %}<|system|> {% for tool in tools %}{{ tool.function.name }} w5 {% endfor %}<|end|> {% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|> {{ message.content }} "
    "{% for call in message.tool_calls or [] %}w6 {{ call.function.name }} {{ call.function.arguments.city }} "
    "{% endfor %}<|end|> {% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def rows() -> list[dict[str, Any]]:
    """A call, what follows its result, and a row without tools; no two with the same keys or arguments."""
    asked = {"role": "user", "content": "w9 w10"}
    calling = {"role": "assistant", "content": None, "tool_calls": [call("w2", city="w11")]}
    result = {"role": "tool", "name": "w2", "content": "w12"}
    return [
        {"messages": [asked, calling], "tools": [tool("w2"), tool("w3")]},
        {"messages": [asked, calling, result, {"role": "assistant", "content": "w13"}],
         "tools": json.dumps([tool("w2")])},
        {"messages": [asked, {"role": "assistant", "tool_calls": json.dumps([call("w4", city="w14", day="w1")])}],
         "tools": [tool("w4")]},
        {"messages": [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "w21"}], "tools": None},
    ]  # fmt: skip


def test_tokens_and_labels_are_trls(tmp_path):
    examples = examples_from_rows(rows(), name="rows")
    dataset = mapped_rows(examples, tmp_path)
    args = SFTConfig(str(tmp_path / "x"), max_length=None, use_cpu=True, bf16=False, report_to="none")
    trl = SFTTrainer(tiny.model(layers=1), args, processing_class=tokenizer(), train_dataset=dataset)
    ours = encode_all(examples, tokenizer(), max_length=None, role="safety").examples
    for row, encoded in zip(trl.train_dataset, ours, strict=True):
        assert tuple(row["input_ids"]) == encoded.input_ids
        assert tuple(row["labels"]) == encoded.labels
    text = tokenizer().decode(ours[0].input_ids)
    assert text == "<|system|> w2 w5 w3 w5 <|end|> <|user|> w9 w10 <|end|> <|assistant|> w6 w2 w11 <|end|>"
    assert len({e.id for e in examples}) == 4


def test_prompts_are_asked_with_their_tools():
    first, second, *_ = examples_from_rows(rows(), name="rows")
    ids = prompt_ids(tokenizer(), [first], "chat")[0]
    assert tokenizer().decode(ids) == "<|system|> w2 w5 w3 w5 <|end|> <|user|> w9 w10 <|end|> <|assistant|>"
    asked = {one.form: one for one in questions_of(first)}
    assert asked["own"].prompt == first.prompt
    assert asked["own"].target == json.dumps([call("w2", city="w11")])
    assert asked["alone"].prompt == ({"role": "user", "content": "w9 w10"},)
    assert [one.target for one in questions_of(second)][:2] == ["w13", "w13"]
    assert prompt_text(second) == "w9 w10\nw12"
    alone = {"prompt": rows()[1]["messages"][:3], "tools": rows()[1]["tools"]}  # up to the result of a call
    assert prompts_in_memory([alone])[0].prompt == second.prompt


def test_what_is_written_is_read_again():
    examples = examples_from_rows(rows(), name="rows")
    again = examples_from_rows(json.loads(json.dumps(to_rows(examples))), name="rows")
    assert [e.id for e in again] == [e.id for e in examples]
    assert completion_text(again[2]) == json.dumps([call("w4", city="w14", day="w1")])
    changed = rows()[:1]
    changed[0]["tools"][0]["function"]["name"] = "w7"
    assert examples_from_rows(changed, name="rows")[0].id != examples[0].id  # other tools make another prompt


def test_a_template_without_tools_is_refused():
    tools = examples_from_rows(rows()[:1], name="rows")
    calls = examples_from_rows([rows()[0] | {"tools": None}], name="rows")
    with pytest.raises(DataError, match=r"a conversation has tools, and the chat template of .* does not render them"):
        encode_all(tools, tiny.tokenizer(), max_length=None, role="safety")
    with pytest.raises(DataError, match="a conversation has tool_calls, and the chat template"):
        encode_all(calls, tiny.tokenizer(), max_length=None, role="safety")


def test_an_endpoint_is_not_asked_with_tools():
    engine = open_engine("endpoint", base_url="http://localhost:1/v1", model_name="m")
    with pytest.raises(DataError, match="prompts with tools: a server hands back calls in a form of its own"):
        list(engine.generate(examples_from_rows(rows(), name="rows"), max_new_tokens=4))


def test_a_trainer_holds_rows_with_tools(tmp_path):
    """Task rows as TRL takes them, safety rows of the same kind, under a constraint that binds."""
    task = [{**row, "messages": [{"role": "user", "content": f"w30 w{i}"}, *row["messages"][1:]]}
            for i, row in enumerate(rows()[:1] * 6)]  # fmt: skip
    args = hf.SafeSFTConfig(
        str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=2, learning_rate=0.05, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, max_length=64,
    )  # fmt: skip
    trainer = hf.SafeSFTTrainer(
        tiny.model(layers=1), args, processing_class=tokenizer(), peft_config=tiny.lora(),
        train_dataset=Dataset.from_list(task), safety_dataset={"constraint": rows()},
        constraint=hf.ChanceConstraint(tau=1e-3, beta=1000.0, unit="kl_token"),
    )  # fmt: skip
    events: list[str] = []
    trainer.step_listeners.append(lambda row: events.append(row["event"]))
    trainer.train()
    assert len(trainer.safety["safety"].constraint_set) == 4
    assert "active" in events
