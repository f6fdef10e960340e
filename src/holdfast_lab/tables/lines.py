"""Which results make one row of a table; what rows, models, tasks and metrics are called, in which order they come."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Literal, Self

from holdfast_lab.tables.results import REFERENCES, Result

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
PAPER_RATIO = 0.5
ACCURACY, LOSS = "FA", "task_loss"
LOW = 0.25  # a model that is right more often than this is not at floor: it knew the task before


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: title, direction (None: neither way is better), decimals."""

    title: str
    better: Better | None
    decimals: int = 3


METRICS = {
    "HS": Metric("HS", "lower"), "HS_0.5": Metric("HS (0.5)", "lower"), "HS_plus": Metric("HS+", "lower"),
    **{f"HS_q{k}": Metric(f"HS_q{k}", "lower") for k in ("K", *QUANTILES)},
    "refusal_rate": Metric("refusals", "higher"), "over_refusal": Metric("over-refusals", "lower"),
    "FA": Metric("FA", "higher"), "FA_strict": Metric("FA strict", "higher"),
    "FA_lenient": Metric("FA lenient", "higher"), "task_loss": Metric("task loss", "lower"),
    "violation_rate": Metric("violations", "lower"), "unscored": Metric("unscored", None),
    "step_ms": Metric("step (ms)", "lower", 1), "p90_ms": Metric("p90 (ms)", "lower", 1),
    "gpu_mb": Metric("GPU (MB)", "lower", 0), "samples_per_s": Metric("samples/s", "higher", 2),
    "x_sft": Metric("× SFT", "lower", 2),
}  # fmt: skip


def metric(name: str) -> Metric:
    """How `name` is shown; a metric without an entry has three decimals and no direction."""
    return METRICS.get(name, Metric(name, None))


def quantile(model: str) -> int:
    """K of HS_qK: 50 for Llama, whose higher quantiles saturate near 1, and 90 for every other model."""
    return 50 if "llama" in model.lower() else 90


def task_title(task: str) -> str:
    return TASKS.get(task, task)


def defense_title(defense: str) -> str:
    return DEFENSES.get(defense, defense)


def ordered_models(names: Iterable[str]) -> list[str]:
    """The paper's models first, then the others by name, in which numbers compare as numbers: 4B before 14B."""

    def natural(name: str) -> list[tuple[int, str]]:
        parts = re.split(r"([0-9]{1,18})", name)  # `isdigit` knows signs, such as a raised 2, that `int` does not
        return [(int(part), "") if place % 2 else (0, part.lower()) for place, part in enumerate(parts)]

    return sorted(set(names), key=lambda name: (_place(name, MODELS), natural(name)))


def ordered_tasks(names: Iterable[str]) -> list[str]:
    """The paper's tasks first, then the others by name."""
    return sorted(set(names), key=lambda name: (_place(name, TASKS), name))


def _place(name: str, known: Iterable[str]) -> int:
    """Where a name stands among those of the paper; the end for others."""
    names = tuple(known)
    return names.index(name) if name in names else len(names)


def slug(*parts: str) -> str:
    """A file name from names: letters, digits, dot, hyphen and underscore stay, of long names the beginning."""
    plain = (re.sub(r"[^\w.-]+", "-", part, flags=re.ASCII).strip("-.").lower() for part in parts)
    return "-".join(part[:LONGEST] or "x" for part in plain)


def with_own_names(names: Sequence[str]) -> list[str]:
    """File names of which none comes twice: two models may differ only in signs that no slug keeps."""
    taken: list[str] = []
    for name in names:
        candidates = chain([name], (f"{name}-{number}" for number in count(2)))
        taken.append(next(own for own in candidates if own not in taken))
    return taken


