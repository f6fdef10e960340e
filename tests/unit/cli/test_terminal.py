"""Terminal output and progress: nothing in the data can control the terminal, and every number is readable."""

from __future__ import annotations

import io

import pytest

from holdfast.cli.progress import BarProgress, PlainProgress, describe_row, show_progress
from holdfast.cli.terminal import clean, duration, note, size

ROW = {"step": 1, "loss": 1.5, "g": -0.031, "multiplier": 0.25, "violation_rate": 0.125}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("a\x1b]52;c;aGVsbG8=", "a"),
        ("a\x9b31mb", "ab"),
        ("a\x90q\x9cb", "ab"),
        ("a\x1bcb", "ab"),
        ("a\r\x08\x00\x7fb", "ab"),
        ("a\u202eb\u2066c\u200b", "abc"),
        ("two\nlines", "two\nlines"),
        ("\u00e9\u4e2d\U0001f600", "\u00e9\u4e2d\U0001f600"),
    ],
)
def test_clean(text, shown):
    assert clean(text) == shown


def test_a_terminal_without_unicode_does_not_end_the_run(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stderr", stream)
    note("caf\u00e9 \ud800")
    stream.flush()
    assert stream.buffer.getvalue() == b"caf? \n"  # the lone surrogate is removed, the letter replaced


def test_numbers_in_words():
    assert [duration(x) for x in (0, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]
    assert [size(x) for x in (2048, 3 * 2**20, 5 * 2**30)] == ["2 KiB", "3.0 MiB", "5.0 GiB"]


def test_a_row_shows_loss_and_the_state_of_the_constraint():
    assert describe_row(ROW) == "loss 1.500  g -0.031 multiplier 0.25 violations 12.5 %"


def test_unknown_numbers_are_left_out():
    assert describe_row({"step": 1, "loss": None, "g": None}) == ""
    assert describe_row({"step": 1, "loss": 2.0}) == "loss 2.000"


def test_several_constraints_are_shown_by_name():
    row = {"loss": 1.0, "g": 0.5, "constraints": {"a": {"g": 0.5}, "b\x1b[2J": {"g": -0.5}}}
    assert describe_row(row) == "loss 1.000  a: g +0.500  b: g -0.500"


def test_plain_progress_prints_about_ten_lines(capsys):
    progress = PlainProgress()
    progress({"stage": "train", "total_steps": 205, "step": 0})
    for step in range(1, 206):
        progress({**ROW, "step": step})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training: 205 steps"
    assert 10 <= len(lines) - 1 <= 11
    assert lines[-1].startswith("step 205/205  loss 1.500  g -0.031")
    assert lines[-1].endswith("eta 0:00:00")


def test_how_long_asking_takes_is_said_with_the_second_batch(capsys):
    progress = PlainProgress()
    for done in (32, 64, 96, 2000):
        progress({"stage": "ask", "what": "task prompts", "done": done, "total": 20000})
    first, later = capsys.readouterr().err.splitlines()
    assert first.startswith("asking the model: task prompts, 64 of 20000  eta ")
    assert later.startswith("asking the model: task prompts, 2000 of 20000  eta ")


def test_plain_progress_says_where_it_continues(capsys):
    PlainProgress()({"stage": "train", "total_steps": 10, "step": 4})
    assert "continuing after step 4" in capsys.readouterr().err


def test_without_a_terminal_there_is_no_bar(capsys):
    with show_progress() as progress:
        assert isinstance(progress, PlainProgress)


def test_with_a_terminal_there_is_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress() as progress:
        assert isinstance(progress, BarProgress)
        progress({"stage": "train", "total_steps": 4, "step": 0})
        progress({**ROW, "step": 3})
    assert "3/4" in screen.getvalue()
    assert "violations 12.5 %" in screen.getvalue()
