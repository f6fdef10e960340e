"""The cells of the experiment: which there are, what each is called, and its run file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

HERE = Path(__file__).parent
Part = Literal["reported", "tuning"]
SHIPPED, TUNING, STRENGTHS = "shipped", "tuning", "strengths"
SAFETY_FILE = "safety.jsonl"
_DATA = {"data": SAFETY_FILE, "on_leak": "move"}

METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "sft": {"defense": "sft", "conflicts": "keep"},
    "sft_screened": {"defense": "sft", "conflicts": "drop"},
    "unscreened": {"conflicts": "keep"},
    "data_advbench": {"safety": _DATA},
    "data_written": {"safety": _DATA},
    "data_sft": {"defense": "sft", "safety": _DATA},
    "auto_answered": {"conflicts": "drop"},
    "sft_answered": {"defense": "sft", "conflicts": "keep"},
    "barrier": {"conflicts": "drop"},  # a filter that holds its barrier on the probe: `strengths` says which
    "barrier_primal_dual": {"defense": "primal_dual", "conflicts": "drop"},  # with its limits and its rows
}
"""What a method adds to the run file's three lines: model, task, output_dir."""

COMPARED = ("primal_dual", "mean_constraint", "penalty", "kl", "mix", "safegrad")
"""Defenses that hold the same sets, each with the conflicts dropped and with all rows (`NAME_unscreened`)."""

for _name in COMPARED:
    METHODS[_name] = {"defense": _name, "conflicts": "drop"}
    METHODS[f"{_name}_unscreened"] = {"defense": _name, "conflicts": "keep"}
for _name in ("mean_constraint", "penalty"):  # alone they would measure likelihoods, as the paper does
    for _end in ("", "_unscreened"):
        METHODS[_name + _end]["constraint"] = {"unit": "kl_token"}

ANSWERED = ("auto_answered", "sft_answered")
"""Methods whose poison comes from an attacker who knows the rules: only prompts that screening does not find."""

SAFETY_SETS = {"data_advbench": "advbench", "data_written": "written", "data_sft": "written"}
"""Methods with safety data of their own: the model's refusals of AdvBench prompts, and refusals that were written."""

MANY_CONFLICTS = 0.25
"""From this ratio on more than 10 % of the rows are conflicts, so that `auto` needs its fourth line."""


@dataclass(frozen=True, order=True)
class Cell:
    """One model to evaluate.

    Attributes:
        model: a key of `models` in cells.yaml.
        method: a key of `METHODS`, or `shipped`, which has neither task nor ratio nor seed.
        part: which prompts it is evaluated on.
        config: of tuning.yaml; None outside of tuning.
    """

    model: str
    method: str
    task: str | None = None
    ratio: float | None = None
    seed: int | None = None
    part: Part = "reported"
    config: str | None = None

    @property
    def name(self) -> str:
        """As files and folders are called."""
        drawn = [] if self.task is None else [self.task, f"p{ratio_text(self.ratio or 0)}", f"s{self.seed}"]
        ends = [self.config] if self.config else []
        return ".".join([self.model, *drawn, self.method, *ends, *([TUNING] if self.part == TUNING else [])])

    @property
    def data_file(self) -> str:
        """Of the task rows, in WORK/data."""
        assert self.task is not None
        assert self.seed is not None
        if self.method in ANSWERED:
            return answered_file(self.task, self.seed)
        return task_file(self.task, self.ratio or 0, self.seed)


def ratio_text(ratio: float) -> str:
    """0.25 as `0.25`, 1 as `1`."""
    return f"{ratio:g}"


def task_file(task: str, ratio: float, seed: int) -> str:
    """The file of a task's rows, in WORK/data."""
    return f"task/{task}.p{ratio_text(ratio)}.s{seed}.jsonl"


def answered_file(task: str, seed: int) -> str:
    """The file of an attacker who knows the rules, in WORK/data."""
    return f"task/{task}.answered.s{seed}.jsonl"


