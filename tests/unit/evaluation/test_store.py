"""The reply store: made once, resumed by id after any kill, refused to any other run, the owner's alone."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
from tests.greedy import examples

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.judging.reply import Reply
from holdfast.judging.store import ReplyStore, replies

HEADER = {"model_sha256": "m", "template_sha256": "t"}


class Fake:
    """Replies with the prompt reversed, `size` at a time, and remembers what it was asked."""

    def __init__(self, *, size: int = 2, stops_after: int | None = None, name: str = "fake"):
        self.size, self.stops_after, self.name = size, stops_after, name
        self.asked: list[str] = []

    def generate(self, asked, *, max_new_tokens):
        for count, start in enumerate(range(0, len(asked), self.size)):
            if count == self.stops_after:
                raise KeyboardInterrupt
            batch = asked[start : start + self.size]
            self.asked += [example.id for example in batch]
            yield [Reply(e.id, e.prompt[::-1], truncated=bool(len(e.prompt) % 2), tokens=3) for e in reversed(batch)]


def expected(asked) -> list[Reply]:
    return [Reply(e.id, e.prompt[::-1], truncated=bool(len(e.prompt) % 2), tokens=3) for e in asked]


def run(path, engine=None, *, asked=None, header=HEADER, new: int = 5, progress=None):
    return replies(
        path, header, examples() if asked is None else asked, engine or Fake(), max_new_tokens=new, progress=progress
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "replies.jsonl"


def test_replies_come_in_the_order_of_the_examples(path):
    assert run(path) == expected(examples())


def test_whoever_looks_at_the_replies_may_end_the_asking_and_those_seen_are_kept(path):
    seen: list[list[str]] = []

    def stop(made):
        seen.append([reply.id for reply in made])
        if len(seen) == 3:
            raise ConfigError("enough", remedy="none")

    def ask():
        return replies(path, HEADER, examples(), Fake(), max_new_tokens=5, seen=stop)

    with pytest.raises(ConfigError, match="enough"):
        ask()
    assert list(map(len, seen)) == [0, 2, 2], "nothing was there; two batches"
    kept = ask()
    assert set(seen[3]) == {*seen[1], *seen[2]}, "what was there is seen first"
    assert kept == expected(examples())


def test_a_second_run_asks_for_nothing(path):
    run(path)
    before = path.read_bytes()
    engine = Fake()
    assert run(path, engine) == expected(examples())
    assert engine.asked == []
    assert path.read_bytes() == before


def test_an_interrupted_run_is_resumed_by_id(path):
    with pytest.raises(KeyboardInterrupt):
        run(path, Fake(stops_after=2))
    engine = Fake()
    told: list[int] = []
    assert run(path, engine, progress=told.append) == expected(examples())
    assert engine.asked == [example.id for example in examples()[4:]]
    assert told == [4, 6, 8, 9]


def test_a_prompt_that_is_asked_twice_counts_twice(path):
    asked = [*examples(3), *examples(2)]
    told: list[int] = []
    run(path, Fake(size=1), asked=asked, progress=told.append)
    assert told == [0, 2, 4, 5]
    run(path, asked=asked, progress=told.append)
    assert told[4:] == [5]


def test_more_prompts_later_ask_for_those_alone(path):
    run(path, asked=examples(4))
    engine = Fake()
    assert run(path, engine, asked=examples()[::-1]) == expected(examples()[::-1])
    assert set(engine.asked) == {e.id for e in examples()} - {e.id for e in examples(4)}


def test_equal_examples_share_a_reply(path):
    engine = Fake()
    assert run(path, engine, asked=[*examples(2), *examples(2)]) == expected([*examples(2), *examples(2)])
    assert len(engine.asked) == 2


def test_any_cut_of_the_file_is_resumed_to_the_same_replies(path):
    """A kill can leave any prefix of the file."""
    run(path, asked=examples(3))
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {0, 1, *range(7, len(whole), 41), *ends, *(end + 1 for end in ends), *(end + 2 for end in ends[:-1])}
    for size in sorted(cuts):
        path.write_bytes(whole[:size])
        engine = Fake()
        assert run(path, engine, asked=examples(3)) == expected(examples(3))
        complete = max(0, whole[:size].count(b"\n") - 1)
        assert len(engine.asked) == 3 - complete
        assert sorted(path.read_bytes().split(b"\n")) == sorted(lines)


def test_a_torn_last_line_is_told_without_its_text(path, caplog):
    run(path, asked=examples(2))
    path.write_bytes(path.read_bytes()[:-5])
    with caplog.at_level(logging.INFO):
        run(path, asked=examples(2))
    assert "dropped an unfinished last line" in caplog.text
    assert not any(example.prompt[::-1] in caplog.text for example in examples(2))


KILLED = """
import sys, time
from pathlib import Path
from holdfast.judging.reply import Reply
from holdfast.judging.store import ReplyStore
store = ReplyStore(Path(sys.argv[1]), {"model_sha256": "m"})
for i in range(10**6):
    store.append([Reply(f"id{i}", "word " * 2000, truncated=False, tokens=1)])
