"""The event log: strict JSON, whole lines, and no step twice after a resume."""

import errno
import json
import math
import os
import signal

import numpy as np
import pytest

from holdfast.core.errors import CheckpointError, ResourceError
from holdfast.core.event_log import EventLog, read


def test_rows_are_on_disk_as_soon_as_they_are_appended(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path) as log:
        for step in range(3):
            log.append({"step": step, "g": step / 3, "event": "active"})
            assert read(path)[-1] == {"step": step, "g": step / 3, "event": "active"}
    assert len(path.read_bytes().splitlines()) == 3


def test_appending_to_an_existing_log_continues_it(tmp_path):
    for step in range(2):
        with EventLog(tmp_path / "e") as log:
            log.append({"step": step})
    assert read(tmp_path / "e") == [{"step": 0}, {"step": 1}]


def test_non_finite_numbers_become_null_everywhere(tmp_path):
    with EventLog(tmp_path / "e") as log:
        log.append(
            {
                "a": math.nan,
                "b": [math.inf, (-math.inf, 1.5)],
                "c": {"d": np.float32("nan")},
                "n": np.int64(3),
            }
        )

    def refuse(literal):
        raise AssertionError(literal)

    row = json.loads((tmp_path / "e").read_text(), parse_constant=refuse)
    assert row == {"a": None, "b": [None, [None, 1.5]], "c": {"d": None}, "n": 3}


def test_floats_keep_every_bit(tmp_path):
    values = [0.1, 1e-310, 1.7976931348623157e308, -0.0, 1 / 3]
    with EventLog(tmp_path / "e") as log:
        log.append({"v": values})
    assert [value.hex() for value in read(tmp_path / "e")[0]["v"]] == [value.hex() for value in values]


def test_a_line_stays_one_line_whatever_the_text(tmp_path):
    text = "a\nb\r\u2028c\x00\ud800"
    with EventLog(tmp_path / "e") as log:
        log.append({"step": 1, "note": text})
        log.append({"step": 2})
    assert (tmp_path / "e").read_bytes().count(b"\n") == 2
    assert read(tmp_path / "e")[0]["note"] == text


def test_a_value_that_is_not_json_leaves_the_file_alone(tmp_path):
    with EventLog(tmp_path / "e") as log:
        log.append({"step": 1})
        with pytest.raises(TypeError):
            log.append({"step": 2, "x": object()})
        log.append({"step": 3})
    assert [row["step"] for row in read(tmp_path / "e")] == [1, 3]


def test_truncation_drops_later_rows_and_keeps_the_bytes_of_the_rest(tmp_path):
    path = tmp_path / "e"
    with EventLog(path) as log:
        log.append({"event": "start"})
        for step in range(1, 6):
            log.append({"step": step, "g": 0.1 * step})
        before = path.read_bytes().splitlines(keepends=True)
        log.truncate_after(3)
        assert path.read_bytes() == b"".join(before[:4])
        for step in (4, 5):
            log.append({"step": step, "g": 0.1 * step})
    assert path.read_bytes() == b"".join(before)


def test_truncation_drops_a_late_row_that_is_not_last(tmp_path):
    with EventLog(tmp_path / "e") as log:
        for step in (1, 9, 2):
            log.append({"step": step})
        log.truncate_after(5)
    assert [row["step"] for row in read(tmp_path / "e")] == [1, 2]


def test_truncating_to_nothing_and_beyond_the_end(tmp_path):
    with EventLog(tmp_path / "e") as log:
        log.append({"step": 1})
        log.truncate_after(10)
        assert len(read(tmp_path / "e")) == 1
        log.truncate_after(0)
        assert (tmp_path / "e").read_bytes() == b""
        log.append({"step": 1})
    assert read(tmp_path / "e") == [{"step": 1}]


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_torn_last_line_is_ignored_then_dropped(tmp_path, cut):
    path = tmp_path / "e"
    path.write_bytes((b'{"step": 1}\n' * 2)[:-cut])
    expected = [{"step": 1}]
    assert read(path) == expected
    with EventLog(path) as log:
        log.append({"step": 2})
    assert read(path) == [*expected, {"step": 2}]


@pytest.mark.parametrize("line", [b"{", b"[1]", b"3", b"\xff", b""])
def test_a_damaged_line_inside_is_named_by_number_without_its_text(tmp_path, line):
    path = tmp_path / "e"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert f"{path}:2:" in caught.value.what
    assert caught.value.exit_code == 6
    with EventLog(path) as log, pytest.raises(CheckpointError):
        log.truncate_after(1)
    assert path.read_bytes().endswith(b'{"step": 2}\n')


def test_an_interrupted_truncation_leaves_the_old_file(tmp_path, monkeypatch):
    with EventLog(tmp_path / "e") as log:
        for step in (1, 2, 3):
            log.append({"step": step})

        def full(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.raises(ResourceError, match="No space"):
                log.truncate_after(1)
        assert [row["step"] for row in read(tmp_path / "e")] == [1, 2, 3]
        log.append({"step": 4})
    assert [row["step"] for row in read(tmp_path / "e")] == [1, 2, 3, 4]


def test_a_full_disk_removes_the_part_that_was_written(tmp_path, monkeypatch):
    write = os.write
    with EventLog(tmp_path / "e") as log:
        log.append({"step": 1})
        calls = []

        def nearly_full(descriptor, data):
            calls.append(len(data))
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data[:5])

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", nearly_full)
            with pytest.raises(ResourceError) as caught:
                log.append({"step": 2})
        assert caught.value.exit_code == 7
        assert calls[1] == calls[0] - 5
        log.append({"step": 3})
    assert read(tmp_path / "e") == [{"step": 1}, {"step": 3}]


def test_a_killed_process_loses_no_row_it_had_appended(tmp_path):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        log = EventLog(tmp_path / "e")
        for step in range(50):
            log.append({"step": step})
        os.write(write_end, b"x")
        signal.pause()
    assert os.read(read_end, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)
    assert [row["step"] for row in read(tmp_path / "e")] == list(range(50))


def test_sync_flushes_the_log_itself(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.path.realpath(f"/proc/self/fd/{fd}")))
    with EventLog(tmp_path / "e") as log:
        log.append({"step": 1})
        log.sync()
    assert flushed == [os.path.realpath(tmp_path / "e")]


@pytest.mark.parametrize(
    "content", [b"x", b"{", b'{"step": 1}', b"a,b\n1,2\n", b"[1]\n", b"\n", b"# notes\n\n", b"\xff\n"]
)
def test_a_file_that_is_no_event_log_is_refused_and_kept(tmp_path, content):
    (tmp_path / "e").write_bytes(content)
    with pytest.raises(CheckpointError, match="expected an event log") as caught:
        EventLog(tmp_path / "e")
    assert caught.value.exit_code == 6
    assert (tmp_path / "e").read_bytes() == content


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_not_followed(tmp_path, there):
    target = tmp_path / "elsewhere.jsonl"
    if there:
        target.write_bytes(b'{"step": 1}\n{"torn"')
    (tmp_path / "e").symlink_to(target)
    with pytest.raises(CheckpointError, match="symbolic link"):
        EventLog(tmp_path / "e")
    assert target.exists() is there
    assert not there or target.read_bytes() == b'{"step": 1}\n{"torn"'


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "e")
    with pytest.raises(CheckpointError, match="no regular file"):
        EventLog(tmp_path / "e")
