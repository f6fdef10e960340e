"""Run `tests/attacks` against the sources of another commit: `python tools/attacks_on.py 5ed8a18 [pytest arguments]`.

The commit's `src` is put before the installed package; the tests are those of this checkout. Every attack that the
first release accepted must fail there with an AssertionError (the forgery was accepted, or the fault happened), so a
failure of another type is listed apart: it shows nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent


def main(commit: str, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(source), commit], cwd=ROOT, check=True)
        try:
            report = Path(folder) / "report.xml"
            environment = os.environ | {"PYTHONPATH": str(source / "src")}
            chosen = [word for word in arguments if not word.startswith("-")] or ["tests/attacks"]
            flags = [word for word in arguments if word.startswith("-")]
            run = [sys.executable, "-m", "pytest", "-q", "--tb=no", f"--junitxml={report}", *flags, *chosen]
            subprocess.run(run, cwd=ROOT, env=environment, check=False)
            return show(report)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(source)], cwd=ROOT, check=True)


def show(report: Path) -> int:
    """Print one line a test; the exit code is the number of tests that did not fail by accepting the attack."""
    unproven = 0
    for case in ElementTree.parse(report).iter("testcase"):
        failure, error = case.find("failure"), case.find("error")
        message = "" if failure is None else failure.get("message", "")
        accepted = failure is not None and message.startswith(("AssertionError", "assert ", "Failed: DID NOT RAISE"))
        verdict = "accepted there" if accepted else "PASSES there" if failure is None and error is None else "OTHER"
        unproven += not accepted
        where = case.get("classname", "").removeprefix("tests.attacks.")
        print(f"{verdict:<14} {where}::{case.get('name')}  {'' if accepted else message[:120]}")
    return unproven


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1], sys.argv[2:]), 100))
