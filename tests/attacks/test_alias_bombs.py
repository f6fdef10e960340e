"""YAML that grows when it is read: 547 bytes that stand for a thousand million values."""

from __future__ import annotations

import resource
from pathlib import Path

from tests import forkserver
from tests.unit.cli.conftest import _write_run_file, tiny_model

__all__ = ["tiny_model"]

REFUSED, GIGABYTES = 6, 2**30


def bomb() -> str:
    """Ten lists, each of nine times the one before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    return "\n".join([*lines, "model: *a9"]) + "\n"


def limited(memory: int, *arguments: str) -> None:
    """The command, with a limit on its memory."""
    resource.setrlimit(resource.RLIMIT_AS, (memory * GIGABYTES, memory * GIGABYTES))
    forkserver.command(*arguments)


def exit_code(folder: Path, *arguments: object, seconds: int, memory: int) -> int | str:
    """Of the command in a process of its own; words where it had to be stopped."""
    process = forkserver.started(limited, memory, *map(str, arguments), log=folder / "log")
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        return f"no answer after {seconds} s"
    return process.exitcode


def test_a_report_of_a_folder_with_an_alias_bomb(tmp_path):
    """B4: config.yaml of a foreign run folder made `report` grow until it was killed."""
    (tmp_path / "config.yaml").write_text(bomb())
    assert exit_code(tmp_path, "report", tmp_path, seconds=60, memory=4) == REFUSED


def test_resuming_in_a_folder_with_an_alias_bomb(tmp_path, tiny_model: Path):
    """B4: `train --resume` compared its settings with such a file, value by value."""
    path = _write_run_file(tmp_path, tiny_model)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text(bomb())
    assert exit_code(tmp_path, "train", path, "--resume", seconds=150, memory=12) == REFUSED
