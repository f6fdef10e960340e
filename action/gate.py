"""The gate of the GitHub Action: runs `holdfast certify --json`, writes the job summary and the step's outputs.

| holdfast certify | the gate                                                        |
|------------------|-----------------------------------------------------------------|
| 0                | certified, if the JSON says so too; otherwise an error (exit 1) |
| 4                | not certified (exit 4)                                          |
| anything else    | an error: the same exit code                                    |

Names and sentences of models and files are foreign text. They enter the summary with every special character as an
entity, so that none is Markdown or HTML; what holdfast prints is shown with workflow commands switched off; inputs
become `--option=value`, so that none is an option. Only the standard library is used, and no prompt is shown.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CERTIFIED, NOT_CERTIFIED, ERROR = 0, 4, 1
OPTIONS = ("before", "after", "prompts", "by", "judge", "alpha", "confidence", "openings", "output")
REQUIRED = ("before", "after", "prompts")
# Files and tokens of the runner that a model's own code must not find.
WITHHELD = re.compile(r"GITHUB_(OUTPUT|ENV|PATH|STATE|STEP_SUMMARY|TOKEN)|ACTIONS_.*|GATE_.*")
LONGEST = 2000  # characters of a foreign text in the summary


def main() -> int:
    missing = [name for name in REQUIRED if not given(name)]
    if missing:
        print(f"error: the inputs {', '.join(missing)} are missing or empty")
        return finish(2, {}, "the inputs " + ", ".join(missing) + " are missing")
    with key_file() as key:
        code, printed = run(command(key))
    found, problem = verdict(code, printed)
    return finish(code, found, problem)


def given(name: str) -> str:
    """An input, as action.yml hands it over."""
    return os.environ.get(f"GATE_{name.upper()}", "").strip()


def command(key: Path | None) -> list[str]:
    """The command line."""
    found = ["holdfast", "certify", "--json", *(f"--{name}={given(name)}" for name in OPTIONS if given(name))]
    found += [f"--also={word}" for word in given("also").replace(",", " ").split()]
    return found if key is None else [*found, f"--sign={key}"]


@contextmanager
def key_file() -> Iterator[Path | None]:
    """The private key in a file that only this user reads, removed afterwards; None without a key."""
    key = given("sign_key")
    if not key:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("RUNNER_TEMP")) as folder:
        path = Path(folder) / "key"
        path.touch(mode=0o600)
        path.write_text(key + "\n", encoding="utf-8")
        yield path


def run(argv: list[str]) -> tuple[int, str]:
    """Exit code and stdout; what goes to stderr is shown as it comes, with workflow commands switched off."""
    environment = {name: value for name, value in os.environ.items() if not WITHHELD.fullmatch(name)}
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        with tempfile.TemporaryFile() as output:
            try:
                shown = sys.stdout.fileno()
                done = subprocess.run(argv, env=environment, stdout=output, stderr=shown, check=False)  # noqa: S603
            except OSError as error:
                print(f"error: holdfast cannot be started: {error.strerror}", flush=True)
                return 127, ""
            output.seek(0)
            return done.returncode, output.read().decode("utf-8", "replace")
    finally:
        print(f"\n::{token}::", flush=True)


def verdict(code: int, printed: str) -> tuple[dict[str, Any], str]:
    """The JSON object, {} where there is none, and what is wrong with the verdict in words ("" for nothing)."""
    try:
        found = json.loads(printed)
    except (ValueError, RecursionError):
        found = {}
    if not isinstance(found, dict):
        found = {}
    if code not in (CERTIFIED, NOT_CERTIFIED):
        return found, f"holdfast certify ended with exit code {code}; the log says why"
    if code == CERTIFIED and found.get("certified") is not True:
        return found, "holdfast certify ended with exit code 0, but printed no certified result"
    if code == NOT_CERTIFIED and found.get("certified") is True:
        return found, "holdfast certify ended with exit code 4, but printed a certified result"
    return found, ""


def finish(code: int, found: Mapping[str, Any], problem: str) -> int:
    """Write summary and outputs; returns the exit code of the gate."""
    certified = code == CERTIFIED and not problem
    sha256 = found.get("sha256")
    sha256 = sha256 if isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256) else ""
    path = Path(given("output") or ".") / "certificate.json"
    written = str(path) if sha256 and path.is_file() else ""
    append("GITHUB_STEP_SUMMARY", summary(found, certified, problem, sha256))
    outputs = {"certified": str(certified).lower(), "exit-code": str(code), "certificate": written, "sha256": sha256}
    append("GITHUB_OUTPUT", "".join(output_line(name, value) for name, value in outputs.items()))
    if problem:
        return code if code not in (CERTIFIED, NOT_CERTIFIED) else ERROR
    return code


def summary(found: Mapping[str, Any], certified: bool, problem: str, sha256: str) -> str:
    """The job summary: a table, without any text of a prompt."""
    behaviour = found.get("behaviour") if isinstance(found.get("behaviour"), Mapping) else {}
    openings = found.get("openings") if isinstance(found.get("openings"), Mapping) else {}
    word = "error" if problem else "certified" if certified else "not certified"
    rows = [
        ("verdict", f"**{word}**{': ' + escaped(problem) if problem else ''}"),
        ("before, after", f"{escaped(given('before'))}, {escaped(given('after'))}"),
        ("claim", escaped(found.get("statement"))),
        ("alpha, confidence", f"{number(found.get('alpha'))}, {number(found.get('confidence'))}"),
        ("N: prompts", number(behaviour.get("prompts", found.get("examples")))),
        ("M: groups counted", number(found.get("n"))),
        ("K: groups lost", number(found.get("regressions"))),
        ("unclear", number(behaviour.get("unclear"))),
        ("upper bound", number(found.get("upper_bound"))),
        ("opening", f"{number(openings.get('this'))} of {number(openings.get('declared'))}"),
        ("sha256", f"`{sha256}`" if sha256 else "-"),
    ]
    lines = ["## holdfast gate", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    return "\n".join(lines) + "\n"


def escaped(value: Any) -> str:
    """Foreign text for a cell of a table: every character but letters, digits and a few signs becomes an entity."""
    if not isinstance(value, str) or not value:
        return "-"
    text = "".join(character if character.isprintable() else " " for character in value[:LONGEST])
    return "".join(c if c.isalnum() or c in " ,%()" else f"&#{ord(c)};" for c in text)


def number(value: Any) -> str:
    """A number for a cell; - for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def output_line(name: str, value: str) -> str:
    """An output whose end no value can forge."""
    end = f"end_{secrets.token_hex(16)}"
    return f"{name}<<{end}\n{value}\n{end}\n"


def append(variable: str, text: str) -> None:
    """Add to a file of the runner; outside a runner there is none."""
    if place := os.environ.get(variable):
        with Path(place).open("a", encoding="utf-8") as handle:
            handle.write(text)


if __name__ == "__main__":
    sys.exit(main())
