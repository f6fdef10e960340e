"""The picture of a benchmark: bars of the median step, a panel for each shape; lines where a setting was varied."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import NAMES

from holdfast.core.errors import ConfigError
from holdfast_lab.bench.settings import ADAPTED, BASELINE, PATHS
from holdfast_lab.tables.canvas import INK, MUTED, SETTINGS, plotted

COLOURS = {
    "trl_sft": "#9aa5b1", "trl_best": "#52606d", "sft": "#d55e00", "two_pass": "#e69f00", "fused": "#56b4e9",
    "holdfast": "#0072b2", "run_file": "#009e73",
}  # fmt: skip
MARKERS = {
    "trl_sft": "s", "trl_best": "P", "sft": "X", "two_pass": "^", "fused": "D", "holdfast": "o", "run_file": "v",
}  # fmt: skip
LABELS = {
    "trl_sft": "TRL SFT", "trl_best": "TRL without padding", "sft": "our SFT", "two_pass": "two passes",
    "fused": "one pass", "holdfast": "holdfast", "run_file": "a run file's two sets",
}  # fmt: skip
WORDS = {
    "batch": "task rows a step",
    "length": "tokens a row",
    "rank": "LoRA rank",
    "safety_batch": "safety rows a step",
}
TASK_NAMES = {"sst2": "SST-2", "ag_news": "AG News", "gsm8k": "GSM8K"}
MODES = {True: "checkpointing", False: "no checkpointing"}
HEIGHT, ROOM = 3.8, 1.16

WIDEST = 3  # panels beside one another; more go two by two

Row = dict[str, Any]


@dataclass(frozen=True)
class _Panel:
    title: str
    swept: str
    rows: list[Row]


def draw(*results: dict[str, Any]) -> bytes | None:
    """PNG of the rows of one result, or of several alike side by side; None where nothing was measured."""
    require_alike(results)
    panels = [panel for result in results for panel in _panels(result)]
    if not panels:
        return None
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = [path for path in PATHS if any(row["path"] == path for panel in panels for row in panel.rows)]
    columns = len(panels) if len(panels) <= WIDEST else 2
    lines = -(-len(panels) // columns)
    with mpl.rc_context({**mpl.rcParamsDefault, **SETTINGS, "axes.grid.axis": "y"}):
        figure = Figure(figsize=(max(4.6 * columns, 6.4), HEIGHT * lines), layout="constrained")
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for ax, panel in zip(axes, panels, strict=False):
            (_lines if panel.swept else _bars)(ax, panel.rows, paths, panel.swept)
            ax.set_title(panel.title, loc="left", fontsize=10)
            ax.spines[["top", "right"]].set_visible(False)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        for first in axes[::columns]:
            first.set_ylabel("median step (ms)")
        figure.suptitle(_title(results), x=0.01, ha="left", fontsize=10)
        drawn = [pair for ax in figure.axes for pair in zip(*ax.get_legend_handles_labels(), strict=True)]
        handles = {label: handle for handle, label in reversed(drawn)}
        labels = [LABELS[path] for path in paths]
        shown = [handles[label] for label in labels]
        figure.legend(shown, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=150, metadata={"Software": None, "Description": plotted(figure)})
    return out.getvalue()


def _title(results: Sequence[dict[str, Any]]) -> str:
    """What was held fixed, and on what machine."""
    s, swept = results[0]["settings"], {result["settings"]["sweep"] for result in results}
    fixed = {
        "length": f"{TASK_NAMES[s['task']]} lengths", "batch": f"task batch {s['batch']}",
        "safety_batch": f"safety batch {s['safety_batch']}", "rank": f"LoRA r = {s['rank']}{_on(s)}",
    }  # fmt: skip
    several = len(swept) > 1  # each is fixed in the others' panels
    told = ", ".join(text for name, text in fixed.items() if several or name not in swept)
    machines = " / ".join(dict.fromkeys(result["provenance"]["hardware"] for result in results))
    return f"Training step: {told}{', unless varied' * several}\n{machines}; numbers: times the step of TRL's SFT"


def _on(settings: dict[str, Any]) -> str:
    modules = settings.get("target_modules", list(ADAPTED))
    return "" if modules == list(ADAPTED) else f" on {', '.join(modules)}"


def require_alike(results: Sequence[dict[str, Any]]) -> None:
    """Refuse results that one heading cannot speak for.

    Raises:
        ConfigError: they were measured with other data, sizes or units.
    """
    older = {"unit": "nll_token", "target_modules": list(ADAPTED)}
    for name in ("task", "batch", "safety_batch", "rank", "unit", "target_modules"):
        found = list(dict.fromkeys(str((older | result["settings"])[name]) for result in results))
        if len(found) > 1:
            raise ConfigError(
                f"results with another {name} cannot be drawn together: {' and '.join(found)}",
                remedy="draw them one by one",
            )


def _panels(result: dict[str, Any]) -> list[_Panel]:
    """Rows of each shape, in a sweep of each shape and checkpointing."""
    swept = result["settings"]["sweep"]
    found: dict[str, _Panel] = {}
    for row in result["rows"]:
        if "error" not in row:
            mode = f", {MODES[row['checkpointing']]}" if swept else ""
            title = NAMES[row["shape"]] + mode
            found.setdefault(title, _Panel(title, swept, [])).rows.append(row)
    return list(found.values())


def _bars(ax: Any, rows: Sequence[Row], paths: Sequence[str], _: str) -> None:
    """A group of bars with and without checkpointing; each bar says how many TRL steps it takes."""
    modes = [mode for mode in MODES if any(row["checkpointing"] is mode for row in rows)]
    width = 0.88 / len(paths)
    for k, path in enumerate(paths):
        own = {row["checkpointing"]: row for row in rows if row["path"] == path}
        shown = [(i, own[mode]) for i, mode in enumerate(modes) if mode in own]
        if not shown:
            continue
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
    """The median against the value; the last point of every path but TRL's says how many TRL steps it takes."""
    for path in paths:
        own = sorted((row for row in rows if row["path"] == path), key=lambda row: row["value"])
        if not own:
            continue
        values, medians = [row["value"] for row in own], [row["median_ms"] for row in own]
        ax.plot(values, medians, color=COLOURS[path], marker=MARKERS[path], markersize=5, label=LABELS[path])
        if path != BASELINE and own[-1]["x_trl_sft"] is not None:
            ax.annotate(
                f"{own[-1]['x_trl_sft']:.2f}", (values[-1], medians[-1]), (6, -3), textcoords="offset points",
                fontsize=7, color=INK,
            )  # fmt: skip
    ax.set_xlabel(WORDS[swept], color=MUTED)
    ax.set_xticks(sorted({row["value"] for row in rows}))
    ax.set_ylim(0, ROOM * max(row["median_ms"] for row in rows))
    ax.margins(x=0.1)
