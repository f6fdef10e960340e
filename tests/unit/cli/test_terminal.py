"""Terminal output and progress: nothing in the data can control the terminal, and every number is readable."""

from __future__ import annotations

import io
import re

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
    assert describe_row(ROW) == "g -0.031  loss 1.500"


def test_unknown_numbers_are_left_out():
    assert describe_row({"step": 1, "loss": None, "g": None}) == ""
    assert describe_row({"step": 1, "loss": 2.0}) == "loss 2.000"


def test_several_constraints_are_shown_by_name():
    row = {"loss": 1.0, "g": 0.5, "constraints": {"a": {"g": 0.5}, "b\x1b[2J": {"g": -0.5}}}
    assert describe_row(row) == "g a +0.500, b -0.500  loss 1.000"


def test_plain_progress_prints_about_ten_lines(capsys):
    progress = PlainProgress()
    progress({"stage": "train", "total_steps": 205, "step": 0})
    for step in range(1, 206):
        progress({**ROW, "step": step})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training: 205 steps"
    assert lines[1].startswith("step 1/205")  # the time left is said with the first step
    assert 11 <= len(lines) - 1 <= 12
    assert lines[-1].startswith("step 205/205  g -0.031  loss 1.500")
    assert lines[-1].endswith("eta 0:00:00")


def test_a_resumed_run_shows_its_first_step_too(capsys):
    progress = PlainProgress()
    progress({"stage": "train", "total_steps": 205, "step": 42})
    progress({**ROW, "step": 43})
    assert "step 43/205" in capsys.readouterr().err


def test_asking_is_said_at_once_how_long_it_takes_with_a_batch_and_then_every_few_seconds(capsys, monkeypatch):
    progress = PlainProgress()
    for done, seconds in ((0, 1), (64, 2), (96, 3), (2000, 6), (4000, 8), (6000, 20), (20000, 21)):
        monkeypatch.setattr("time.monotonic", lambda at=seconds: 100.0 + at)
        progress({"stage": "ask", "what": "task prompts", "done": done, "total": 20000})
    assert capsys.readouterr().err.splitlines() == [
        f"asking the model: task prompts, {line}"
        for line in (
            "0 of 20000",
            "64 of 20000  eta 0:05:12",
            "4000 of 20000  eta 0:00:28",
            "6000 of 20000  eta 0:00:44",
            "20000 of 20000",
        )
    ]


def test_the_monitor_says_every_few_seconds_how_many_prompts_it_asked(capsys, monkeypatch):
    progress = PlainProgress()
    progress({"stage": "train", "total_steps": 20, "step": 0})
    for done, seconds in ((0, 1), (4, 2), (8, 7), (12, 9), (40, 30)):
        monkeypatch.setattr("time.monotonic", lambda at=seconds: 100.0 + at)
        progress({"step": 20, "asked": done, "of": 40})
    assert capsys.readouterr().err.splitlines()[1:] == [
        "step 20/20  asking 40 monitor prompts", "step 20/20  asked 8 of 40 monitor prompts"
    ]  # fmt: skip


def test_plain_progress_says_where_it_continues(capsys):
    PlainProgress()({"stage": "train", "total_steps": 10, "step": 4})
    assert "continuing after step 4" in capsys.readouterr().err


def test_without_a_terminal_there_is_no_bar(capsys):
    with show_progress() as progress:
        assert isinstance(progress, PlainProgress)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch):
    """A terminal on stderr, 80 columns wide. No fixture: pytest puts its own stderr back before a test begins."""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


MONITORED = {"step": 2, "behaviour": {"refusals_kept": {"share": 0.975, "passed": True}}}
TWO = {"loss": 1.0, "constraints": {"refusals": {"g": -0.049}, "answers": {"g": -0.1}}}


def frames(screen):
    """What the screen showed: lines without colours, each time that they were drawn."""
    return [line.rstrip() for line in re.split(r"[\r\n]", clean(screen.getvalue().replace("\r", "\n"))) if line.strip()]


def test_with_a_terminal_there_is_one_calm_line(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with show_progress() as progress:
        assert isinstance(progress, BarProgress)
        progress({"stage": "ask", "what": "ordinary prompts", "done": 0, "total": 90})
        progress._bar.refresh()
        progress({"stage": "ask", "what": "answers to hold", "done": 39, "total": 40})
        progress._bar.refresh()
        progress({"stage": "train", "total_steps": 4, "step": 0})
        progress(MONITORED)
        progress({**TWO, "step": 3})
        progress._bar.refresh()
        assert len([task for task in progress._bar.tasks if task.visible]) == 1
        progress({**TWO, "step": 4})
        assert not any(task.visible for task in progress._bar.tasks)  # what is over leaves nothing
    shown = frames(terminal)
    assert any(line.startswith("asking: ordinary prompts") and " 0/90 eta" in line for line in shown)
    assert any(line.startswith("asking: answers to hold") and "39/40 eta" in line for line in shown)
    (last,) = {line for line in shown if "3/4" in line}
    assert re.fullmatch(r"training \S+ 3/4 eta [-:0-9]+ refusals kept 97\.5 %  g refusals -0\.\S*\u2026", last)
    assert len(last) <= 80


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_are_left_out_where_nobody_wants_them(monkeypatch, variables):
    terminal = on_terminal(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with show_progress() as progress:
        progress({"stage": "train", "total_steps": 4, "step": 0})
        progress({**TWO, "step": 3})
        progress._bar.refresh()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue())


def test_otherwise_there_are_colours(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with show_progress() as progress:
        progress({"stage": "train", "total_steps": 4, "step": 0})
        progress._bar.refresh()
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", terminal.getvalue())


def test_what_the_monitor_found_stays_in_the_line(capsys):
    progress = PlainProgress()
    progress({"stage": "train", "total_steps": 4, "step": 0})
    progress(MONITORED)
    progress({**TWO, "step": 3})
    assert "step 3/4  refusals kept 97.5 %  g refusals -0.049, answers -0.100" in capsys.readouterr().err
