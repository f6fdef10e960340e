"""Audits of models behind an endpoint: a local server computes true logprobs of a tiny model."""

from __future__ import annotations

import json
import logging
from functools import partial

import numpy as np
import pytest
from tests import tiny
from tests.serving import Server, echoing
from tests.unit.auditing.making import plain, write_rows

from holdfast.auditing import windows as windowing
from holdfast.auditing.audit import audit
from holdfast.auditing.endpoint import Token
from holdfast.auditing.opening import certify
from holdfast.auditing.results import FOLDER
from holdfast.certification.ledger_state import read_ledger
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, ConfigError, ResourceError, UnsupportedError
from holdfast.records.audit import Audit

LIMIT = ChanceConstraint(tau=0.05, alpha=0.3, first_k=2, unit="nll_token")
N = 8
KEY = "9f8e7d6c5b4a39281706f5e4"  # made up


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "safety.jsonl", N)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(windowing, "WINDOW", 4)


@pytest.fixture
def server(other):
    made = Server()
    made.script = echoing(plain(other), tiny.tokenizer())
    yield made
    made.close()


def spec(server, **options) -> str:
    named = {"base_url": server.url, "model_name": "m", "retries": 0, **options}
    return "endpoint:" + ",".join(f"{key}={value}" for key, value in named.items())


def run(before, after, data, **options):
    return audit(before, after, data, options.pop("constraint", LIMIT), device="cpu", **options)


def test_an_audit_by_endpoint_equals_the_local_one(server, base, other, data):
    local = run(base, other, data)
    found = run(base, spec(server), data)
    for name in ("nll_before", "nll_after", "first_before", "first_after", "nll_token", "nll_sum", "nll_first"):
        ours, theirs = (np.array(one.table.column(name).to_pylist()) for one in (found, local))
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    for name in ("id", "tokens", "first_tokens", "violated", "category", "role"):
        assert found.table.column(name).to_pylist() == local.table.column(name).to_pylist()
    assert (found.violations, found.n, found.within) == (local.violations, local.n, local.within)
    assert 0 < found.violations < N
    assert found.units["kl_token"] is None
    path, body, _ = server.seen[0]
    assert path == "/v1/completions"
    assert (body["echo"], body["logprobs"], body["max_tokens"], body["model"]) == (True, 1, 1, "m")


def test_both_models_behind_endpoints(server, base, other, data):
    second = Server()
    second.script = echoing(plain(base), tiny.tokenizer())
    try:
        found = run(spec(second, tokenizer=base), spec(server, tokenizer=other), data)
    finally:
        second.close()
    assert found.degradations() == pytest.approx(run(base, other, data).degradations(), abs=1e-5)
    assert found.noise_floor == 0.0  # before was asked twice
    assert found.dtype == "unknown"


