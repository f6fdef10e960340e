"""Writes reports with made-up figures, for `make accessibility`: `python -m tests.unit.report.pages FOLDER`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.unit.report.synthetic import Words, certificate, write_plain_audit, write_run

from holdfast.reporting.page import write_report
from holdfast.reporting.read import read_evidence


def write_pages(folder: Path) -> list[Path]:
    """A certified run, and three folders side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        runs = [
            write_run(Path(place) / "a", certified=certificate(Words())), write_run(Path(place) / "b", worse=0.2),
            write_plain_audit(Path(place) / "c"),
        ]  # fmt: skip
        pages = {folder / "run.html": runs[:1], folder / "several.html": runs}
        for page, shown in pages.items():
            write_report([read_evidence(run) for run in shown], page)
    return list(pages)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
