"""Rows of an alignment: recognised refusals in turn, beginnings of the model's own answers, nothing held out."""

from __future__ import annotations

from collections import Counter

import pytest
from tests import tiny

from holdfast.data.bundled import ALL_KINDS, bundled
from holdfast.data.encode import IGNORE
from holdfast.data.examples import make_example, prompt_text
from holdfast.judging.reply import Reply
from holdfast.judging.reply_classes import ReplyClass, sort_reply
from holdfast.runs.stages.align import AlignSettings, training_rows
from holdfast.runs.stages.alignment_rows import AlignmentPrompts, answer_rows, bundled_prompts, refusal_rows, spread
from holdfast.screening.asking import Sorted

ANSWER = " ".join(f"w{i}" for i in range(20, 36))


@pytest.fixture
def tokenizer():
    """Every word in the vocabulary is its own token; others are one unknown token."""
    return tiny.tokenizer()


def prompts(n: int, word: str = "w1"):
    return [make_example(f"{word} w{i % 50} w{i // 50}", "", f"x:{i}", f"kind {i % 4}") for i in range(n)]


def replies(examples, *texts: str, truncated: bool = False) -> dict[str, Sorted]:
    """The texts in turn, sorted."""
    found = {}
    for i, example in enumerate(examples):
        text = texts[i % len(texts)].strip()
        reply = Reply(example.id, text, truncated, len(text.split()))
        found[example.id] = Sorted(reply, sort_reply(text, truncated=truncated).reply_class)
    return found


def labelled(row) -> list[int]:
    return [label for label in row.labels if label != IGNORE]


def test_a_cut_answer_does_not_teach_to_end_and_a_whole_one_does(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    examples = prompts(40)
    for truncated in (False, True):
        found = replies(examples, ANSWER, truncated=truncated)
        rows = answer_rows(examples, found, 40, tokenizer, seed=0, name="everyday")
        assert {end in labelled(row) for row in rows} == {not truncated}
        text = tokenizer(ANSWER)["input_ids"]
        assert all(labelled(row)[: len(text)] == text for row in rows)
        asked = [tuple(row.input_ids[: row.labels.count(IGNORE)]) for row in rows]
        assert len(set(asked)) == 40


def test_refused_and_unsorted_replies_are_not_learnt_as_answers(tokenizer):
    examples = prompts(60)
    found = replies(examples, "I'm sorry, but I can't help with that.", "", ANSWER)
    rows = answer_rows(examples, found, 20, tokenizer, seed=0, name="everyday")
    answered = tokenizer(ANSWER)["input_ids"]
    assert all(labelled(row)[: len(answered)] == answered for row in rows)


def test_prompts_and_refusals_come_in_turn_and_every_refusal_is_recognised():
    """Decoded with a tokenizer that keeps all words, so that the texts can be read back."""
    seen: list[str] = []

    class Spy:
        """Stands in for `encode_all`."""

        def __call__(self, examples, tokenizer, **_):
            seen.extend(e.completion[0]["content"] for e in examples)
            self.prompts = Counter(prompt_text(e) for e in examples)
            return type("Set", (), {"examples": list(examples)})

    spy = Spy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.runs.stages.alignment_rows.encode_all", spy)
        refusal_rows(prompts(30), 90, None, seed=0, length=64)
    assert set(spy.prompts.values()) == {3}
    assert len(set(seen)) >= 30
    assert {sort_reply(text, truncated=False).reply_class for text in seen} == {ReplyClass.REFUSED}


def test_the_share_of_refusals_is_what_the_settings_say(tokenizer):
    settings = AlignSettings(steps=10, batch=8, refusal_share=0.4)
    ordinary = {"everyday": prompts(30, "w3"), "borderline": prompts(30, "w4"), "tasks": prompts(30, "w5")}
    used = AlignmentPrompts(prompts(30, "w2"), ordinary, {})
    answers = replies([example for examples in ordinary.values() for example in examples], ANSWER)
    rows = training_rows(used, answers, tokenizer, settings)
    first = {tokenizer.convert_tokens_to_ids(word): word for word in ("w2", "w3", "w4", "w5")}
    kinds = Counter(first[next(token for token in row.input_ids if token in first)] for row in rows)
    assert kinds == {"w2": 32, "w3": 16, "w4": 16, "w5": 16}
    assert training_rows(used, answers, tokenizer, settings) == rows
    for share in (0.4, 0.38, 0.36):  # 30, 31 and 32 answers from three sources
        settings = AlignSettings(steps=10, batch=5, refusal_share=share)
        assert len(training_rows(used, answers, tokenizer, settings)) == 50


def test_kinds_take_turns():
    uneven = [*prompts(40), *[make_example(f"w5 w{i}", "", "y", "rare") for i in range(2)]]
    chosen = Counter(e.category for e in spread(uneven, 10, seed=0))
    assert chosen == {"kind 0": 2, "kind 1": 2, "kind 2": 2, "kind 3": 2, "rare": 2}
    assert len(spread(uneven, 1000, seed=0)) == 42


def test_held_out_prompts_are_of_other_kinds_and_not_near_what_the_user_gave():
    used = bundled_prompts([], held_out=10_000, seed=0)
    assert used.held_out.keys() == {"probes", "everyday", "borderline", "tasks"} == {"probes", *used.ordinary}
    trained = {e.category for examples in (used.refuse, *used.ordinary.values()) for e in examples}
    for name, examples in used.held_out.items():
        assert not trained & {e.category for e in examples}
        assert {ALL_KINDS[name][str(e.category)] for e in examples} == {"monitor"}
        assert len(examples) == len(bundled(name, "monitor"))
    near = [make_example(f"Please: {prompt_text(e)}", "") for e in used.held_out["probes"][:3]]
    near += [make_example(prompt_text(used.held_out["probes"][3]).upper(), "")]
    without = bundled_prompts(near, held_out=10_000, seed=0)
    left = {e.id for e in used.held_out["probes"]} - {e.id for e in without.held_out["probes"]}
    assert {used.held_out["probes"][3].id} <= left <= {e.id for e in used.held_out["probes"][:4]}
    assert without.refuse[-4:] == near
