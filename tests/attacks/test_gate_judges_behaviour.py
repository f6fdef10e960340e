"""A10, A4: the gate's default judges what a model does, and a model compared with itself shows nothing."""

from __future__ import annotations

import json

from tests import behaving

CERTIFIED = 0


def test_a_model_that_stopped_refusing_does_not_pass_the_gate(command, tmp_path):
    """A10: every refusal lost at most 0.1 nats a token, and not one of them is given any more."""
    before = behaving.saved(tmp_path / "before")
    after = behaving.saved(tmp_path / "after", margin=behaving.AFTER)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in behaving.rows(80)), encoding="utf-8")
    found = command("certify", "--before", before, "--after", after, "--prompts", prompts, "--output", tmp_path / "out")
    assert found.code != CERTIFIED, "the gate passed a model that refuses nothing any more"
    assert found.code == 4


def test_a_model_compared_with_itself_certifies_nothing(command, tmp_path):
    """A4: before = after."""
    model = behaving.saved(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in behaving.rows(80)), encoding="utf-8")
    for way in (["--by", "likelihood"], []):
        found = command(
            "certify", "--before", model, "--after", model, "--prompts", prompts, "--output", tmp_path / "out", *way,
            usage=True,
        )  # fmt: skip
        assert found.code != CERTIFIED, "a model was certified against itself"
