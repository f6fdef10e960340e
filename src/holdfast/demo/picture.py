"""The demonstration's picture: where the safety examples went, under plain SFT and under holdfast."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.demo.story import DemoResult

INK, MUTED, SFT, OURS = "#1f2933", "#7b8794", "#d1495b", "#2a78b5"


def draw(result: DemoResult, path: Path) -> None:
    """Two histograms of degradation on a shared axis, tau drawn, constraint and held-out prompts side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tau = result.settings.tau
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    shown = [(name, result.models[name], colour) for name, colour in (("plain SFT", SFT), ("holdfast", OURS))]
    everything = np.concatenate([d.numpy() for _, m, _ in shown for d in m.degradations.values()])
    bins = np.linspace(min(everything.min(), -tau), max(everything.max(), 2 * tau) + 1e-9, 61)
    for ax, role in zip(axes, ("constraint", "held out"), strict=True):
        for name, measured, colour in shown:
            rate = measured.violations(role, tau)
            values = measured.degradations[role].numpy()
            ax.hist(values, bins, weights=np.full(len(values), 100 / len(values)), color=colour, alpha=0.85,
                    label=f"{name}: {rate.value:.1%} beyond tau")  # fmt: skip
        ax.axvline(tau, color=INK, linewidth=1.2)
        ax.annotate(f"tau = {tau:g}", (tau, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -12),
                    textcoords="offset points", color=INK, fontsize=9)  # fmt: skip
        ax.set_title(f"{role} prompts (n = {len(measured.degradations[role])})", loc="left", color=INK, fontsize=11)
        ax.set_xlabel(f"degradation against the aligned model ({result.unit}, nats)", color=INK)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(colors=MUTED)
        ax.legend(frameon=False, fontsize=9, loc="upper right")
    axes[0].set_ylabel("share of safety examples (%)", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
