"""The endpoint engine against a local server: what is sent, what is tried again, and what never leaks."""

from __future__ import annotations

import logging
import threading

import pytest
from tests.greedy import examples
from tests.serving import Server, answer

from holdfast.core.errors import CheckpointError, ConfigError, DataError, ResourceError, UnsupportedError
from holdfast.data.examples import make_example
from holdfast.judging.engines import open_engine
from holdfast.judging.store import replies as stored


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def engine(server, **options):
    return open_engine("endpoint", base_url=server.url, model_name="m", **{"pause": 0.001, **options})


def replies(server, asked=None, *, new: int = 9, **options) -> dict:
    asked = examples() if asked is None else asked
    found = [r for batch in engine(server, **options).generate(asked, max_new_tokens=new) for r in batch]
    assert len(found) == len(asked)
    return {reply.id: reply for reply in found}


def test_the_request_asks_for_a_greedy_reply(server):
    turns = ({"role": "system", "content": "w1"}, {"role": "user", "content": "w2"})
    asked = [make_example("how do I bake bread", ""), make_example(turns, ({"role": "assistant", "content": ""},))]
    replies(server, asked, workers=1, extra={"seed": 1})
    path, first, _ = server.seen[0]
    assert path == "/v1/chat/completions"
    assert first == {
        "model": "m", "messages": [{"role": "user", "content": "how do I bake bread"}], "max_tokens": 9,
        "temperature": 0, "stream": False, "seed": 1,
    }  # fmt: skip
    assert server.seen[1][1]["messages"] == list(turns)


def test_replies_belong_to_their_prompts_whatever_order_they_arrive_in(server):
    server.script = lambda number, body: (200, answer(f" re: {body['messages'][0]['content']}\n"), {})
    found = replies(server, workers=4)
    assert {key: reply.text for key, reply in found.items()} == {e.id: f"re: {e.prompt}" for e in examples()}


def test_a_cut_reply_is_truncated(server):
    server.script = lambda number, body: (200, answer("cut", "length", 9), {})
    assert {(r.text, r.truncated, r.tokens) for r in replies(server).values()} == {("cut", True, 9)}


def test_a_whole_reply_is_not_truncated(server):
    assert {(r.text, r.truncated, r.tokens) for r in replies(server).values()} == {("a reply", False, 3)}


def test_a_refusal_field_is_the_reply(server):
    refused = {"choices": [{"message": {"content": None, "refusal": "I cannot"}, "finish_reason": "stop"}]}
    server.script = lambda number, body: (200, refused, {})
    assert {(r.text, r.tokens) for r in replies(server).values()} == {("I cannot", 0)}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_tried_again(server, status):
    server.script = lambda number, body: (status, {}, {}) if number < 3 else (200, answer(), {})
    assert replies(server, examples(1), workers=1)
    assert len(server.seen) == 3


def test_the_servers_own_waiting_time_wins(server, monkeypatch):
    waits = []
    monkeypatch.setattr(threading.Event, "wait", _recording(waits, threading.Event.wait))
    server.script = lambda number, body: (429, {}, {"Retry-After": "7"}) if number == 1 else (200, answer(), {})
    replies(server, examples(1), workers=1)
    assert 7.0 in waits


def _recording(waits, whole):
    def wait(self, timeout=None):
        waits.append(timeout)
        return whole(self, 0.001 if timeout == 7.0 else timeout)

    return wait


def test_retries_end(server):
    server.script = lambda number, body: (503, {}, {})
    with pytest.raises(ResourceError, match=rf"{server.url}/chat/completions with model 'm': HTTP 503"):
        replies(server, examples(1), retries=2)
    assert len(server.seen) == 3


@pytest.mark.parametrize(("status", "error"), [(400, ResourceError), (401, ConfigError), (404, ConfigError)], ids=str)
def test_failures_for_good_are_not_tried_again(server, status, error):
    server.script = lambda number, body: (status, {}, {})
    with pytest.raises(error, match=f"HTTP {status}|answers {status}"):
        replies(server, examples(1))
    assert len(server.seen) == 1


def test_redirects_are_not_followed(server):
    other = Server()
    try:
        server.script = lambda number, body: (307, {}, {"Location": f"{other.url}/chat/completions"})
        with pytest.raises(ResourceError, match="HTTP 307"):
            replies(server, examples(1))
        assert not other.seen
    finally:
        other.close()


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": null, "finish_reason": "stop"}]}',
     b'{"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}', b"[" * 100_000,
     b'{"choices": [{"message": {"content": null, "reasoning": "w1"}, "finish_reason": "stop"}]}',
     b'{"choices": [{"message": {}, "finish_reason": "length"}]}'],
    ids=["no JSON", "list", "empty", "no choice", "no message", "number", "nested", "null", "no content"],
)  # fmt: skip
def test_garbage_is_never_a_reply(server, body):
    server.script = lambda number, _: (200, body, {})
    with pytest.raises(ResourceError, match=r"not JSON|not the fields"):
        replies(server, examples(1), retries=1)


def test_a_withheld_reply_is_not_the_models(server):
    server.script = lambda number, body: (200, answer("", "content_filter"), {})
    with pytest.raises(ResourceError, match="finish_reason 'content_filter'"):
        replies(server, examples(1))


