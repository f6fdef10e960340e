"""Fused steps on any number of processes: the same eight task and eight safety rows a step, in float64."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import holdfast as hf
from holdfast.training import side_pass
from tests import tiny
from tests.distributed import worker

STEPS = 3
ALL_ACTIVE = {"tau": 0.05, "alpha": 0.05, "beta": 5.0, "allow_infeasible_start": True}
SOME_ACTIVE = {"tau": 0.05, "alpha": 0.05, "beta": 20.0}  # rows with D < 0 are flat
KL = {"constraint": {"unit": "kl_token", "tau": 1e-3, "alpha": 0.2, "beta": 1000.0}}
TWO = {"one": SOME_ACTIVE, "two": {**SOME_ACTIVE, "unit": "kl_token"}}
REENTRANT = {
    "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "ddp_find_unused_parameters": False,  # without it DDP fails in the plain task pass, TRL's too
}  # fmt: skip
Record = dict[str, Any]

# Settings of `run`. With `flat`, that many rows at the head of every safety batch have a term without a slope.
PROBLEMS: dict[str, Record] = {
    "plain": {},
    "accumulated": {"accumulation": 2},
    "own tokens": {"average_tokens_across_devices": False, "accumulation": 2},
    "checkpointed": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "re-entrant": REENTRANT,
    "kl": {**KL, "skip_inactive_rows": "on"},
    "two sets, first rank flat": {"skip_inactive_rows": "on", "flat": 4, "constraint": TWO},
    "first rank and one row flat": {"skip_inactive_rows": "on", "flat": 5, "accumulation": 2},
    "by rows": {"loss_weights": "rows", "accumulation": 2},
    "all flat": {"skip_inactive_rows": "on", "flat": 8},
    "fewer rows than micro-batches": {"skip_inactive_rows": "on", "safety_batch_size": 2, "accumulation": 2},
}
IN_TWO_PASSES = [
    "own tokens",
    "by rows",
    "re-entrant",
    "kl",
    "two sets, first rank flat",
    "first rank and one row flat",
]


def make(
    folder: Path, constraint: Any = ALL_ACTIVE, *, accumulation: int = 1, flat: int = 0, dtype: Any = torch.float64,
    **arguments: Any,
) -> hf.SafeSFTTrainer:  # fmt: skip
    args = {
        **worker.BASE, **worker.SAFETY, **worker.layout(accumulation), **worker.at_once(accumulation),
        "max_steps": STEPS, "learning_rate": 0.1,
        "logging_strategy": "steps", "logging_steps": 1, "reference_cache": str(folder / "cache"), **arguments,
    }  # fmt: skip
    several = "one" in constraint
    safety = {name: tiny.dataset(60, seed=2 + 3 * i) for i, name in enumerate(constraint)} if several else None
    given = constraint if several else {"one": constraint}
    limits = {name: hf.ChanceConstraint(**{"unit": "nll_token", **c}) for name, c in given.items()}
    trainer = hf.SafeSFTTrainer(
        tiny.model(dtype=dtype), hf.SafeSFTConfig(str(folder), **args), processing_class=tiny.tokenizer(),
        train_dataset=tiny.dataset(24, seed=1, start="w1"), peft_config=tiny.lora(),
        safety_dataset=safety or tiny.dataset(60, seed=2), constraint=limits if several else limits["one"],
    )  # fmt: skip
    if flat:
        flatten(trainer, flat)
    return trainer


def flatten(trainer: Any, flat: int) -> None:
    """Give the rows that open every safety batch a reference so high that they cannot degrade."""
    inner: Callable[[str], list[int]] = trainer.run.data.safety_batch

    def lift() -> None:
        for one in trainer.safety.values():
            lifted = one.constraint_reference.clone()
            lifted[::2] += 100.0
            one.constraint_reference = lifted

    def measure() -> None:  # a sharded model is measured as training begins
        fresh = not trainer._measured
        type(trainer).measure_reference(trainer)
        if fresh:
            lift()

    def safety_batch(name: str) -> list[int]:
        size, count = len(inner(name)), len(trainer.safety[name].constraint_set)
        start = trainer.run.progress.step * size
        low = [2 * ((start + i) % (count // 2)) for i in range(flat)]
        return low + [2 * ((start + i) % (count // 2)) + 1 for i in range(size - flat)]

    trainer.run.data.safety_batch = safety_batch
    if trainer.is_fsdp_enabled:
        trainer.measure_reference = measure
    else:
        lift()


def run(folder: Path, **settings: Any) -> Record:
    """Both gradients and the degradations of every step, what was logged, and the weights at the end."""
    trainer = make(folder, **settings)
    record: Record = {"task": [], "side": [], "degradations": []}
    on_gradient = trainer.defense.on_gradient

    def noted_gradient(run: Any) -> None:
        space = run.space()
        record["task"].append([x.clone() for x in space.full(space.task_gradient())])
        if "measure" not in vars(run.engine):  # made at the first step, once the model is wrapped
            run.engine.measure = functools.partial(noted_pass, run.engine.measure)
        on_gradient(run)

    def noted_pass(passes: Any, terms: Any) -> Any:
        measured = passes(terms)
        for one in measured.values():
            record["side"].append([x.clone() for x in trainer.run.space().full(one.gradient)])
            record["degradations"].append(one.degradations)
        return measured

    trainer.defense.on_gradient = noted_gradient
    trainer.train()
    logged = ("loss", "num_tokens", "entropy", "mean_token_accuracy", "grad_norm")
    record["log"] = [{key: row[key] for key in logged if key in row} for row in trainer.state.log_history[:STEPS]]
    record["joint"], record["weights"] = trainer.run.engine.fused, worker.weights(trainer)
    return record


def fused(folder: Path) -> dict[str, Record]:
    """Every problem in fused steps."""
    return {name: run(folder / name, step="fused", **problem) for name, problem in PROBLEMS.items()}


def two_pass(folder: Path) -> dict[str, Record]:
    """Those of `IN_TWO_PASSES`; that other layouts of two passes agree is tested beside this."""
    return {name: run(folder / name, step="two_pass", **PROBLEMS[name]) for name in IN_TWO_PASSES}


# -- FSDP2 -------------------------------------------------------------------------------------------------------------

SKIPPED: dict[str, Record] = {
    "first rank flat": {"flat": 4},
    "all flat": {"flat": 8},
    "pieces": {"flat": 5, "safety_micro_batch_size": 2},
}


@contextmanager
def never_flat():
    """Every row gets its backward, also where it has no slope."""
    inner = side_pass.slope  # type: ignore[attr-defined]
    side_pass.slope = lambda weight, d: torch.ones_like(d)  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        side_pass.slope = inner  # type: ignore[attr-defined]


def skipped(folder: Path, **engine: Any) -> dict[str, Record]:
    """Two passes with rows that need no backward."""
    return {name: run(folder / name, **p, **engine, dtype=torch.float32) for name, p in SKIPPED.items()}


def sharded(folder: Path) -> dict[str, Any]:
    """Two passes under FSDP2, whose ranks must not part where only one has rows with a slope; and fused steps."""
    kept_whole = worker.fsdp2(reshard_after_forward=False)  # such weights are gathered again only after a backward
    refused = make(folder / "refused", step="fused", dtype=torch.float32, **worker.fsdp2())
    return {
        "skipped": skipped(folder / "skipped", **worker.fsdp2()),
        "kept whole": skipped(folder / "kept", **kept_whole),
        "refused": worker.refusal(refused.train),
        "auto": fallen_back(make(folder / "auto", dtype=torch.float32, **worker.fsdp2())),
    }


def fallen_back(trainer: Any) -> tuple[bool, list[str]]:
    """Whether a fused step is made as if this were a GPU, where `auto` tries, and the lines that say so."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("holdfast.training.step")
    logger.addHandler(handler)
    own = trainer.args
    trainer.args = SimpleNamespace(step=own.step, stage=own.stage, packing=False, loss_type="nll")
    trainer.args.device, trainer.args.label_smoothing_factor = torch.device("cuda"), 0
    try:
        return trainer.run.engine.fused, lines
    finally:
        trainer.args = own
        logger.removeHandler(handler)
