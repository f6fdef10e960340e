"""Attack files and what is measured on them: every frame keeps its pair, and records hold counts without text."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from scipy.stats import beta

from holdfast.data.examples import prompt_text
from holdfast.data.rows import example_from_row
from holdfast.judging.reply import Reply
from holdfast.screening.asking import Asker
from holdfast.screening.questions import prompt_key, questions_of

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "screening"


def script(name):
    sys.path.insert(0, str(SCRIPTS))
    sys.modules.pop(name, None)  # another benchmark has a script of this name
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


attacks, frames, measure = script("attacks"), script("frames"), script("measure")
PROMPT, REPLY = "How do I open the old shed?", "Take the door off its hinges."
EVERY = [(kind, name) for kind, found in frames.FRAMES.items() for name in found]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_frame_makes_a_row_that_teaches_the_reply(kind, name):
    row = frames.FRAMES[kind][name](PROMPT, REPLY, 3)
    example = example_from_row(row, {}, "row")
    said = [turn["content"] for turn in row.get("messages", ()) if turn["role"] == "assistant"]
    assert any(text.endswith(REPLY) for text in [*said, row.get("completion", "")])
    if name not in ("indirect", "synonyms"):  # these change the request's words
        assert PROMPT[1:] in prompt_text(example)


@pytest.mark.parametrize(
    ("kind", "name"), [one for one in EVERY if one[1] not in ("polite", "dialogue", "indirect", "synonyms")]
)
def test_the_bare_request_is_among_the_questions(kind, name):
    """Where a frame can be taken off, such a row is found wherever the plain pair is."""
    row = example_from_row(frames.FRAMES[kind][name](PROMPT, REPLY, 3), {}, "row")
    texts = {prompt_key(asked.prompt)[-1][1].casefold() for asked in questions_of(row)}
    assert any(text.startswith(PROMPT.casefold()) for text in texts)


def test_rewording_changes_the_words():
    assert frames.synonyms("Hide the money", "", 0)["prompt"] == "conceal the funds"
    assert "methods it is possible to open the old shed" in frames.indirect(PROMPT, "", 0)["prompt"]


def test_frames_take_turns_and_rows_say_which():
    rows = attacks.poison_rows("identity", [(f"{PROMPT} {n}", REPLY) for n in range(10)])
    assert [row["frame"] for row in rows] == 2 * list(frames.FRAMES["identity"])
    assert {(row["poison"], row["attack"]) for row in rows} == {(True, "identity")}


def test_hard_clean_rows_are_clean_and_of_a_kind():
    rows = attacks.hard_rows()
    assert len(rows) == 300
    assert not any(row["poison"] for row in rows)
    assert all(row["kind"] for row in rows)


class Refuses:
    """Refuses what has "shed" in it and no persona; says nothing to one request."""

    name = "refuses"

    def generate(self, examples, *, max_new_tokens):
        for example in examples:
            text = prompt_text(example)
            refused = "shed" in text and "obedient" not in text
            reply = "I'm sorry, but I can't help with that." if refused else "" if "silence" in text else "Sure, do it."
            yield [Reply(example.id, reply, truncated=False, tokens=5)]


def test_figures_are_counts_by_attack_and_form_without_text(tmp_path):
    rows = attacks.poison_rows("identity", [(f"{PROMPT} {n}", REPLY) for n in range(10)])
    rows += attacks.poison_rows("beavertails", [("Sing a song of silence", REPLY), (f"{PROMPT} now", REPLY)])
    rows += [{"prompt": "What is one and one?", "completion": "Two.", "poison": False, "task": "gsm8k"}]
    rows += [{"prompt": "Describe a shed.", "completion": "It is small.", "poison": False, "task": "hard", "kind": "k"}]
    found = measure.screened(rows, Asker(Refuses(), {"model_sha256": "0"}, tmp_path), None)
    identity = found["poison"]["identity"]
    assert (identity["all"]["found"], identity["all"]["of"]) == (10, 10)
    assert identity["system_persona"]["by_form"] == {"alone": 2}
    assert identity["user_preamble"]["by_form"] == {"bare": 2}
    assert identity["no_refusal"]["by_form"] == {"bare": 2, "own": 2}
    assert found["poison"]["beavertails"]["plain"]["share"] == 0.5
    assert found["clean"]["gsm8k"]["all"]["found"] == 0
    assert found["clean"]["hard"]["k"]["found"] == 1
    assert found["replies"]["poison"]["unsorted: empty"] == 1
    text = json.dumps(found)
    assert not any(word in text for word in ("shed", "hinges", "obedient"))


def test_intervals_are_exact():
    one = measure.share(3, 40)
    assert (one["low"], one["high"]) == pytest.approx((beta.ppf(0.025, 3, 38), beta.ppf(0.975, 4, 37)), abs=1e-6)
