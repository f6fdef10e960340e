"""Drawing panels on paper: a row of panels, their close-ups, one legend; equal results give equal SVG and PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.tables.lines import Line
from holdfast.tables.palette import GRID, INK, MUTED

PANEL_WIDTH, PANEL_HEIGHT, LEGEND_ROW, LETTER = 3.5, 3.1, 0.24, 0.078
DASHES = (0, (5, 3))
Looks = dict[Line, tuple[str, str]]
Window = tuple[tuple[float, float], tuple[float, float]]
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
    styles: Looks,
    panel: Callable[[Any, Any, Looks], None],
    close: Callable[[Any, Looks], Window | None] | None = None,
) -> Picture:
    """Draw one panel per (heading, points) with `panel(axes, points, looks)`, and one legend under them.

    `close(points, looks)` gives the limits (x, y) in which a panel is drawn again, larger; None: not crowded.
    Panels of one row share their y axis.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    windows = [close(points, styles) if close is not None else None for _, points in panels]
    down, across = _layout(len(panels), any(window is not None for window in windows))
    with mpl.rc_context({**mpl.rcParamsDefault, **SETTINGS}):
        width = max(PANEL_WIDTH * across, 4.6)
        entry = 0.45 + LETTER * max(len("aligned model"), *(len(line.title) for line in styles))
        columns = max(1, min(len(styles) + 1, int(width / entry)))
        height = PANEL_HEIGHT * down + 0.45 + LEGEND_ROW * -(-(len(styles) + 1) // columns)
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(down, across, squeeze=False, sharey="row" if len(panels) > 1 else False).flatten()
        for place, (ax, (heading, points)) in enumerate(zip(axes, panels, strict=False)):
            panel(ax, points, styles)
            _finish(ax, heading, inner=place > 0)
        limits = [window[1] for window in windows if window is not None]
        for place, (ax, window, (heading, points)) in enumerate(
            zip(axes[len(panels) :], windows, panels, strict=False)
        ):
            if window is None:
                ax.remove()
                continue
            panel(ax, points, styles)
            ax.set(xlim=window[0], ylim=(min(low for low, _ in limits), max(high for _, high in limits)))
            _finish(ax, f"{heading}, close-up", inner=place > 0)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        _legend(figure, styles, columns, any(points.aligned is not None for _, points in panels))
        return Picture(name, _bytes(figure, "svg", {"Date": None}), _bytes(figure, "png", {"Software": None}))


def _layout(panels: int, close: bool) -> tuple[int, int]:
    """Rows and columns: close-ups stand under their panels, or beside the only one."""
    if panels == 1:
        return 1, 2 if close else 1
    return (2 if close else 1), panels


def _finish(ax: Any, heading: str, inner: bool) -> None:
    ax.set_title(heading, loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    if inner:
        ax.set_ylabel("")


def _legend(figure: Any, styles: Looks, columns: int, aligned: bool) -> None:
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
