"""The attacks run against this code and against the first release (commit 5ed8a18), which accepted them.

`python tools/attacks_on.py 5ed8a18` runs `tests/attacks` on that commit's sources. A test speaks today's command line;
here it is translated where the first release spelled a command in another way, so that an attack fails there because
the forgery is accepted, never because of a usage error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

import holdfast

FIRST_RELEASE = not hasattr(holdfast, "certify_counts")
USAGE = 2


class Outcome(NamedTuple):
    """What a command ended with."""

    code: int
    out: str
    err: str


def translated(argv: list[str]) -> list[str]:
    """Today's command line in the words of the first release."""
    if argv[0] == "verify":
        return ["certify", "--verify", *_renamed(argv[1:])]
    if argv[0] == "certify-counts":
        return ["certify", "--regressions", argv[1], "--n", argv[2], *argv[3:]]
    if argv[0] == "certify":
        return ["certify", *_renamed(_without_by(argv[1:]))]
    return argv


def _renamed(argv: list[str]) -> list[str]:
    return ["--safety" if word == "--prompts" else word for word in argv]


def _without_by(argv: list[str]) -> list[str]:
    """The first release knew one way only; `--by` is left out, `--by kl` is its unit."""
    if "--by" not in argv:
        return argv
    place = argv.index("--by")
    kept = [*argv[:place], *argv[place + 2 :]]
    return [*kept, "--unit", "kl_token"] if argv[place + 1] == "kl" else kept


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process: `command("verify", path)`; a usage error fails the test as such."""
    from holdfast.cli.main import main

    def call(*arguments: object, usage: bool = False) -> Outcome:
        argv = [str(word) for word in arguments]
        monkeypatch.setattr(sys, "argv", ["holdfast", *(translated(argv) if FIRST_RELEASE else argv)])
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        out, err = capsys.readouterr()
        if code == USAGE and not usage:
            raise RuntimeError(f"usage error, which says nothing about the attack: {sys.argv[1:]}: {err}")
        return Outcome(code, out, err)

    return call