@dataclass(frozen=True)
class Line:
    """A row to be: the results with this defense, label, setting and alignment.

    `shown` replaces its title, and `stated` the setting that formats print: a default in a sweep.
    """

    defense: str
    label: str
    setting: str
    align: str
    shown: str = ""
    stated: str = ""

    @classmethod
    def of(cls, result: Result) -> Self:
        return cls(result.defense, result.label, result.setting, result.align)

    @property
    def title(self) -> str:
        """The study's own label or the defense's name, then its setting and an alignment that is not its own."""
        if self.shown:
            return self.shown
        if self.defense == self.label == "aligned":
            return f"Aligned ({defense_title(self.align)})"
        title = self.label if self.label != self.defense else defense_title(self.defense)
        setting = f", {self.setting}" if self.setting else ""
        foreign = not self.is_reference and self.align not in ("sft", self.defense)
        return title + setting + (f" on {defense_title(self.align)}-aligned" if foreign else "")

    @property
    def is_reference(self) -> bool:
        return self.defense in REFERENCES

    @property
    def is_plain(self) -> bool:
        """Whether this row belongs in the tables of defenses: default settings, on its usual alignment."""
        usual = ("sft",) if self.defense == "aligned" else ("sft", self.defense)
        return not self.setting and (self.align in usual or self.defense == "base")

    def holds(self, result: Result) -> bool:
        own = (self.defense, self.label, self.setting, self.align)
        return (result.defense, result.label, result.setting, result.align) == own

    def describe(self) -> str:
        return f"{self.defense} {self.setting}".strip() + f" on {self.align}"


def lines_of(results: Iterable[Result]) -> list[Line]:
    """The rows of some results: references, then the paper's order, then others; own labels after the plain one."""

    def order(line: Line) -> tuple[object, ...]:
        """A total order: what is left to a set's own order changes from one process to the next."""
        alignment = (line.align != "sft", _place(line.align, DEFENSES), line.align)
        own = (line.label != line.defense, line.label, line.setting)
        return (_place(line.defense, DEFENSES), line.defense, *alignment, *own)

    return sorted({Line.of(result) for result in results}, key=order)


def plain(results: Iterable[Result]) -> list[Result]:
    """The results whose rows belong in the tables of defenses."""
    return [result for result in results if Line.of(result).is_plain]


def measured(results: Iterable[Result]) -> list[Result]:
    """Results that hold harm or utility, as opposed to a profile of the training step."""
    return [result for result in results if "HS" in result.metrics or "FA" in result.metrics]


def attack_ratio(results: Iterable[Result]) -> float | None:
    """The poison ratio of tables that have one: the paper's 0.5 where it was run, otherwise the highest."""
    ratios = {result.poison_ratio for result in results if result.poison_ratio is not None}
    return PAPER_RATIO if PAPER_RATIO in ratios else max(ratios, default=None)


def at_ratio(results: Iterable[Result], ratio: float | None) -> list[Result]:
    """The references, and the cells of one poison ratio."""
    return [result for result in results if result.is_reference or result.poison_ratio == ratio]


def by_model_and_task(results: Sequence[Result]) -> list[tuple[str, str, list[Result]]]:
    """Groups (model, task, results) in the order of the tables; empty ones are left out."""
    tasks = ordered_tasks(result.task for result in results)
    groups = [
        (model, task, [result for result in results if (result.model, result.task) == (model, task)])
        for model in ordered_models(result.model for result in results)
        for task in tasks
    ]
    return [group for group in groups if group[2]]


def without_elsewhere(results: Sequence[Result]) -> tuple[list[Result], tuple[str, ...]]:
    """The results less those compared in tables of their own, and the note that says so."""
    kept = [result for result in results if result.defense not in ELSEWHERE]
    left = sorted({defense_title(result.defense) for result in results if result.defense in ELSEWHERE})
    return kept, ((f"in tables of their own: {', '.join(left)}",) if left else ())


def place_title(model: str, task: str, ratio: float | None = None) -> str:
    """`model / task at p = 0.5`."""
    return f"{model} / {task_title(task)}" + (f" at p = {ratio:g}" if ratio is not None else "")


def utility_of(results: Sequence[Result]) -> str:
    """FA; the loss of the held-out targets where accuracy is at floor.

    At floor: the references' FA, interval included, is below a quarter, and no fine-tuned result's lies above it.
    """
    ends = [r.metrics[ACCURACY].high for r in results if r.is_reference and ACCURACY in r.metrics]
    floor = max((end for end in ends if end is not None), default=None)
    tuned = [r.metrics[ACCURACY].low for r in results if not r.is_reference and ACCURACY in r.metrics]
    lifted = any(low is not None and floor is not None and low > floor for low in tuned)
    there = any(LOSS in r.metrics for r in results if not r.is_reference)
    return ACCURACY if floor is None or floor >= LOW or lifted or not there else LOSS
