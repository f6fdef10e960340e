"""Results of `holdfast bench` as Markdown tables, and drawn into one picture.

python -m benchmarks.step_results out/batch.json out/rank.json --picture out/sweeps.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.step_results.picture import draw
from benchmarks.step_results.tables import markdown, read_record

from holdfast.cli.terminal import note, refuse, say
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.files import write_bytes


def show(files: Sequence[Path], picture: Path | None) -> None:
    """Print the tables of stored results; draw them where a picture is asked for."""
    records = [read_record(file) for file in files]
    say("\n\n".join(markdown(record) for record in records))
    if picture is None:
        return
    if picture.suffix.lower() != ".png":
        raise ConfigError(f"--picture {picture} is no .png file", remedy="for example --picture out/sweeps.png")
    drawn = draw(*records)
    if drawn is None:
        raise ConfigError("nothing was measured in these results", remedy="show results that have figures")
    write_bytes(picture, drawn)
    note(f"drawn into {picture}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_results", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="Draw the results into one picture.")
    given = parser.parse_args(arguments)
    try:
        show(given.files, given.picture)
    except HoldfastError as error:
        refuse(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
