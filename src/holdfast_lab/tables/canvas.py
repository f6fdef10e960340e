"""Drawing: colours and markers, panels with their close-ups, one legend; equal results give equal bytes.

A defense looks the same in every figure, also to the colour-blind and in grey.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from holdfast_lab.tables.lines import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
# Okabe and Ito's colours less yellow, which white paper swallows, then four of Tol's.
OWN_LOOKS = {
    "sft": ("#d55e00", "X"), "vaccine": ("#56b4e9", "^"), "booster": ("#cc79a7", "v"), "lisa": ("#009e73", "s"),
    "salora": ("#882255", "P"), "safelora": ("#e69f00", "D"), "safegrad": ("#000000", "<"), "asft": ("#999933", ">"),
    "holdfast": ("#0072b2", "o"), "primal_dual": ("#ee3377", "*"), "antibody": ("#777777", "d"),
}  # fmt: skip
# Six and seven have no common divisor, so that the pairs repeat late; every marker is a filled one.
SPARE_COLOURS = ("#332288", "#44aa99", "#aa4499", "#117733", "#6699cc", "#661100")
SPARE_MARKERS = ("H", "h", "p", "d", "8", "s", "o")
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_ROW, LETTER = 3.5, 3.1, 0.24, 0.078
DASHES = (0, (5, 3))
Looks = dict[Line, tuple[str, str]]
Window = tuple[tuple[float, float], tuple[float, float]]
# Without a salt and with dates the same figure would have other bytes every time.
SETTINGS = {
    "svg.hashsalt": "holdfast", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": MUTED,
    "ytick.color": MUTED, "text.color": INK, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
    "text.parse_math": False,  # a dollar in a label is a dollar
}  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A figure in both forms; `name` is its file name without suffix."""

    name: str
    svg: bytes
    png: bytes


def looks(lines: Sequence[Line]) -> Looks:
    """(colour, marker) of every row: the defense's own for its first row, spare ones for its variants and others."""
    own, spare = dict(OWN_LOOKS), zip(cycle(SPARE_COLOURS), cycle(SPARE_MARKERS))
    return {line: own.pop(line.defense) if line.defense in own else next(spare) for line in lines}


def draw(
    name: str, title: str, panels: Sequence[tuple[str, Any]], styles: Looks, panel: Callable[[Any, Any, Looks], None],
    close: Callable[[Any, Looks], Window | None] | None = None,
) -> Picture:  # fmt: skip
    """Draw one panel per (heading, points) with `panel(axes, points, looks)`, and one legend under them.

    `close(points, looks)` gives the limits (x, y) in which a panel is drawn again, larger; None: not crowded.
    Panels of one row share their y axis.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    windows = [close(points, styles) if close is not None else None for _, points in panels]
    limits = [window[1] for window in windows if window is not None]
    # Close-ups stand under their panels, or beside the only one.
    down, across = (1, 2 if limits else 1) if len(panels) == 1 else (2 if limits else 1, len(panels))
    with mpl.rc_context({**mpl.rcParamsDefault, **SETTINGS}):
        width = max(PANEL_WIDTH * across, 4.6)
        entry = 0.45 + LETTER * max(len("aligned model"), *(len(line.title) for line in styles))
        columns = max(1, min(len(styles) + 1, int(width / entry)))
        height = PANEL_HEIGHT * down + 0.45 + LEGEND_ROW * -(-(len(styles) + 1) // columns)
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(down, across, squeeze=False, sharey="row" if len(panels) > 1 else False).flatten()
        drawn = [(heading, points, None) for heading, points in panels]
        closer = [
            (f"{heading}, close-up", points, window) for (heading, points), window in zip(panels, windows, strict=True)
        ]
        for place, (ax, (heading, points, window)) in enumerate(zip(axes, [*drawn, *closer], strict=False)):
            if place >= len(panels) and window is None:
                ax.remove()
                continue
            panel(ax, points, styles)
            if window is not None:
                ax.set(xlim=window[0], ylim=(min(low for low, _ in limits), max(high for _, high in limits)))
            _finish(ax, heading, inner=place % len(panels) > 0)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        _legend(figure, styles, columns, any(points.aligned is not None for _, points in panels))
        png = {"Software": None, "Description": plotted(figure)}
        return Picture(name, _bytes(figure, "svg", {"Date": None}), _bytes(figure, "png", png))


def plotted(figure: Any) -> str:
    """The data of a figure as JSON: points of lines and heights of bars, by panel; a picture carries it with it."""
    panels = []
    for ax in figure.axes:
        lines = [[[round(float(v), 6) for v in point] for point in line.get_xydata()] for line in ax.lines]
        bars = [round(float(patch.get_height()), 6) for patch in ax.patches]
        panels.append({"title": ax.get_title(loc="left"), "lines": lines, "bars": bars})
    return json.dumps(panels)


def _finish(ax: Axes, heading: str, inner: bool) -> None:
    ax.set_title(heading, loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    if inner:
        ax.set_ylabel("")


def _legend(figure: Figure, styles: Looks, columns: int, aligned: bool) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for line, (colour, marker) in styles.items():
        label = " ".join(line.title.split())
        label = f" {label}" if label.startswith("_") else label  # matplotlib would leave it out of the legend
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="none", label=label))
    if aligned:
        handles.append(Line2D([], [], color=MUTED, linestyle=DASHES, label="aligned model"))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, handletextpad=0.4)


def _bytes(figure: Figure, form: str, metadata: dict[str, str | None]) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=150, metadata=metadata)
    return out.getvalue()
