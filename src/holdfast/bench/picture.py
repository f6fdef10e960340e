"""The picture of a benchmark: bars of the median step, a panel for each shape; lines where a setting was varied."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from holdfast.bench.settings import PATHS
from holdfast.bench.shapes import NAMES
from holdfast.tables.canvas import SETTINGS
from holdfast.tables.palette import INK, MUTED

COLOURS = {"trl_sft": "#9aa5b1", "sft": "#d55e00", "two_pass": "#e69f00", "fused": "#56b4e9", "holdfast": "#0072b2"}
MARKERS = {"trl_sft": "s", "sft": "X", "two_pass": "^", "fused": "D", "holdfast": "o"}
LABELS = {"trl_sft": "TRL SFT", "sft": "our SFT", "two_pass": "two passes", "fused": "one pass", "holdfast": "holdfast"}
WORDS = {
    "batch": "task rows a step",
    "length": "tokens a row",
    "rank": "LoRA rank",
    "safety_batch": "safety rows a step",
}
TASK_NAMES = {"sst2": "SST-2", "ag_news": "AG News", "gsm8k": "GSM8K"}
MODES = {True: "checkpointing", False: "no checkpointing"}
HEIGHT, ROOM = 3.8, 1.16

Row = dict[str, Any]


def draw(result: dict[str, Any]) -> bytes | None:
    """PNG of a result's rows; None where nothing was measured."""
    measured = [row for row in result["rows"] if "error" not in row]
    if not measured:
        return None
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = [path for path in PATHS if any(row["path"] == path for row in measured)]
    swept = result["settings"]["sweep"]
    panels = _panels(measured, by_mode=bool(swept))
    with mpl.rc_context({**mpl.rcParamsDefault, **SETTINGS, "axes.grid.axis": "y"}):
        figure = Figure(figsize=(max(4.6 * len(panels), 6.4), HEIGHT), layout="constrained")
        FigureCanvasAgg(figure)
        for ax, (title, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            (_lines if swept else _bars)(ax, rows, paths, swept)
            ax.set_title(title, loc="left", fontsize=10)
            ax.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("median step (ms)")
        figure.suptitle(_title(result), x=0.01, ha="left", fontsize=10)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def _title(result: dict[str, Any]) -> str:
    """What was held fixed, and on what machine."""
    s = result["settings"]
    fixed = {
        "length": f"{TASK_NAMES[s['task']]} lengths", "batch": f"task batch {s['batch']}",
        "safety_batch": f"safety batch {s['safety_batch']}", "rank": f"LoRA r = {s['rank']}",
    }  # fmt: skip
    told = ", ".join(text for name, text in fixed.items() if name != s["sweep"])
    return f"Training step: {told}\n{result['provenance']['hardware']}; numbers: times the step of TRL's SFT"


def _panels(rows: Sequence[Row], *, by_mode: bool) -> list[tuple[str, list[Row]]]:
    """Rows of each shape, in a sweep of each shape and checkpointing."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        mode = f", {MODES[row['checkpointing']]}" if by_mode else ""
        found.setdefault(NAMES[row["shape"]] + mode, []).append(row)
    return list(found.items())


def _bars(ax: Any, rows: Sequence[Row], paths: Sequence[str], _: str) -> None:
    """A group of bars with and without checkpointing; each bar says how many TRL steps it takes."""
    modes = [mode for mode in MODES if any(row["checkpointing"] is mode for row in rows)]
    width = 0.88 / len(paths)
    for k, path in enumerate(paths):
        own = {row["checkpointing"]: row for row in rows if row["path"] == path}
        shown = [(i, own[mode]) for i, mode in enumerate(modes) if mode in own]
        at = [i + (k - (len(paths) - 1) / 2) * width for i, _row in shown]
        bars = ax.bar(
            at, [row["median_ms"] for _i, row in shown], 0.92 * width, color=COLOURS[path], label=LABELS[path]
        )
        ratios = [row["x_trl_sft"] for _i, row in shown]
        ax.bar_label(bars, ["" if x is None else f"{x:.2f}" for x in ratios], fontsize=7, color=INK, padding=2)
    ax.set_xticks(range(len(modes)), [MODES[mode] for mode in modes])
    ax.tick_params(axis="x", length=0, labelcolor=INK)
    ax.set_ylim(0, ROOM * max(row["median_ms"] for row in rows))


def _lines(ax: Any, rows: Sequence[Row], paths: Sequence[str], swept: str) -> None:
    """The median against the value; the last point says how many TRL steps it takes."""
    for path in paths:
        own = sorted((row for row in rows if row["path"] == path), key=lambda row: row["value"])
        if not own:
            continue
        values, medians = [row["value"] for row in own], [row["median_ms"] for row in own]
        ax.plot(values, medians, color=COLOURS[path], marker=MARKERS[path], markersize=5, label=LABELS[path])
        if own[-1]["x_trl_sft"] is not None:
            ax.annotate(
                f"{own[-1]['x_trl_sft']:.2f}", (values[-1], medians[-1]), (6, -3), textcoords="offset points",
                fontsize=7, color=INK,
            )  # fmt: skip
    ax.set_xlabel(WORDS[swept], color=MUTED)
    ax.set_xticks(sorted({row["value"] for row in rows}))
    ax.set_ylim(0, ROOM * max(row["median_ms"] for row in rows))
    ax.margins(x=0.1)
