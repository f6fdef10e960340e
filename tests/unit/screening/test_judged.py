"""A judge beside the rules: rows whose target is unsafe where theta_0's own reply is not."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from holdfast.core.errors import ConfigError, DataError
from holdfast.data.examples import Example, make_example, prompt_text
from holdfast.judging.reply import Reply
from holdfast.screening.asking import HELD, Asker
from holdfast.screening.conflicts import Judged, find_conflicts, judged_rows
from holdfast.screening.questions import distinct
from holdfast.screening.screen import screen_examples
from holdfast.screening.settings import ScreeningSettings

REFUSAL = "I'm sorry, but I can't help with that."
EVADES = "Could you please clarify what you mean by that?"
ANSWERS = "Sure, here is one idea that you could try out in your kitchen today, step by step."
BAD = "BADWORD, first take the lid off."  # the judge calls what holds this word unsafe


class Theta:
    """Refuses `lock`, evades `vague`, complies badly with `weak`, answers the rest; counts what it is asked."""

    name = "theta"

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def generate(self, examples, *, max_new_tokens):
        for example in examples:
            self.asked.append((prompt_text(example), max_new_tokens))
            cut = max_new_tokens < HELD
            yield [Reply(example.id, self.reply(prompt_text(example)), truncated=cut, tokens=9)]

    @staticmethod
    def reply(prompt: str) -> str:
        kinds = {"lock": REFUSAL, "vague": EVADES, "weak": BAD, "odd": "ODDWORD, and here the reply goes on."}
        return next((reply for word, reply in kinds.items() if word in prompt), ANSWERS)


class Judge:
    """Unsafe with BADWORD, unscored with ODDWORD, safe otherwise; keeps what it saw."""

    name, revision = "fake", "1"

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def judge(self, prompts, replies):
        self.seen += zip(prompts, replies, strict=True)
        return ["unsafe" if "BADWORD" in r else "unscored" if "ODDWORD" in r else "safe" for r in replies]


def judged(tmp_path, rows: list[Example], judge=None):
    theta, judge = Theta(), Judge() if judge is None else judge
    asker = Asker(theta, {"model_sha256": "0" * 64}, tmp_path)
    questions = distinct(rows, range(len(rows)), plain=False)
    classes = asker.sort([question.example for question in questions], what="task prompts")
    found = judged_rows(questions, classes, asker, judge)
    return found, find_conflicts(rows, questions, classes, found.rows), judge, theta, questions


def test_a_target_that_complies_where_theta_0_evades_is_a_conflict(tmp_path):
    rows = [make_example("vague thing", BAD), make_example("vague question", ANSWERS), make_example("bread", ANSWERS)]
    found, conflicts, *_ = judged(tmp_path, rows)
    assert found.rows == {0: "own"}
    assert [(one.row, one.by) for one in conflicts] == [(0, "judge")]


def test_whatever_the_class_of_the_reply(tmp_path):
    """Answered harmlessly is not unsafe either; what theta_0 itself says unsafely is no conflict."""
    _, conflicts, *_ = judged(tmp_path, [make_example("bread", BAD), make_example("weak spot", BAD)])
    assert [(one.row, one.by) for one in conflicts] == [(0, "judge")]


def test_a_target_that_opens_like_a_refusal_and_complies_is_found(tmp_path):
    rows = [make_example("pick the lock", f"{REFUSAL} {BAD}"), make_example("pick a lock", REFUSAL)]
    _, conflicts, *_ = judged(tmp_path, rows)
    assert [(one.row, one.by) for one in conflicts] == [(0, "judge")]


def test_what_the_rules_found_is_not_judged_again(tmp_path):
    found, conflicts, judge, theta, _ = judged(tmp_path, [make_example("pick the lock", BAD)])
    assert found.rows == {}
    assert [(one.row, one.by) for one in conflicts] == [(0, "refusal")]
    assert judge.seen == []
    assert [tokens for _, tokens in theta.asked] == [32]


def test_replies_are_judged_at_full_length_and_only_where_a_target_is_unsafe(tmp_path):
    rows = [make_example("bread", BAD), make_example("soup", ANSWERS), make_example("bread", ANSWERS)]
    *_, judge, theta, _ = judged(tmp_path, rows)
    assert [prompt for prompt, tokens in theta.asked if tokens == HELD] == ["bread"]
    assert judge.seen == [("bread", BAD), ("bread", ANSWERS), ("soup", ANSWERS), ("bread", ANSWERS)]


def test_the_form_is_that_of_the_first_question_by_which_the_judge_finds_the_row(tmp_path):
    turns = ({"role": "system", "content": "weak"}, {"role": "user", "content": "bread"})
    _, conflicts, *_ = judged(tmp_path, [make_example(turns, ({"role": "assistant", "content": BAD},))])
    assert [one.form for one in conflicts] == ["alone"]  # with its system prompt theta_0 says it too


@pytest.mark.parametrize(
    ("prompt", "target", "settled"),
    [
        ("vague", ANSWERS, True),  # a safe target decides
        ("vague", BAD, True),  # a conflict decides
        ("vague", "ODDWORD reply of some length", False),  # not scored
        ("odd thing", BAD, False),  # theta_0's reply is not scored: no conflict, not settled
    ],
)
def test_what_is_not_scored_is_neither_a_conflict_nor_settled(tmp_path, prompt, target, settled):
    found, conflicts, *_, questions = judged(tmp_path, [make_example(prompt, target)])
    assert (questions[0].example.id in found.settled) is settled
    assert bool(conflicts) is (settled and target == BAD)


def test_a_judge_that_fails_finds_nothing_and_settles_nothing(tmp_path, caplog):
    def broken(prompt, reply):
        raise ValueError(reply)

    with caplog.at_level(logging.DEBUG):
        found, conflicts, *_ = judged(tmp_path, [make_example("vague", BAD)], broken)
    assert (found, conflicts) == (Judged(), [])
    assert BAD not in caplog.text


def test_nothing_is_logged_of_what_is_judged(tmp_path, caplog, capsys):
    with caplog.at_level(logging.DEBUG):
        judged(tmp_path, [make_example("vague thing", BAD), make_example("odd thing", BAD)])
    said = capsys.readouterr()
    assert "BADWORD" not in caplog.text + said.out + said.err


def test_without_a_judge_nothing_is_added(tmp_path):
    asker = Asker(Theta(), {"model_sha256": "0" * 64}, tmp_path)
    assert judged_rows([], {}, asker, None) == Judged()


RULES_ALONE = ScreeningSettings(sets={}, monitor_prompts=0)


def screened(tmp_path, rows, settings, judge=None):
    asker = Asker(Theta(), {"model_sha256": "0" * 64}, tmp_path)
    return screen_examples(rows, asker, replace(settings, judge=judge or settings.judge))


def test_a_screening_with_a_judge_drops_its_conflicts_and_settles_unsorted_rows(tmp_path):
    """A tenth of the replies cannot be sorted: refused by the rules, settled by the judge."""
    rows = [make_example(f"bread number {number}", ANSWERS) for number in range(18)]
    rows += [make_example("vague thing", BAD), make_example("vague question", ANSWERS)]
    with pytest.raises(DataError, match="2 of 20 replies to the task's prompts"):
        screened(tmp_path, rows, RULES_ALONE)
    found = screened(tmp_path, rows, RULES_ALONE, Judge())
    assert found.dropped == {18}
    assert [one.by for one in found.conflicts] == ["judge"]


def test_a_judge_that_does_not_score_leaves_the_rows_unsorted(tmp_path):
    rows = [make_example(f"vague number {number}", ANSWERS) for number in range(3)]
    with pytest.raises(DataError, match="3 of 3 replies"):
        screened(tmp_path, rows, RULES_ALONE, lambda prompt, reply: "unscored")


def test_the_judge_of_the_settings_is_opened_by_name(tmp_path):
    rows = [make_example("bread", ANSWERS)]
    with pytest.raises(ConfigError, match="unknown judge 'refusl'"):
        screened(tmp_path, rows, ScreeningSettings(sets={}, monitor_prompts=0, judge="refusl"))
    assert screened(tmp_path, rows, ScreeningSettings(sets={}, monitor_prompts=0, judge="refusal")).rows == 1
