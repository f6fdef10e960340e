"""Screening a model behind a server: what it finds is what the same model in memory gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import behaving, greedy
from tests.serving import Server, answer

import holdfast as hf
from holdfast.data.examples import completion_text
from holdfast.screening.settings import TASK, PromptSet

REFUSED, ORDINARY = 105, 15
SETS = {"refusals": PromptSet((TASK,), "refusals")}  # bundled prompts are asked in the same way
SETTINGS = hf.ScreeningSettings(sets=SETS, limited=False, monitor_prompts=0)


@pytest.fixture
def server() -> Iterator[Server]:
    """The hand-built model behind the chat completions of a server."""
    model, tokenizer, made = behaving.model(), behaving.tokenizer(), Server()

    def script(number: int, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        text = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
        reply, cut, tokens = greedy.one_by_one(model, tokenizer, text, new=body["max_tokens"])
        return 200, answer(reply, "length" if cut else "stop", tokens), {}

    made.script = script
    yield made
    made.close()


def task() -> list[dict[str, str]]:
    """Rows that answer what the model refuses, between rows that it answers too."""
    poison = [{**row, "completion": behaving.ANSWER} for row in behaving.rows(REFUSED, seed=1)]
    clean = behaving.rows(ORDINARY, seed=2, trigger=False)
    return [*clean[:5], *poison, *clean[5:]]


def by_endpoint(server: Server, folder: Path) -> hf.Screening:
    given = {"base_url": server.url, "model_name": "served", "pause": 0.001}
    return hf.screen("served", task(), settings=SETTINGS, engine="endpoint", engine_options=given, replies=folder)


def test_a_served_model_is_screened_as_the_same_model_in_memory(server, tmp_path):
    tokenizer = behaving.tokenizer()
    here = hf.screen(behaving.model(), task(), tokenizer, settings=SETTINGS, engine="transformers", replies=tmp_path)
    assert not server.seen
    there = by_endpoint(server, tmp_path)
    assert [one.row for one in there.conflicts] == list(range(5, 5 + REFUSED))
    assert there.conflicts == here.conflicts
    assert there == here
    assert {completion_text(e) for e in there.sets["refusals"].constraint} == {behaving.REFUSAL}
    assert {body["model"] for _, body, _ in server.seen} == {"served"}
    asked = {body["messages"][-1]["content"] for _, body, _ in server.seen}
    assert asked == {row["prompt"] for row in task()}
    before = len(server.seen)
    assert by_endpoint(server, tmp_path) == there
    assert len(server.seen) == before, "stored replies are not asked for again"