def test_errors_name_the_address_and_neither_text_nor_key(server, monkeypatch, caplog):
    monkeypatch.setenv("SERVER_KEY", "sk-hidden")
    asked = [make_example("how do I bake secret bread", "")]
    server.script = lambda number, body: (400, {"error": body["messages"][0]["content"]}, {})
    with caplog.at_level(logging.DEBUG), pytest.raises(ResourceError) as caught:
        replies(server, asked, key_env="SERVER_KEY")
    for told in (str(caught.value), repr(caught.value.__cause__), caplog.text):
        assert "secret" not in told
        assert "sk-hidden" not in told


def test_no_server_is_a_resource_error():
    closed = Server()
    closed.close()
    with pytest.raises(ResourceError, match="nothing answers at"):
        replies(closed, examples(1), retries=0)


def test_silence_is_a_resource_error(server):
    block = threading.Event()
    server.script = lambda number, body: (block.wait(5), (200, answer(), {}))[1]
    try:
        with pytest.raises(ResourceError, match="no answer in time"):
            replies(server, examples(1), retries=0, timeout=0.05)
    finally:
        block.set()


def test_the_key_comes_from_the_environment_and_stays_there(server, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "sk-hidden")
    made = engine(server, key_env="SERVER_KEY")
    list(made.generate(examples(1), max_new_tokens=2))
    assert server.seen[0][2]["Authorization"] == "Bearer sk-hidden"
    assert "sk-hidden" not in repr(made)


@pytest.mark.parametrize("value", [None, "", "two\nlines"], ids=["unset", "empty", "line break"])
def test_a_missing_or_broken_key_is_refused_before_anything_is_sent(server, monkeypatch, value):
    monkeypatch.delenv("SERVER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SERVER_KEY", value)
    with pytest.raises(ConfigError, match="SERVER_KEY holds no usable API key") as caught:
        replies(server, key_env="SERVER_KEY")
    assert "lines" not in str(caught.value)
    assert not server.seen


def test_one_failure_ends_the_generation_and_keeps_what_came_before(server):
    server.script = lambda number, body: (200, answer(), {}) if number < 4 else (401, {}, {})
    batches = engine(server, workers=1).generate(examples(), max_new_tokens=2)
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(ConfigError, match="answers 401"):
        next(batches)
    assert len(server.seen) < 9, "requests that wait are not sent"


def test_requests_are_in_flight_together(server):
    together = threading.Barrier(3, timeout=10)

    def script(number, body):
        together.wait()
        return 200, answer(), {}

    server.script = script
    assert len(replies(server, examples(3), workers=3)) == 3


@pytest.mark.parametrize("url", ["file:///etc/passwd", "host/v1", "https://user:hidden@host/v1"])
def test_other_addresses_are_refused_and_not_told(url):
    with pytest.raises(ConfigError, match="engine 'endpoint': expected base_url to be") as caught:
        open_engine("endpoint", base_url=url, model_name="m")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "option", [{"retries": -1}, {"retries": "2"}, {"workers": 0}, {"timeout": 0}, {"pause": -1.0}], ids=str
)
def test_limits_are_checked(option):
    with pytest.raises(ConfigError, match=f"engine 'endpoint': {next(iter(option))} .*, expected a number >="):
        open_engine("endpoint", **{"base_url": "http://localhost/v1", "model_name": "m", **option})


def test_an_empty_reply_is_a_reply(server):
    server.script = lambda number, body: (200, answer("", tokens=0), {})
    assert {(r.text, r.tokens) for r in replies(server).values()} == {("", 0)}


def test_an_answer_that_trickles_is_not_waited_for(server):
    """Every byte comes within the timeout, all of them do not."""
    server.trickle = 0.05
    with pytest.raises(ResourceError, match="no answer in time"):
        replies(server, examples(1), retries=0, timeout=0.3)


@pytest.mark.parametrize(
    "changed", [{"model_name": "other"}, {"extra": {"seed": 1}}, {"base_url": "http://127.0.0.1:9/v1"}], ids=str
)
def test_stored_replies_of_another_model_are_not_taken_for_this_one(server, tmp_path, changed):
    file, asked = tmp_path / "replies.jsonl", examples(2)
    stored(file, {}, asked, engine(server), max_new_tokens=3)
    seen = len(server.seen)
    other = open_engine("endpoint", **{"base_url": server.url, "model_name": "m", **changed})
    with pytest.raises(CheckpointError, match=f"were made with {next(iter(changed))} ="):
        stored(file, {}, asked, other, max_new_tokens=3)
    stored(file, {}, asked, engine(server, workers=2, timeout=9), max_new_tokens=3)
    assert len(server.seen) == seen


@pytest.mark.parametrize("template", ["alpaca", "none"])
def test_templates_that_the_server_does_not_know_are_refused(template):
    with pytest.raises(UnsupportedError, match=f"template '{template}'"):
        open_engine("endpoint", base_url="http://localhost/v1", model_name="m", template=template)


def test_the_engines_own_fields_cannot_be_overruled():
    with pytest.raises(ConfigError, match="extra has temperature"):
        open_engine("endpoint", base_url="http://localhost/v1", model_name="m", extra={"temperature": 1})


def test_plain_text_is_refused(server):
    with pytest.raises(DataError, match="nothing to reply to"):
        replies(server, [make_example("", "text")])
