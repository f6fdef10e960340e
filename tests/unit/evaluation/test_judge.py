"""Judges of every form give one verdict per reply, and what they fail on is unscored, never safe."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.core.errors import ConfigError, ResourceError
from holdfast.evaluation.judge import JUDGES, UNSCORED, Judge, Judgement, Verdict, as_judge

PROMPTS, REPLIES = ["p1", "p2", "p3"], ["one", "two", "three"]


class Batched:
    """A judge that fails on whole batches with "two" in them, and on "two" alone if `stubborn`."""

    name, revision = "batched", "7"

    def __init__(self, *, stubborn: bool) -> None:
        self.stubborn = stubborn

    def judge(self, prompts, replies):
        if "two" in replies and (self.stubborn or len(replies) > 1):
            raise ValueError("two is a secret")
        return [Judgement(Verdict.SAFE, probability=0.25, categories={"c": 0.5}) for _ in replies]


def verdicts(judge, prompts=PROMPTS, replies=REPLIES) -> list[str]:
    return [str(found.verdict) for found in as_judge(judge).judge(prompts, replies)]


def test_a_name_gives_the_registered_judge():
    judge = as_judge("refusal")
    assert (judge.name, judge.revision) == ("refusal", "1")
    assert [str(j.verdict) for j in judge.judge(["p", "p"], ["I can't help with that.", "Sure."])] == ["safe", "unsafe"]


def test_every_registered_judge_is_a_judge_under_its_own_name():
    for name, make in JUDGES.items():
        judge = make()
        assert isinstance(judge, Judge)
        assert judge.name == name
        assert judge.revision
        assert (make.__doc__ or "").strip()
        assert len(judge.judge(["p"] * 2, ["", "x"])) == 2


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown judge 'refusals'\n.*did you mean 'refusal'\?"):
        as_judge("refusals")


def test_a_function_sees_prompt_and_reply():
    def by_pair(prompt, reply):
        return "unsafe" if (prompt, reply) == ("p2", "two") else "safe"

    judge = as_judge(by_pair)
    assert (judge.name, judge.revision) == ("by_pair", None)
    assert verdicts(by_pair) == ["safe", "unsafe", "safe"]


@pytest.mark.parametrize(
    "said",
    ["yes", "", None, True, 0, 1.0, "safe.", "SAFE and sound", "safe unsafe", object(), Judgement("safe")],
    ids=lambda value: type(value).__name__ if type(value) is object else str(value),
)
def test_what_is_not_a_verdict_is_unscored(said):
    assert verdicts(lambda _prompt, _reply: said) == ["unscored"] * 3


@pytest.mark.parametrize(
    "said", ["unsafe", " Unsafe\n", Verdict.UNSAFE, Judgement(Verdict.UNSAFE, probability=0.9)], ids=repr
)
def test_verdicts_are_taken_as_text_or_objects(said):
    assert verdicts(lambda _prompt, _reply: said) == ["unsafe"] * 3


def test_a_function_that_raises_leaves_that_reply_unscored_and_counted(caplog):
    calls = []

    def fails(_prompt, reply):
        calls.append(reply)
        if reply == "two":
            raise KeyError("two is a secret")
        return "safe"

    judge = as_judge(fails)
    assert [str(j.verdict) for j in judge.judge(PROMPTS, REPLIES)] == ["safe", "unscored", "safe"]
    assert judge.failures == 1
    assert calls == REPLIES  # a function is never asked twice
    assert "secret" not in caplog.text


@pytest.mark.parametrize("stubborn", [True, False])
def test_a_batch_that_fails_is_judged_reply_by_reply(stubborn, caplog):
    judge = as_judge(Batched(stubborn=stubborn))
    found = judge.judge(PROMPTS, REPLIES)
    kept = Judgement(Verdict.SAFE, 0.25, {"c": 0.5})
    assert found == [kept, UNSCORED if stubborn else kept, kept]
    assert judge.failures == int(stubborn)
    assert "secret" not in caplog.text
    assert ("failed on 1 of 3 replies" in caplog.text) == stubborn


@pytest.mark.parametrize("returned", [[], [Judgement(Verdict.SAFE)] * 2, None, 5])
def test_a_wrong_number_of_judgements_is_unscored(returned):
    class Wrong(Batched):
        def judge(self, prompts, replies):
            return returned

    judge = as_judge(Wrong(stubborn=True))
    assert judge.judge(PROMPTS, REPLIES) == [UNSCORED] * 3
    assert judge.failures == 3


def test_a_refusal_of_holdfast_passes_through():
    def missing(_prompt, _reply):
        raise ResourceError("the judge's weights are missing", remedy="install them")

    with pytest.raises(ResourceError, match="weights are missing"):
        verdicts(missing)


@pytest.mark.parametrize("value", [5, None, Batched, object()])
def test_anything_else_is_refused(value):
    with pytest.raises(ConfigError, match="expected a name, an object with"):
        as_judge(value)


def test_guarding_twice_changes_nothing():
    judge = as_judge("refusal")
    assert as_judge(judge) is judge


def test_ls_judges_names_them_with_a_summary():
    done = CliRunner().invoke(app, ["ls", "judges", "--json"])
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == list(JUDGES)
    assert "must be refused" in next(row["summary"] for row in rows if row["name"] == "refusal")


def test_judges_are_listed_without_torch():
    code = (
        "import sys\nfrom holdfast.evaluation.judge import JUDGES\nassert 'refusal' in JUDGES\n"
        "print('torch' in sys.modules, 'holdfast.evaluation.judges.refusal' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
