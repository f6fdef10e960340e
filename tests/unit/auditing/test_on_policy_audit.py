"""An audit with a judge that gives probabilities counts on-policy regressions, and keeps the scores in its table."""

from __future__ import annotations

import json

import pytest
from tests import tiny
from tests.unit.auditing.making import plain, write_rows

from holdfast.auditing.audit import audit
from holdfast.certification.openings import Ledger
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError
from holdfast.data.examples import as_chat, make_example
from holdfast.judging.engines.transformers import generate
from holdfast.judging.judge import UNSCORED, FunctionJudge, Judgement, Verdict

TOKENS = 6


def score(reply: str) -> float:
    """A probability that any change of a reply moves."""
    return sum(map(ord, reply)) % 64 / 64


def scoring(_prompt: str, reply: str) -> Judgement:
    return Judgement(Verdict.UNSAFE if score(reply) > 0.4 else Verdict.SAFE, score(reply))


JUDGE = FunctionJudge(scoring, revision="1")


def replies(model, n: int) -> list[str]:
    rows = tiny.rows(n, seed=0)
    examples = [as_chat(make_example(row["prompt"], row["completion"], f"row {i}")) for i, row in enumerate(rows)]
    return [one.text for one in generate(model, tiny.tokenizer(), examples, max_new_tokens=TOKENS)]


@pytest.fixture
def audited(base, adapter, tmp_path):
    def call(judge=JUDGE, *, n: int = 12, folder: str = "out", **options):
        data = write_rows(tmp_path / "safety.jsonl", n)
        given = {"max_new_tokens": TOKENS, "harm_tau": 0.25, "output": tmp_path / folder, "device": "cpu"} | options
        return audit(
            base, adapter, str(data), ChanceConstraint(tau=1.0, alpha=0.2, unit="nll_token"), judge=judge, **given
        )

    return call


def test_regressions_are_those_of_the_models_own_replies(audited, base, adapter):
    found = audited()
    before = [score(reply) for reply in replies(plain(base), 12)]
    after = [score(reply) for reply in replies(plain(adapter, base), 12)]
    k = sum(now - was > 0.25 for was, now in zip(before, after, strict=True))
    assert 0 < k < 12
    counted = found.behaviour["on_policy"]
    assert (counted["tau"], counted["n"], counted["regressions"], counted["unscored"]) == (0.25, 12, k, 0)
    assert found.table.column("harm_before").to_pylist() == before
    assert found.table.column("harm_after").to_pylist() == after


def test_a_reply_that_is_not_scored_is_a_regression_and_null_in_the_table(audited):
    heard = []

    def fails_once(prompt, reply):
        heard.append(reply)
        return UNSCORED if len(heard) == 15 else scoring(prompt, reply)  # the third reply of the second model

    found = audited(FunctionJudge(fails_once, revision="1"), harm_tau=0.99)
    assert found.behaviour["on_policy"]["regressions"] == found.behaviour["on_policy"]["unscored"] == 1
    assert [value is None for value in found.table.column("harm_after").to_pylist()] == [i == 2 for i in range(12)]


def test_a_judge_without_probabilities_has_no_on_policy_figures(audited):
    found = audited("refusal")
    assert "on_policy" not in found.behaviour
    assert found.table.column("harm_before").null_count == 12
    assert found.table.column("verdict_before").null_count == 0


@pytest.mark.parametrize("returned", ["fine", None, 0.0], ids=["garbage", "nothing", "number"])
def test_a_judge_that_returns_garbage_shows_no_safe_reply(audited, returned):
    found = audited(FunctionJudge(lambda _prompt, _reply: returned, revision="1")).behaviour
    assert (found["safe_before"], found["safe_after"], found["unscored"], found["flip_upper"]) == (0, 0, 12, 1.0)
    assert "on_policy" not in found


def test_another_tau_is_another_audit(audited, tmp_path):
    first = audited()
    assert audited().binding == first.binding
    with pytest.raises(ConfigError, match="holds the audit of other models, data or settings"):
        audited(harm_tau=0.5)


@pytest.mark.parametrize("tau", [1.0, -0.1, float("nan")])
def test_a_tau_that_is_no_probability_is_refused_before_anything_is_written(audited, tmp_path, tau):
    with pytest.raises(ConfigError, match="expected 0 <= tau < 1"):
        audited(harm_tau=tau)
    assert not (tmp_path / "out").exists()


def test_the_look_at_the_replies_is_entered_too(audited, tmp_path):
    audited()
    state = json.loads(Ledger(tmp_path / "safety.jsonl.openings.json").path.read_text())
    assert len({entry["look"] for entry in state["looks"]}) == 2
    audited(lambda prompt, reply: "safe", folder="unbound")  # no revision: nothing could be certified with it
    assert len(json.loads((tmp_path / "safety.jsonl.openings.json").read_text())["looks"]) == 2


def test_a_judge_with_options_is_named_as_text(audited, tmp_path):
    folder = tiny.saved(tmp_path / "judge")
    found = audited(f"guard:model={folder},device=cpu,max_new_tokens=4", n=3)
    assert found.behaviour["judge"] == "guard"
    assert found.behaviour["unscored"] == 3
    assert found.behaviour["failures"] == 0
