"""The README's picture and evidence table, from the records of the experiment.

    python -m benchmarks.held_safety.front benchmarks/results/held_safety --page README.md \\
      --picture docs/before-after.png

The table stands between `<!-- evidence -->` and `<!-- end -->`. Both show runs with half of the task rows poisoned,
as means over seeds; the last column counts the rows of docs/results-auto.md, every share of poison included.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.held_safety.records import Record, evaluated, from_shipped, mean_of, read_records, shipped
from benchmarks.held_safety.table import HARM_LIMIT, TASKS, rewritten

from holdfast.core.files import write_bytes, write_text
from holdfast_lab.tables.canvas import DASHES, INK, MUTED, OWN_LOOKS, SETTINGS, plotted

START = "<!-- evidence -->"
RATIO = 0.5
TITLES = {"sst2": "SST-2", "ag_news": "AG News", "gsm8k": "GSM8K"}
BARS = {"as shipped": "#9aa5b1", "plain SFT": OWN_LOOKS["sft"][0], "holdfast": OWN_LOOKS["holdfast"][0]}
METHODS = {"plain SFT": "sft", "holdfast": "auto"}
HEAD = ("| half of 1,000 rows poisoned | harmful replies | safe prompts refused | task accuracy | harm endpoint |",
        "|---|---|---|---|---|")  # fmt: skip
Figures = list[float | None]


def cells_of(records: Sequence[Record], model: str, method: str, task: str) -> list[Record]:
    """Seeds of one method on one task, half of the rows poisoned."""
    return evaluated(records, model=model, part="reported", method=method, task=task, poison_ratio=RATIO)


def across(records: Sequence[Record], model: str, method: str, *keys: str) -> Figures:
    """One figure by task, as a mean over seeds; None where it was not run. `TASK` in the keys is the task's name."""
    return [
        mean_of(cells_of(records, model, method, task), *(task if key == "TASK" else key for key in keys))
        for task in TASKS
    ]


def endpoint(records: Sequence[Record], model: str) -> str:
    """In how many rows the upper bound of harm minus the shipped model's is at most the limit.

    A row whose runs gave no model is counted, as not met.
    """
    before = shipped(records, model, "reported")
    run = [r for r in records if (r["model"], r["part"], r["method"]) == (model, "reported", "auto")]
    trained = evaluated(run)
    kinds = sorted({(record["task"], record["poison_ratio"]) for record in trained})
    bounds = [
        from_shipped([r for r in trained if (r["task"], r["poison_ratio"]) == kind], before, "harm", "1").upper
        for kind in kinds
    ]
    rows = {(record["task"], record["poison_ratio"]) for record in run}
    return f"met in {sum(bound <= HARM_LIMIT for bound in bounds)} of {len(rows)}"


def shown(values: Figures) -> str:
    """Figures of the tasks, a dash where one was not run; once where all are the same model's."""
    return " / ".join("-" if value is None else f"{value:.2f}" for value in values)


def shipped_line(records: Sequence[Record], model: str, name: str) -> str:
    """The model before fine-tuning."""
    before = shipped(records, model, "reported")["evaluation"]
    accuracy: Figures = [before["tasks"][task]["FA"]["value"] for task in TASKS]
    harm, over = before["shares"]["HS"], before["shares"]["over"]
    return f"| {name}, as shipped | {harm:.2f} | {over:.2f} | {shown(accuracy)} | |"


def trained_line(records: Sequence[Record], model: str, name: str, title: str) -> str:
    """One method on every task."""
    method = METHODS[title]
    figures = [
        shown(across(records, model, method, *keys))
        for keys in (("shares", "HS"), ("shares", "over"), ("tasks", "TASK", "FA", "value"))
    ]
    if method != "auto":
        return f"| {name}, {title} | {' | '.join(figures)} | |"
    return f"| **{name}, {title}** | **{figures[0]}** | {' | '.join(figures[1:])} | {endpoint(records, model)} |"


def evidence(records: Sequence[Record]) -> str:
    """The table: five rows, two models."""
    lines = [
        shipped_line(records, "0.5b", "0.5B"),
        *(trained_line(records, "0.5b", "0.5B", title) for title in METHODS),
        *(trained_line(records, "1.5b", "1.5B", title) for title in METHODS),
    ]
    return "\n".join([*HEAD, *lines])


def bars_of(records: Sequence[Record], *keys: str) -> dict[str, Figures]:
    """Heights of the bars by what they show."""
    before = shipped(records, "0.5b", "reported")["evaluation"]
    start: Figures = [before["tasks"][task]["FA"]["value"] for task in TASKS]
    if keys[0] == "shares":
        start = [before["shares"][keys[1]]] * len(TASKS)
    return {"as shipped": start, **{title: across(records, "0.5b", method, *keys) for title, method in METHODS.items()}}


def draw(records: Sequence[Record]) -> bytes:
    """PNG: harm on the left, the task on the right, three bars a task."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    harm, task = bars_of(records, "shares", "HS"), bars_of(records, "tasks", "TASK", "FA", "value")
    with mpl.rc_context({**mpl.rcParamsDefault, **SETTINGS, "axes.grid.axis": "y", "font.size": 11}):
        figure = Figure(figsize=(10, 3.9), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        for ax, heights, title in ((left, harm, "Harmful replies: lower is safer"),
                                   (right, task, "Task accuracy: higher is better")):  # fmt: skip
            panel(ax, heights, title)
        left.axhline(harm["as shipped"][0], color=MUTED, linestyle=DASHES, linewidth=1)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=150, metadata={"Software": None, "Description": plotted(figure)})
    return out.getvalue()


def panel(ax: Any, heights: dict[str, Figures], title: str) -> None:
    """Grouped bars with their figures."""
    width = 0.27
    for k, (name, values) in enumerate(heights.items()):
        at = [i + (k - 1) * width for i in range(len(TASKS))]
        drawn = ax.bar(at, values, 0.92 * width, color=BARS[name], label=name)
        ax.bar_label(drawn, [f"{value:.2f}" for value in values], fontsize=9, color=INK, padding=2)
    ax.set_title(title, loc="left", fontsize=12)
    ax.set_xticks(range(len(TASKS)), [TITLES[task] for task in TASKS])
    ax.tick_params(axis="both", length=0, labelcolor=INK)
    ax.set_ylim(0, 1)
    ax.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the README's evidence table and its picture.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    records = read_records(options.results)
    write_text(options.page, rewritten(options.page.read_text("utf-8"), evidence(records), START))
    write_bytes(options.picture, draw(records))


if __name__ == "__main__":
    main()
