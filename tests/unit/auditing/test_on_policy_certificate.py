"""A certificate of replies: regressions are the judge's, bound to it, and nothing it fails on ever helps."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests import tiny
from tests.unit.auditing.certifying import CONSTRAINT, Scene, write_safety
from tests.unit.auditing.making import plain, write_adapter

from holdfast.auditing.audit import audit
from holdfast.auditing.verify import verify
from holdfast.certification.binomial import p_value
from holdfast.core.errors import CheckpointError, ConfigError, DataError, InfeasibleError
from holdfast.data.examples import as_chat, make_example
from holdfast.judging.engines.transformers import generate
from holdfast.judging.judge import UNSCORED, FunctionJudge, Judgement, Verdict
from holdfast.records.certificate import load_certificate

TOKENS = 5


@pytest.fixture(autouse=True)
def _no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.auditing.issuing.commit", lambda: None)


def score(reply: str) -> float:
    return sum(map(ord, reply)) % 64 / 64


def scoring(_prompt: str, reply: str) -> Judgement:
    return Judgement(Verdict.UNSAFE if score(reply) > 0.4 else Verdict.SAFE, score(reply))


SCORING = FunctionJudge(scoring, revision="1")
CALM = FunctionJudge(lambda _prompt, _reply: Judgement(Verdict.SAFE, 0.1), revision="1")
CALLING = FunctionJudge(lambda _prompt, _reply: "safe", revision="1")


def certify(made: Scene, judge, **options):
    return made.certify(judge=judge, max_new_tokens=TOKENS, **options)


@pytest.fixture
def changed(made, tmp_path) -> Scene:
    """A second model that replies otherwise to some prompts."""
    return made._replace(adapter=write_adapter(tmp_path / "changed", made.base, size=0.3))


def test_regressions_are_rises_of_the_judges_probability(changed):
    record = certify(changed, SCORING, constraint=replace(CONSTRAINT, tau=0.25))
    rows = [as_chat(make_example(**row)) for row in tiny.rows(20, seed=3)]
    sides = {}
    for name, model in {"before": plain(changed.base), "after": plain(changed.adapter, changed.base)}.items():
        found = generate(model, tiny.tokenizer(), rows, max_new_tokens=TOKENS)
        sides[name] = {reply.id: score(reply.text) for reply in found}
    slow = {name: sides["after"][name] - sides["before"][name] for name in sides["before"]}
    table = pq.read_table(changed.output / "certificate.parquet").to_pydict()
    assert table["degradation"] == [slow[name] for name in table["id"]]
    k = sum(value > 0.25 for value in slow.values())
    assert 0 < k < 20
    assert (record.regressions, record.n, record.unit, record.kind) == (k, 20, "on_policy", "fixed")
    assert record.groups["p_value"] == p_value(k, 20, 0.2)
    assert record.certified == (record.p_value <= 0.05)


def test_what_is_certified_names_the_judge(made):
    record = certify(made, CALM)
    assert record.certified
    assert record.settings["judge"] == {"name": "<lambda>", "revision": "1", "max_new_tokens": TOKENS}
    assert "that the judge finds harmful with a probability more than 0.05 above before's" in record.statement
    assert any("the judge <lambda> (revision 1)" in line for line in record.assumptions)
    assert not any("likelihood" in line for line in record.assumptions)
    assert record.noise_floor == 0.0
    assert load_certificate(made.output / "certificate.json") == record
    assert verify(made.output) == record


def test_the_same_question_is_answered_from_the_files(made, monkeypatch):
    record = certify(made, CALM)
    monkeypatch.setattr("holdfast.auditing.pair.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    assert certify(made, CALM) == record


class Wrong:
    """A judge that returns the wrong number of judgements."""

    name, revision = "wrong", "1"

    def judge(self, prompts, replies):
        return [Judgement(Verdict.SAFE, 0.0)] * (len(replies) + 1)


class Broken(Wrong):
    def judge(self, prompts, replies):
        raise RuntimeError("out of order")


BAD = {
    "garbage": FunctionJudge(lambda _p, _r: "perfectly safe", revision="1"),
    "nothing": FunctionJudge(lambda _p, _r: None, revision="1"),
    "not a number": FunctionJudge(lambda _p, _r: Judgement(Verdict.SAFE, float("nan")), revision="1"),
    "unscored with a probability": FunctionJudge(lambda _p, _r: Judgement(Verdict.UNSCORED, 0.0), revision="1"),
    "wrong count": Wrong(),
    "raises": Broken(),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_judge_that_fails_never_yields_a_certificate(made, name):
    record = certify(made, BAD[name])
    assert not record.certified
    assert (record.regressions, record.n, record.upper_bound) == (20, 20, 1.0)
    assert record.certified_tau is None


def test_one_reply_that_is_not_scored_is_one_regression(made):
    heard = []

    def once(prompt, reply):
        heard.append(reply)
        return UNSCORED if len(heard) == 4 else Judgement(Verdict.SAFE, 0.1)

    record = certify(made, FunctionJudge(once, revision="1"))
    assert record.regressions == 1
    assert not record.certified, "at alpha 0.2, none of 20 may regress"
    table = pq.read_table(made.output / "certificate.parquet").to_pydict()
    assert int(np.isnan(table["degradation"]).sum()) == sum(table["violated"]) == 1


def test_a_judge_without_probabilities_counts_flips(changed):
    rows = [as_chat(make_example(**row)) for row in tiny.rows(20, seed=3)]
    usual = {r.text for r in generate(plain(changed.base), tiny.tokenizer(), rows, max_new_tokens=TOKENS)}
    record = certify(changed, FunctionJudge(lambda _p, reply: "safe" if reply in usual else "unsafe", revision="1"))
    new = generate(plain(changed.adapter, changed.base), tiny.tokenizer(), rows, max_new_tokens=TOKENS)
    assert record.regressions == sum(reply.text not in usual for reply in new) > 0


def test_a_judge_that_calls_everything_safe_certifies(made):
    assert certify(made, CALLING).certified


def test_a_judge_without_a_revision_is_refused(made):
    with pytest.raises(ConfigError, match="has no revision"):
        certify(made, lambda _prompt, _reply: "safe")
    assert not made.output.exists()


@pytest.mark.parametrize("tau", [1.0, 5.0])
def test_a_tau_that_is_no_probability_is_refused(made, tau):
    with pytest.raises(ConfigError, match="expected 0 <= tau < 1"):
        certify(made, CALM, constraint=replace(CONSTRAINT, tau=tau))


def test_prompts_without_room_for_a_reply_are_refused_before_the_opening(made):
    rows = [*tiny.rows(19, seed=3), *tiny.rows(1, seed=9, length=124)]
    write_safety(made.safety, rows)
    with pytest.raises(DataError, match="leave no room for 5 new tokens"):
        certify(made, CALM)
    assert not made.safety.with_name("safety.jsonl.openings.json").exists(), "a refusal is no opening"


def test_another_judge_revision_or_length_is_another_opening(made, tmp_path):
    certify(made, CALM)
    elsewhere = made._replace(output=tmp_path / "second")
    for judge, tokens in ((replace(CALM, revision="2"), TOKENS), (CALM, TOKENS + 1)):
        with pytest.raises(InfeasibleError, match="an undeclared opening never certifies"):
            elsewhere.certify(judge=judge, max_new_tokens=tokens)
    with pytest.raises(InfeasibleError, match="an undeclared opening never certifies"):
        elsewhere.certify()  # likelihoods are another claim than replies


def test_an_audit_with_the_judge_is_a_look_at_both(made, tmp_path):
    """Likelihoods and replies were seen: to certify either afterwards is to choose, unless two looks were declared."""
    audit(
        made.base, made.adapter, str(made.safety), CONSTRAINT, judge=CALM, max_new_tokens=TOKENS, harm_tau=0.05,
        output=tmp_path / "audit", device="cpu",
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match="audits that count: 1"):
        certify(made, CALM)
    with pytest.raises(InfeasibleError, match="audits that count: 1"):
        made.certify()
    record = certify(made, CALM, openings=2)
    assert (record.openings["this"], record.openings["declared"]) == (2, 2)


def test_an_interrupted_opening_stays_entered_and_continues(made):
    def interrupted(_prompt, _reply):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        certify(made, FunctionJudge(interrupted, revision="1"))
    assert made.safety.with_name("safety.jsonl.openings.json").exists()
    assert not (made.output / "certificate.json").exists()


class Moody:
    """A judge of one revision that finds the second model's replies harmful the first time it is asked about them."""

    name, revision = "moody", "1"

    def __init__(self):
        self.asked = 0

    def judge(self, prompts, replies):
        self.asked += 1
        return [Judgement(Verdict.UNSAFE, 0.9) if self.asked == 2 else Judgement(Verdict.SAFE, 0.1) for _ in replies]


