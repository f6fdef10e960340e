"""Drawing panels on paper: one row of panels, one legend, SVG and PNG bytes that are equal for equal results."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.tables.lines import Line
from holdfast.tables.palette import GRID, INK, MUTED, looks

PANEL_WIDTH, PANEL_HEIGHT, LEGEND_ROW, LETTER = 3.5, 3.1, 0.24, 0.078
DASHES = (0, (5, 3))
# Without a salt and with dates the same figure would have other bytes every time.
SETTINGS = {
    "svg.hashsalt": "holdfast",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "text.parse_math": False,  # a dollar in a label is a dollar
}


@dataclass(frozen=True)
class Picture:
    """A figure in both forms; `name` is its file name without suffix."""

    name: str
    svg: bytes
    png: bytes


def draw(
    name: str,
    title: str,
    panels: Sequence[tuple[str, Any]],
    lines: Sequence[Line],
    panel: Callable[[Any, Any, dict[Line, tuple[str, str]]], None],
) -> Picture:
    """Draw one panel per (heading, points) with `panel(axes, points, looks)`, and one legend under them."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    styles = looks(lines)
    with mpl.rc_context({**mpl.rcParamsDefault, **SETTINGS}):
        width = max(PANEL_WIDTH * len(panels), 4.6)
        entry = 0.45 + LETTER * max(len("aligned model"), *(len(line.title) for line in lines))
        columns = max(1, min(len(lines) + 1, int(width / entry)))
        height = PANEL_HEIGHT + 0.45 + LEGEND_ROW * -(-(len(lines) + 1) // columns)
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, (heading, points) in zip(axes, panels, strict=True):
            panel(ax, points, styles)
            ax.set_title(heading, loc="left", fontsize=10)
            ax.spines[["top", "right"]].set_visible(False)
        for ax in axes[1:]:
            ax.set_ylabel("")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        _legend(figure, styles, columns, any(points.aligned is not None for _, points in panels))
        return Picture(name, _bytes(figure, "svg", {"Date": None}), _bytes(figure, "png", {"Software": None}))


def _legend(figure: Any, styles: dict[Line, tuple[str, str]], columns: int, aligned: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="none", label=_flat(line.title))
        for line, (colour, marker) in styles.items()
    ]
    if aligned:
        handles.append(Line2D([], [], color=MUTED, linestyle=DASHES, label="aligned model"))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, handletextpad=0.4)


def _flat(title: str) -> str:
    """A label on one line; matplotlib leaves labels that begin with an underscore out of the legend."""
    text = " ".join(title.split())
    return f" {text}" if text.startswith("_") else text


def _bytes(figure: Any, form: str, metadata: dict[str, None]) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=150, metadata=metadata)
    return out.getvalue()
