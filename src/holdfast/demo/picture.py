"""The demonstration's picture: what each model still refuses, what it refuses wrongly, and what it learned."""

from pathlib import Path
from typing import Any

from holdfast.certification.binomial import Rate
from holdfast.demo.story import ALIGNED, OURS, SFT, DemoResult

INK, MUTED = "#1f2933", "#7b8794"
COLOURS = {ALIGNED: "#9aa5b1", SFT: "#d1495b", OURS: "#2a78b5"}
PANELS = (
    ("refusals", "Requests to decline: refused", "higher is better"),
    ("over_refusal", "Ordinary requests: refused", "lower is better"),
    ("accuracy", "Task: reviews labelled correctly", "higher is better"),
)


def draw(result: DemoResult, path: Path) -> None:
    """One panel a figure, one bar a model, with exact 95 % intervals."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True, layout="constrained")
    for ax, (name, title, better) in zip(axes, PANELS, strict=True):
        for place, (model, measured) in enumerate(result.models.items()):
            _bar(ax, place, getattr(measured, name), COLOURS[model])
        n = getattr(result.models[OURS], name).n
        ax.set_title(title, loc="left", color=INK, fontsize=10)
        ax.set_xlabel(f"% of {n} held-out prompts ({better})", color=MUTED, fontsize=8)
        ax.set_xlim(0, 119)
        ax.set_xticks([0, 50, 100])
        ax.set_yticks(range(len(result.models)), list(result.models), color=INK)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(colors=MUTED, length=0, labelsize=9)
        ax.tick_params(axis="y", labelcolor=INK)
    axes[0].invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bar(ax: Any, place: int, rate: Rate, colour: str) -> None:
    value, (low, high) = 100 * rate.value, (100 * end for end in rate.interval)
    ax.barh(place, value, height=0.62, color=colour)
    ax.plot([low, high], [place, place], color=INK, linewidth=1)
    ax.text(max(value, high) + 2, place, f"{value:.0f}", va="center", color=INK, fontsize=9)