def test_the_evidence_says_what_was_audited(server, base, data, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SOME_KEY", KEY)
    out = tmp_path / "out"
    found = run(base, spec(server, key_env="SOME_KEY"), data, output=out)
    stored = json.loads((out / "audit.json").read_text())
    assert stored["after"] == {
        "ref": f"m at {server.url} (an endpoint)", "sha256": None,
        "endpoint": {"base_url": server.url, "model_name": "m"},
    }  # fmt: skip
    assert "endpoint" not in stored["before"]
    assert found.describe().endswith(f"the weights of m at {server.url} (an endpoint) were not seen")
    assert Audit.load(out) == found
    assert {headers["Authorization"] for _, _, headers in server.seen} == {f"Bearer {KEY}"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(KEY.encode() in path.read_bytes() for path in written)
    assert KEY not in caplog.text


@pytest.mark.parametrize("option", [{"constraint": ChanceConstraint(unit="kl_token")}, {"kl": True}])
def test_kl_is_refused(server, base, data, option):
    with pytest.raises(UnsupportedError, match="logprob of one token") as refused:
        run(base, spec(server), data, **option)
    assert "nll_token" in refused.value.remedy
    assert not server.seen


def test_a_certificate_of_an_endpoint_is_refused(server, base, data, tmp_path):
    with pytest.raises(UnsupportedError, match=r"a certificate of m at .*: it is bound to the sha256 of weights"):
        certify(base, spec(server), data, output=tmp_path / "out", by="likelihood")
    assert not server.seen
    assert not (tmp_path / "out").exists()


def test_a_judge_is_refused(server, base, data):
    with pytest.raises(UnsupportedError, match="has no replies"):
        run(base, spec(server), data, judge="refusal")


def unprompted(block):
    return {name: values[-1:] for name, values in block.items()}


def unknown(block):
    return {**block, "token_logprobs": [None] * len(block["tokens"])}


def odds(block):
    return {**block, "token_logprobs": [0.5] * len(block["tokens"])}


def huge(block):
    return {**block, "token_logprobs": [None, *[-(10**400)] * (len(block["tokens"]) - 1)]}


@pytest.mark.parametrize("change", [unprompted, unknown, odds, lambda block: None, lambda block: [1, 2], huge])
def test_a_server_without_logprobs_of_the_prompt_is_refused(server, base, other, data, tmp_path, change):
    server.script = echoing(plain(other), tiny.tokenizer(), change)
    ledger = tmp_path / "ledger.json"
    with pytest.raises(UnsupportedError, match="does not return the logprobs of a prompt's") as refused:
        run(base, spec(server), data, ledger=ledger)
    assert "vLLM" in refused.value.remedy
    assert len(server.seen) == 1  # before anything is measured
    assert not ledger.exists()


def test_a_server_that_refuses_the_request_is_named(server, base, data):
    server.script = lambda number, body: (400, {"message": "w3 w4"}, {})
    with pytest.raises(ResourceError, match=r"m at .*: HTTP 400") as refused:
        run(base, spec(server), data)
    assert "echo" in refused.value.remedy
    assert "w3" not in str(refused.value)


def with_start(block):
    return {"tokens": ["<s>", *block["tokens"]], "token_logprobs": [None, -1.0, *block["token_logprobs"][1:]]}


def other_words(block):
    return {**block, "tokens": [name.replace("w", "v") for name in block["tokens"]]}


def by_number(block):
    return {**block, "tokens": [f"token_id:{i}" for i in range(len(block["tokens"]))]}


@pytest.mark.parametrize("change", [with_start, other_words, by_number])
def test_other_tokens_are_refused(server, base, other, data, change):
    server.script = echoing(plain(other), tiny.tokenizer(), change)
    with pytest.raises(CheckpointError, match="reads other tokens") as refused:
        run(base, spec(server), data)
    assert "tokenizer=" in refused.value.remedy
    assert " v1" not in str(refused.value)


def test_a_tokens_text_may_lack_its_space_and_a_part_of_a_character_says_nothing():
    class Bytes:
        all_special_ids = (2,)
        texts = ("\N{REPLACEMENT CHARACTER}", " the", "<eos>")
        tokens = ("ð", "\u0120the", "<eos>")

        def decode(self, ids):
            return self.texts[ids[0]]

        def convert_ids_to_tokens(self, i):
            return self.tokens[i]

    part, word, special = map(partial(Token.of, Bytes()), range(3))
    assert all(map(word.is_called, ("the", " the", "\u2581the", "\u0120the")))
    assert not any(map(word.is_called, ("", "then", None, 5)))
    assert special.is_called("")
    assert part.is_called("anything")
    assert not part.is_called(None)


def test_an_endpoint_without_any_tokenizer_is_refused(server, data):
    with pytest.raises(ConfigError, match="without a tokenizer") as refused:
        run(spec(server), spec(server), data)
    assert "tokenizer=" in refused.value.remedy


def test_an_interrupted_audit_continues(server, base, other, data, tmp_path):
    out, asks = tmp_path / "out", echoing(plain(other), tiny.tokenizer())
    server.script = lambda number, body: asks(number, body) if number <= 6 else (500, {}, {})
    with pytest.raises(ResourceError, match="HTTP 500"):
        run(base, spec(server, workers=1), data, output=out)
    assert (out / FOLDER / "after-000000.part").exists()
    server.script, server.seen = asks, []
    found = run(base, spec(server, workers=1), data, output=out)
    assert len(server.seen) == N - 4 + 2  # the probe, the windows that were missing, and the first example again
    assert found.degradations() == pytest.approx(run(base, other, data).degradations(), abs=1e-5)


def test_a_model_that_changed_in_between_is_noticed(server, base, other, data, tmp_path):
    out, asks = tmp_path / "out", echoing(plain(other), tiny.tokenizer())
    server.script = lambda number, body: asks(number, body) if number <= 6 else (500, {}, {})
    with pytest.raises(ResourceError):
        run(base, spec(server, workers=1), data, output=out)
    server.script = echoing(plain(base), tiny.tokenizer())
    with pytest.raises(CheckpointError, match="answers otherwise than when this audit began"):
        run(base, spec(server, workers=1), data, output=out)
    assert not (out / "audit.json").exists()


def test_a_finished_audit_does_not_pass_for_a_new_one_and_every_audit_is_a_look(server, base, data, tmp_path):
    ledger = tmp_path / "ledger.json"
    run(base, spec(server), data, output=tmp_path / "out", ledger=ledger)
    with pytest.raises(ConfigError, match="what an endpoint serves may have changed"):
        run(base, spec(server), data, output=tmp_path / "out", ledger=ledger)
    run(base, spec(server), data, output=tmp_path / "again", ledger=ledger)
    assert len(read_ledger(ledger)["looks"]) == 2


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("endpoint:base_url=http://h/v1", "needs model_name"),
        ("endpoint:base_url=http://h/v1,model_name=", "needs model_name"),
        ("endpoint:base_url=http://h/v1,model_name=null", "needs model_name"),
        ("endpoint:base_url=http://u:p@h/v1,model_name=m", "without user, password"),
        ("endpoint:base_url=http://h/v1,model_name=m,extra=1", "has no option 'extra'"),
        (f"endpoint:{KEY}", "expected NAME:option=value"),
        ("endpoint:base_url=http://h/v1,model_name=m,workers=0", "workers 0"),
    ],
)
def test_a_wrong_name_is_refused(base, data, written, told):
    with pytest.raises(ConfigError, match=told) as refused:
        run(base, written, data)
    assert KEY not in str(refused.value)


def test_a_revision_of_an_endpoint_is_refused(server, base, data):
    with pytest.raises(ConfigError, match="asked by name alone"):
        run(base, spec(server), data, after_revision="main")
