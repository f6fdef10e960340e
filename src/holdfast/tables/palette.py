"""Colours and markers of figures: a defense looks the same in every figure, also to the colour-blind and in grey."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.tables.lines import Line

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
# Okabe and Ito's colours less yellow, which white paper swallows, then four of Tol's.
COLOURS = {
    "sft": "#d55e00",
    "vaccine": "#56b4e9",
    "booster": "#cc79a7",
    "lisa": "#009e73",
    "salora": "#882255",
    "safelora": "#e69f00",
    "safegrad": "#000000",
    "asft": "#999933",
    "holdfast": "#0072b2",
    "primal_dual": "#ee3377",
    "antibody": "#777777",
}
MARKERS = {
    "sft": "X",
    "vaccine": "^",
    "booster": "v",
    "lisa": "s",
    "salora": "P",
    "safelora": "D",
    "safegrad": "<",
    "asft": ">",
    "holdfast": "o",
    "primal_dual": "*",
    "antibody": "d",
}
# Six and seven have no common divisor, so that the pairs repeat late; every marker is a filled one.
SPARE_COLOURS = ("#332288", "#44aa99", "#aa4499", "#117733", "#6699cc", "#661100")
SPARE_MARKERS = ("H", "h", "p", "d", "8", "s", "o")


def looks(lines: Sequence[Line]) -> dict[Line, tuple[str, str]]:
    """(colour, marker) of every row: the defense's own for its first row, spare ones for its variants and others."""
    found: dict[Line, tuple[str, str]] = {}
    taken: set[str] = set()
    spare = 0
    for line in lines:
        if line.defense in COLOURS and line.defense not in taken:
            taken.add(line.defense)
            found[line] = (COLOURS[line.defense], MARKERS[line.defense])
        else:
            found[line] = (SPARE_COLOURS[spare % len(SPARE_COLOURS)], SPARE_MARKERS[spare % len(SPARE_MARKERS)])
            spare += 1
    return found
