"""Rewrite the generated blocks of Markdown pages, and their figures, from the results of a study.

python -m tools.study_page STUDY --page PAGE.md [--reported CSV --reported-model NAME]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.study_page.blocks import BlockMaker
from tools.study_page.page import regenerate

from holdfast.cli.terminal import note, refuse, say
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.files import write_bytes
from holdfast_lab.tables.reported import Reported, find_reported
from holdfast_lab.tables.results import Result, read_results


def write_pages(pages: Sequence[Path], results: Sequence[Result], reported: Reported | None) -> None:
    """Replace the generated blocks of every page; everything is made before the first byte is written."""
    content: dict[Path, bytes] = {}
    left: list[str] = []
    for page in pages:
        if not page.is_file():
            raise ConfigError(
                f"--page {page} is not a file",
                remedy="write the page first, with `<!-- table: main -->` and `<!-- end -->`",
            )
        maker = BlockMaker(page, results, reported)
        content[page] = regenerate(page.read_text(encoding="utf-8"), str(page), maker).encode()
        content |= maker.pictures
        left += maker.left
    for path, data in content.items():
        write_bytes(path, data)
        say(str(path))
    if left:
        note(f"note: left as they are without the paper's figures: {', '.join(left)}; give --reported")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.study_page", description=__doc__)
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY", help="Output folders of studies.")
    parser.add_argument("--page", action="append", type=Path, required=True, metavar="PAGE.md", help="Repeatable.")
    parser.add_argument("--reported", type=Path, metavar="CSV", help="The paper's figures; HOLDFAST_REPORTED else.")
    parser.add_argument("--reported-model", metavar="NAME", help="The paper's model for one that it does not have.")
    given = parser.parse_args(arguments)
    try:
        reported = find_reported(given.reported, given.reported_model)
        write_pages(given.page, read_results(*given.studies), reported)
    except HoldfastError as error:
        refuse(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
