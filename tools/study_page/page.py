"""A Markdown page of which parts are generated: what stands between markers is replaced, all else is people's.

<!-- table: main of ../studies/main.yaml -->    a table, and which cells of that study are missing
<!-- paper: main -->                            how far it orders the rows as the paper does; needs its figures
<!-- figures: results -->                       every figure, drawn into that folder
<!-- replicated: ../results/first -->           the rows beside those of another study's results
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tools.markdown_width import fit

from holdfast.core.errors import ConfigError

END = "<!-- end -->"
KINDS = ("table", "paper", "figures", "replicated")
_OPEN = re.compile(r"^<!-- (\w+): (\S+?)(?: of (\S+))? -->$")


@dataclass(frozen=True)
class Marked:
    """A block: its kind, the name in its marker, the study file after `of`, and the line it begins on."""

    kind: str
    name: str
    study: str | None
    line: int


def regenerate(text: str, where: str, make: Callable[[Marked], str | None]) -> str:
    """The page with `make(block)` between the markers of each block; None leaves a block as it stands.

    Raises:
        ConfigError: a block without an end, an end without a block, an unknown kind, or no block at all.
    """
    out: list[str] = []
    inside: Marked | None = None
    kept: list[str] = []
    blocks = 0
    for number, line in enumerate(text.splitlines(), start=1):
        opened = _marker(line, where, number)
        if opened is not None:
            _require(inside is None, where, number, f"a block inside the block {inside.name!r}" if inside else "")
            inside, kept, blocks = opened, [], blocks + 1
            out.append(line)
        elif line.strip() == END:
            _require(inside is not None, where, number, "an end without a block")
            made = make(inside) if inside is not None else None
            out += kept if made is None else fit(made.rstrip("\n")).splitlines()
            out.append(line)
            inside = None
        else:
            (out if inside is None else kept).append(line)
    if inside is not None:
        _require(False, where, inside.line, f"the block {inside.name!r} has no end")
    _require(blocks > 0, where, 1, "no block")
    return "\n".join(out) + "\n"


def _marker(line: str, where: str, number: int) -> Marked | None:
    found = _OPEN.match(line.strip())
    if found is None:
        return None
    kind, name, study = found.groups()
    _require(kind in KINDS, where, number, f"a block of kind {kind!r}, expected {', '.join(KINDS)}")
    return Marked(kind, name, study, number)


def _require(right: bool, where: str, number: int, what: str) -> None:
    if not right:
        raise ConfigError(
            f"{where}:{number}: {what}", remedy=f"write blocks as `<!-- table: main -->`, then `{END}` on its own line"
        )