def test_asking_again_until_the_judge_is_pleased_certifies_nothing(made, tmp_path):
    judge = Moody()
    assert certify(made, judge).regressions == 20
    elsewhere = made._replace(output=tmp_path / "second")
    with pytest.raises(InfeasibleError, match="had another answer before"):
        certify(elsewhere, judge)
    assert not (elsewhere.output / "certificate.json").exists()
    assert not certify(made, judge).certified, "the first answer is still there"


def test_a_lost_certificate_is_issued_again_by_a_judge_that_says_the_same(made, tmp_path):
    first = certify(made, CALM)
    again = certify(made._replace(output=tmp_path / "second"), CALM)
    assert (again.certified, again.bound) == (True, first.bound)


def test_a_grown_sequence_must_repeat_what_was_said_of_its_start(made, tmp_path):
    judge = Moody()
    write_safety(made.safety, tiny.rows(10, seed=3))
    assert certify(made, judge, kind="sequential").regressions == 10
    write_safety(made.safety, tiny.rows(20, seed=3))
    with pytest.raises(InfeasibleError, match="had another answer before"):
        certify(made._replace(output=tmp_path / "second"), judge, kind="sequential")
    assert certify(made, judge, kind="sequential").regressions == 10, "only the new prompts are judged here"


def test_a_sequence_of_prompts_may_grow(made):
    write_safety(made.safety, tiny.rows(10, seed=3))
    first = certify(made, CALM, kind="sequential")
    write_safety(made.safety, tiny.rows(20, seed=3))
    second = certify(made, CALM, kind="sequential")
    assert (first.n, second.n) == (10, 20)


def test_a_strength_is_searched_by_what_the_replies_become(made):
    record = certify(made, CALM, kind="strength")
    assert record.strength["chosen"] == 1.0


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["settings"]["judge"].pop("revision"),
        lambda value: value["settings"]["judge"].update(more=1),
        lambda value: value["settings"].pop("judge"),
        lambda value: value.update(unit="nll_token"),
    ],
    ids=["no revision", "more", "no judge", "another unit"],
)
def test_a_record_whose_judge_does_not_fit_is_refused(made, change):
    value = certify(made, CALM).to_json()
    change(value)
    (made.output / "certificate.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=r"settings\.judge|unit"):
        load_certificate(made.output / "certificate.json")
