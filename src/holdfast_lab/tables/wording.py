"""What models, tasks, defenses and metrics are called in tables, in which order, and which way is better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher"]

MODELS = ("Qwen-3.5-4B", "Qwen-3.5-9B", "Llama-3.1-8B")
TASKS = {"sst2": "SST-2", "ag_news": "AG News", "gsm8k": "GSM8K"}
# The paper's rows in the paper's order; what it does not have comes after them by name.
DEFENSES = {
    "base": "Base", "aligned": "Aligned", "sft": "SFT", "vaccine": "Vaccine", "booster": "Booster", "lisa": "Lisa",
    "salora": "SaLoRA", "safelora": "SafeLoRA", "safegrad": "SafeGrad", "asft": "AsFT",
    "holdfast": "holdfast (ours)", "primal_dual": "Primal-Dual", "antibody": "Antibody",
}  # fmt: skip
# Compared in tables of their own, as in the paper.
ELSEWHERE = ("primal_dual", "antibody")
QUANTILES = (10, 25, 50, 75, 90, 95, 99, 100)
LONGEST = 50  # letters of a name in a file name, of which file systems take 255


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: title, direction (None: neither way is better), decimals."""

    title: str
    better: Better | None
    decimals: int = 3


METRICS = {
    "HS": Metric("HS", "lower"),
    "HS_0.5": Metric("HS (0.5)", "lower"),
    "HS_plus": Metric("HS+", "lower"),
    "HS_qK": Metric("HS_qK", "lower"),
    **{f"HS_q{k}": Metric(f"HS_q{k}", "lower") for k in QUANTILES},
    "refusal_rate": Metric("refusals", "higher"),
    "over_refusal": Metric("over-refusals", "lower"),
    "FA": Metric("FA", "higher"),
    "FA_strict": Metric("FA strict", "higher"),
    "FA_lenient": Metric("FA lenient", "higher"),
    "task_loss": Metric("task loss", "lower"),
    "violation_rate": Metric("violations", "lower"),
    "unscored": Metric("unscored", None),
    "step_ms": Metric("step (ms)", "lower", 1),
    "p90_ms": Metric("p90 (ms)", "lower", 1),
    "gpu_mb": Metric("GPU (MB)", "lower", 0),
    "samples_per_s": Metric("samples/s", "higher", 2),
    "x_sft": Metric("× SFT", "lower", 2),
}


def metric(name: str) -> Metric:
    """How `name` is shown; a metric without an entry has three decimals and no direction."""
    return METRICS.get(name, Metric(name, None))


def quantile(model: str) -> int:
    """K of HS_qK: 50 for Llama, whose higher quantiles saturate near 1, and 90 for every other model."""
    return 50 if "llama" in model.lower() else 90


def task_title(task: str) -> str:
    """The task's name in a heading."""
    return TASKS.get(task, task)


def defense_title(defense: str) -> str:
    """The defense's name in a row."""
    return DEFENSES.get(defense, defense)


def ordered_models(names: Iterable[str]) -> list[str]:
    """The paper's models first, then the others by name, in which numbers compare as numbers: 4B before 14B."""

    def natural(name: str) -> list[tuple[int, str]]:
        parts = re.split(r"([0-9]{1,18})", name)  # `isdigit` knows signs, such as a raised 2, that `int` does not
        return [(int(part), "") if place % 2 else (0, part.lower()) for place, part in enumerate(parts)]

    return sorted(set(names), key=lambda name: (_place(name, MODELS), natural(name)))


def ordered_tasks(names: Iterable[str]) -> list[str]:
    """The paper's tasks first, then the others by name."""
    return sorted(set(names), key=lambda name: (_place(name, tuple(TASKS)), name))


def defense_place(defense: str) -> int:
    """Where a defense stands among the paper's rows; the end for others."""
    return _place(defense, tuple(DEFENSES))


def _place(name: str, known: tuple[str, ...]) -> int:
    return known.index(name) if name in known else len(known)


def slug(*parts: str) -> str:
    """A file name from names: letters, digits, dot, hyphen and underscore stay, of long names the beginning."""
    plain = (re.sub(r"[^\w.-]+", "-", part, flags=re.ASCII).strip("-.").lower() for part in parts)
    return "-".join(part[:LONGEST] or "x" for part in plain)


def with_own_names(names: Sequence[str]) -> list[str]:
    """File names of which none comes twice: two models may differ only in signs that no slug keeps."""
    taken: list[str] = []
    for name in names:
        own, number = name, 1
        while own in taken:
            number += 1
            own = f"{name}-{number}"
        taken.append(own)
    return taken