"""


def test_a_killed_writer_leaves_whole_replies(path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)])
    try:
        while not path.exists() or path.stat().st_size < 50_000:
            assert child.poll() is None
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    store = ReplyStore(path, {"model_sha256": "m"})
    assert len(store) >= 4
    assert {store[f"id{i}"].text for i in range(len(store))} == {"word " * 2000}


TOGETHER = """
import sys, time
from pathlib import Path
from holdfast.data.examples import make_example
from holdfast.judging.reply import Reply
from holdfast.judging.store import replies
class Slow:
    name = "slow"
    def generate(self, asked, *, max_new_tokens):
        for example in asked:
            time.sleep(0.005)
            print(example.id)
            yield [Reply(example.id, example.prompt, truncated=False, tokens=1)]
asked = [make_example(f"w{i}", "") for i in range(40)]
made = replies(Path(sys.argv[1]), {}, asked, Slow(), max_new_tokens=1)
assert [reply.text for reply in made] == [example.prompt for example in asked]
"""


def test_writers_side_by_side_make_every_reply_once(path):
    children = [
        subprocess.Popen([sys.executable, "-c", TOGETHER, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    made = [child.communicate(timeout=60)[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    asked = [example for ids in made for example in ids]
    assert len(asked) == len(set(asked)) == 40
    assert path.read_bytes().count(b"\n") == 41


@pytest.mark.parametrize("field", ["model_sha256", "template_sha256", "max_new_tokens", "engine", "extra"])
def test_another_header_is_refused_by_field(path, field):
    run(path)
    before = path.read_bytes()
    changed = {"max_new_tokens": {"new": 6}, "engine": {"engine": Fake(name="other")}}
    options = changed.get(field, {"header": {**HEADER, field: "changed"}})
    with pytest.raises(CheckpointError, match=f"were made with {field} = .*, now"):
        run(path, **options)
    assert path.read_bytes() == before


def test_the_header_says_how_the_replies_were_made(path):
    run(path)
    assert json.loads(path.read_text().splitlines()[0]) == {
        "kind": "holdfast replies", "version": 1, "model_sha256": "m", "template_sha256": "t", "max_new_tokens": 5,
        "engine": "fake", "decoding": "greedy",
    }  # fmt: skip


def test_a_header_may_say_the_same_as_the_arguments(path):
    assert run(path, header={**HEADER, "engine": "fake", "max_new_tokens": 5, "decoding": "greedy"})


def test_a_header_that_contradicts_the_arguments_is_refused(path):
    with pytest.raises(ConfigError, match="says max_new_tokens = 7, the engine runs with 5"):
        run(path, header={**HEADER, "max_new_tokens": 7})
    assert not path.exists()


@pytest.mark.parametrize(
    "content", [b"some notes", b"some notes\n", b'{"a": 1}\n', b"\n\n", b"\xff\n"],
    ids=["no line", "a line", "JSON", "blank", "bytes"],
)  # fmt: skip
def test_a_file_of_something_else_is_left_alone(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a file of replies"):
        run(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"id": "x", "text": 3, "truncated": false, "tokens": 1}', b'{"id": "x", "text": "y"}'],
    ids=["torn", "list", "number", "fields"],
)  # fmt: skip
def test_damage_before_the_last_line_is_refused_by_number(path, line):
    run(path)
    lines = path.read_bytes().split(b"\n")
    lines[3] = line
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(CheckpointError, match="line 4 is damaged"):
        run(path)


def test_the_file_is_the_owners_alone(path):
    mask = os.umask(0)
    try:
        run(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    run(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_any_text_survives(path):
    store = ReplyStore(path, HEADER)
    texts = ["", "two\nlines", "\u2028 \u0085 \x00", "\ud800 alone", "naïve 日本"]
    made = [Reply(str(i), text, truncated=False, tokens=i) for i, text in enumerate(texts)]
    store.append(made)
    again = ReplyStore(path, HEADER)
    assert [again[str(i)] for i in range(len(texts))] == made


def test_the_first_reply_of_an_id_stays(path):
    store = ReplyStore(path, HEADER)
    store.append([Reply("a", "first", truncated=False, tokens=1), Reply("a", "second", truncated=False, tokens=1)])
    store.append([Reply("a", "third", truncated=False, tokens=1)])
    assert len(store) == 1
    assert ReplyStore(path, HEADER)["a"].text == store["a"].text == "first"


def test_no_text_in_the_repr(path):
    store = ReplyStore(path, HEADER)
    store.append([Reply("a", "secret", truncated=False, tokens=1)])
    assert "secret" not in repr(store)
    assert "1 replies" in repr(store)


def test_an_engine_that_leaves_prompts_out_is_an_error(path):
    class Lazy(Fake):
        def generate(self, asked, *, max_new_tokens):
            yield from list(super().generate(asked, max_new_tokens=max_new_tokens))[:1]

    with pytest.raises(ResourceError, match="engine 'fake' gave no reply to 7 of 9 prompts"):
        run(path, Lazy())


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be read or written"):
        ReplyStore(tmp_path / "folder", HEADER)


def test_a_full_disk_leaves_whole_lines(path, monkeypatch):
    store = ReplyStore(path, HEADER)
    store.append([Reply("a", "kept", truncated=False, tokens=1)])
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.judging.store.os.fsync", _once(full, os.fsync))
        with pytest.raises(ResourceError, match="No space left"):
            store.append([Reply("b", "lost", truncated=False, tokens=1)])
    assert path.read_bytes() == before
    assert "b" not in store


def _once(first, then):
    calls = []

    def call(descriptor):
        calls.append(descriptor)
        return (first if len(calls) == 1 else then)(descriptor)

    return call
