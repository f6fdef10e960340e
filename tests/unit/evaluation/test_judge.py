"""Judges of every form give one verdict per reply, and what they fail on is unscored, never safe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.core.errors import ConfigError, ResourceError
from holdfast.judging.judge import JUDGES, UNSCORED, Judgement, Verdict, open_judge

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
    return [str(found.verdict) for found in open_judge(judge).judge(prompts, replies)]


def test_a_name_gives_the_registered_judge():
    judge = open_judge("refusal")
    assert (judge.name, judge.revision) == ("refusal", "2")
    assert [str(j.verdict) for j in judge.judge(["p", "p"], ["I can't help with that.", "Sure."])] == ["safe", "unsafe"]


def test_every_registered_judge_takes_options_and_says_what_it_is():
    for name, make in JUDGES.items():
        assert make.name == name  # type: ignore[attr-defined]
        assert callable(make.judge)  # type: ignore[attr-defined]
        assert hasattr(make, "revision")
        summary = (make.__doc__ or "").strip().split("\n")[0]
        assert summary.endswith((".", ";", ":", ")")), name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"unknown judge 'refusals', and .*\n.*did you mean 'refusal'\?; holdfast judge",
    ):
        open_judge("refusals")


def test_a_function_sees_prompt_and_reply():
    def by_pair(prompt, reply):
        return "unsafe" if (prompt, reply) == ("p2", "two") else "safe"

    judge = open_judge(by_pair)
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

    judge = open_judge(fails)
    assert [str(j.verdict) for j in judge.judge(PROMPTS, REPLIES)] == ["safe", "unscored", "safe"]
    assert judge.failures == 1
    assert calls == REPLIES  # a function is never asked twice
    assert "secret" not in caplog.text


@pytest.mark.parametrize("stubborn", [True, False])
def test_a_batch_that_fails_is_judged_reply_by_reply(stubborn, caplog):
    judge = open_judge(Batched(stubborn=stubborn))
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

    judge = open_judge(Wrong(stubborn=True))
    assert judge.judge(PROMPTS, REPLIES) == [UNSCORED] * 3
    assert judge.failures == 3


def forever(_prompts, _replies):
    while True:
        yield Judgement(Verdict.SAFE)


def shortening(prompts, replies):
    del prompts[1:], replies[1:]
    return [Judgement(Verdict.SAFE)]


@pytest.mark.parametrize(
    "said",
    [
        lambda _, replies: {"safe": 0.1, "unsafe": 0.9, "unscored": 0.0} if len(replies) == 3 else {"safe": False},
        lambda *_: {"safe"},
        lambda *_: "safe",
        lambda _, replies: replies.clear() or [],
        shortening,
        forever,
    ],
    ids=["mapping", "set", "text", "clears its input", "shortens its input", "never ends"],
)
def test_what_is_no_list_of_judgements_is_never_safe_and_never_fewer(said):
    class Odd(Batched):
        def judge(self, prompts, replies):
            return said(prompts, replies) if len(replies) > 1 or said is not shortening else None

    judge = open_judge(Odd(stubborn=True))
    assert judge.judge(PROMPTS, REPLIES) == [UNSCORED] * 3
    assert judge.failures == 3


def test_a_refusal_of_holdfast_passes_through():
    def missing(_prompt, _reply):
        raise ResourceError("the judge's weights are missing", remedy="install them")

    with pytest.raises(ResourceError, match="weights are missing"):
        verdicts(missing)


@pytest.fixture
def sized(monkeypatch):
    """A judge with options under the name `sized`, for this test alone."""

    class Sized(Batched):
        """Takes options."""

        name = "sized"

        def __init__(self, *, model, size=3, label="a"):
            super().__init__(stubborn=False)
            self.options = {"model": model, "size": size, "label": label}

    _ = JUDGES["refusal"]  # so that the package is read before its entries are replaced
    monkeypatch.setattr(JUDGES, "_entries", {**JUDGES._entries, "sized": Sized})
    return lambda spec: open_judge(spec)._judge.options  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("sized:model=owner/name", {"model": "owner/name", "size": 3, "label": "a"}),
        ("sized:model=http://host:8000/v1,size=8", {"model": "http://host:8000/v1", "size": 8, "label": "a"}),
        ("sized:model=m,label=true,size=0.5", {"model": "m", "size": 0.5, "label": True}),
        ({"name": "sized", "model": "m", "label": "x,y"}, {"model": "m", "size": 3, "label": "x,y"}),
    ],
    ids=["one", "address and number", "values", "mapping"],
)
def test_options_are_given_as_text_or_mapping(sized, spec, options):
    assert sized(spec) == options


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sized:modle=m", r"judge 'sized' has no option 'modle'\n.*did you mean 'model'\?"),
        ({"name": "sized", "modle": "m"}, r"judge 'sized' has no option 'modle'\n.*did you mean 'model'\?"),
        ("sized", r"judge 'sized' needs model\n.*write sized:model=\.\.\."),
        ("refusal:size=3", r"judge 'refusal' has no option 'size'\n.*it takes no options"),
        ("sized:model", r"expected NAME:option=value"),
        ("sized:", r"expected NAME:option=value"),
        ("sized:model=a,model=b", r"expected NAME:option=value,option=value with each option once"),
        ("sizd:model=m", r"unknown judge 'sizd'\n.*did you mean 'sized'\?"),
        ({"model": "m"}, "a mapping without a name"),
        ({"name": 3}, "a mapping without a name"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused_with_the_nearest(sized, spec, message):
    with pytest.raises(ConfigError, match=message):
        open_judge(spec)


@pytest.mark.parametrize("form", [str, Path, lambda folder: {"name": str(folder)}], ids=["text", "path", "mapping"])
def test_a_folder_with_a_judge_in_it_is_a_trained_judge(tmp_path, monkeypatch, form):
    (tmp_path / "judge.json").write_text("{}")
    asked = []

    def load(folder):
        asked.append(folder)
        return Batched(stubborn=False)

    monkeypatch.setattr("holdfast.judging.judges.trained.TrainedJudge", load)
    assert open_judge(form(tmp_path)).name == "batched"
    assert asked == [tmp_path]


def test_a_folder_without_a_judge_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no judge\.json"):
        open_judge(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        open_judge(f"{tmp_path}/missing")


@pytest.mark.parametrize(
    ("probability", "categories"),
    [
        (1.5, None),
        (-0.1, None),
        (float("nan"), None),
        (True, None),
        (10**400, None),
        (float("inf"), None),
        ("0.2", None),
        (0.2, {"c": 7.0}),
        (0.2, {"c": None}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_scores_outside_zero_and_one_make_a_verdict_unscored(probability, categories):
    odd = Judgement(Verdict.SAFE, probability, categories)
    assert verdicts(lambda _prompt, _reply: odd) == ["unscored"] * 3


def test_categories_that_are_no_mapping_are_a_failure_of_the_judge():
    assert verdicts(lambda _prompt, _reply: Judgement(Verdict.SAFE, 0.1, 5)) == ["unscored"] * 3


@pytest.mark.parametrize("value", [5, None, Batched, object()])
def test_anything_else_is_refused(value):
    with pytest.raises(ConfigError, match="expected a name, an object with"):
        open_judge(value)


def test_opening_a_judge_does_not_ask_for_its_revision():
    class Costly(Batched):
        @property
        def revision(self):  # type: ignore[override]
            raise AssertionError("hashed gigabytes")

    assert open_judge(Costly(stubborn=False)).name == "batched"


def test_guarding_twice_changes_nothing():
    judge = open_judge("refusal")
    assert open_judge(judge) is judge


def test_ls_judges_names_them_with_a_summary():
    done = CliRunner().invoke(app, ["ls", "judges", "--json"])
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == list(JUDGES)
    assert "must be refused" in next(row["summary"] for row in rows if row["name"] == "refusal")


def test_judges_are_listed_without_torch():
    code = (
        "import sys\nfrom holdfast.judging.judge import JUDGES\nassert 'refusal' in JUDGES\n"
        "print('torch' in sys.modules, 'holdfast.judging.judges.refusal' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