def run_file(cell: Cell, model_folder: str) -> str:
    """The run file of a cell, one line for each key."""
    values: dict[str, Any] = {"model": f"../../models/{model_folder}", "task": {"data": "task.jsonl"}}
    values |= {"output_dir": "run", **METHODS[cell.method]}
    if cell.method == "auto" and (cell.ratio or 0) >= MANY_CONFLICTS:
        values["conflicts"] = "drop"
    return "".join(f"{key}: {_flow(value)}\n" for key, value in values.items())


def override_arguments(overrides: Mapping[str, Any]) -> list[str]:
    """`key=value` as on the command line."""
    return [f"{key}={_flow(value)}" for key, value in overrides.items()]


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix("...").strip()


@dataclass(frozen=True)
class Plan:
    """cells.yaml and tuning.yaml."""

    models: Mapping[str, Mapping[str, Any]]
    overrides: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Any]]
    tuning: Mapping[str, Any] = field(default_factory=dict)
    strengths: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # overrides by method, chosen by tuning

    @property
    def every_group(self) -> tuple[str, ...]:
        """Those of cells.yaml and of tuning.yaml."""
        return (*self.groups, TUNING, *([STRENGTHS] if STRENGTHS in self.tuning else []))

    def cells(self, group: str) -> list[Cell]:
        """The cells of a group in the order in which they run, the model itself first."""
        if group in (TUNING, STRENGTHS):
            cells = dict.fromkeys(self._tuning("cells" if group == TUNING else group))
            return [*(Cell(model, SHIPPED, part="tuning") for model in dict.fromkeys(c.model for c in cells)), *cells]
        one = self.groups[group]
        part = one["prompts"]
        drawn = [(task, ratio) for task in one["tasks"] for ratio in one["poison"]]
        drawn += [(task, 1) for task in one.get("all_poison", ())]
        found = [
            Cell(one["model"], method, task, ratio, seed, part)
            for seed in one["seeds"] for task, ratio in drawn for method in one["methods"]
        ]  # fmt: skip
        return [Cell(one["model"], SHIPPED, part=part), *found]

    def _tuning(self, key: str) -> Iterator[Cell]:
        for block in self.tuning[key]:
            keys = ("models", "tasks", "poison", "configs")
            for model, task, ratio, config in itertools.product(*(block[key] for key in keys)):
                yield Cell(model, block["method"], task, ratio, self.tuning["seed"], "tuning", config)

    def data_files(self) -> set[tuple[str, float, int]]:
        """Task, ratio and seed of every file of task rows."""
        every = [cell for group in self.every_group for cell in self.cells(group)]
        return {(c.task, c.ratio or 0, c.seed or 0) for c in every if c.task is not None and c.method not in ANSWERED}

    def cell(self, name: str) -> Cell:
        """The cell of that name."""
        for group in self.every_group:
            for cell in self.cells(group):
                if cell.name == name:
                    return cell
        raise SystemExit(f"there is no cell {name!r} in cells.yaml or tuning.yaml")

    def arguments(self, cell: Cell) -> list[str]:
        """What is put over the run file: the seed, and what tuning chose; while tuning, the settings under trial."""
        overrides = dict(self.overrides)
        if cell.config is None:
            overrides |= self.strengths.get(cell.method.removesuffix("_unscreened"), {})
        else:
            overrides |= self.tuning["common"] | self.tuning["configs"][cell.config]
        return override_arguments({"seed": cell.seed, **overrides})


def read_plan(folder: Path = HERE) -> Plan:
    """The plan in a folder."""
    one = yaml.safe_load((folder / "cells.yaml").read_text("utf-8"))
    tuning = yaml.safe_load((folder / "tuning.yaml").read_text("utf-8"))
    return Plan(one["models"], one["overrides"] or {}, one["groups"], tuning, one["strengths"] or {})
