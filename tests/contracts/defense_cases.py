"""A run of any registered defense on the tiny model, with all it may ask for, and a watch on its hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import holdfast as hf
from holdfast.training.hooks import DEFENSES, Defense, make_defense
from holdfast.training.side_data import SideData
from tests import tiny
from tests.unit.trainers.building import COMMON, SLACK

# Adapter scales at which four steps are enough for every constraint to be violated.
TIGHT = hf.ChanceConstraint(tau=1e-4, alpha=0.2, beta=1e4, unit="nll_token")
HARD = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 2e-2,
    "optim": "adamw_torch", "weight_decay": 0.1, "safety_micro_batch_size": 8,
}  # fmt: skip
"""What every bit must survive: AdamW, weight decay, accumulation (and dropout, which `build` adds)."""
PLAIN = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.3, "optim": "sgd"}
"""What arithmetic is compared under: SGD shows the size of a gradient, which Adam hides."""
DROPOUT = 0.1


class Case(NamedTuple):
    """One defense in one stage; `step` is how its gradients are computed (on a CPU `auto` is two passes)."""

    name: str
    stage: str
    step: str = "auto"

    @property
    def cls(self) -> type[Defense]:
        return DEFENSES[self.name]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(self.cls.needed(self.stage))

    def __str__(self) -> str:
        return f"{self.name}-{self.stage}" + ("" if self.step == "auto" else f"-{self.step}")


def stages_of(cls: type[Defense]) -> list[str]:
    """The stages a run may name: a post-hoc defense follows fine-tuning in one run."""
    return sorted({"finetune" if stage == "posthoc" else stage for stage in cls.stages})


def cases_of(name: str) -> list[Case]:
    """A defense in all its stages, and where its rows may be packed also in fused steps."""
    made = [Case(name, stage) for stage in stages_of(DEFENSES[name])]
    return made + [Case(name, case.stage, "fused") for case in made if DEFENSES[name].packed(case.stage)]


CASES = [case for name in DEFENSES for case in cases_of(name)]

# Where the defaults do not fit a model 32 wide: options that do.
AT_WORK: dict[str, dict[str, Any]] = {"salora": {"safety_rank": 4, "task_rank": 4}}


def one_layer() -> Any:
    """A third cheaper to train than two, and drawn so that four steps violate every constraint.

    What layers have to do with each other is in the contract's arithmetic, its two processes, and the oracles.
    """
    return tiny.model(seed=2, layers=1)


@functools.cache
def dataset(n: int, seed: int, start: str) -> Any:
    return tiny.dataset(n, seed=seed, start=start)


def unaligned_of(model: Any) -> Any:
    """The model before an alignment that moved its attention projections by matrices of rank 2."""
    made, draw = copy.deepcopy(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "in_proj_qkv.weight")):
                out, into = weight.shape
                shift = torch.randn(out, 2, generator=draw) @ torch.randn(2, into, generator=draw)
                weight.add_(shift.to(weight.dtype) / 32)
    return made


def side_data(model: Any) -> dict[str, Any]:
    """Need -> the trainer's argument for it and how to make its value."""
    return {
        "safety": ("safety_dataset", lambda: dataset(16, 2, "w0")),
        "harmful": ("harmful_dataset", lambda: dataset(16, 5, "w2")),
        "unaligned": ("unaligned", lambda: unaligned_of(model)),
    }


def build(
    folder: Path,
    case: Case,
    options: dict[str, Any] | None = None,
    *,
    without: frozenset[str] = frozenset(),
    model: Any = None,
    dropout: float = DROPOUT,
    watch: Watch | None = None,
    given: dict[str, Any] | None = None,
    **arguments: Any,
) -> hf.SafeSFTTrainer:
    """A trainer of the case.

    Args:
        options: of the defense; None are those that show it at work.
        without: side data that are left out; a second model is, too, where the case does not need it.
        given: further arguments of the trainer, in place of its own.
        arguments: fields of `SafeSFTConfig`.
    """
    model = one_layer() if model is None else model
    defense = make_defense({"name": case.name, **(AT_WORK.get(case.name, {}) if options is None else options)})
    without |= frozenset({"unaligned"}) - case.needs
    side = {key: value() for need, (key, value) in side_data(model).items() if need not in without}
    cache = folder.parent / "references"  # one for all cases: they start from the same model
    args = {**COMMON, "reference_cache": str(cache), "stage": case.stage, "step": case.step, **arguments}
    passed = {
        "processing_class": tiny.tokenizer(), "train_dataset": dataset(24, 1, "w1"),
        "peft_config": tiny.lora(dropout), "constraint": TIGHT, **side, **(given or {}),
    }  # fmt: skip
    safety = passed.pop("safety_dataset", None)  # left out, it would be built by asking the model
    return hf.SafeSFTTrainer(
        model,
        hf.SafeSFTConfig(str(folder / "run"), **args),
        defense=defense if watch is None else watch.over(defense),
        safety_dataset=safety,
        **{name: value for name, value in passed.items() if value is not None},
    )


def off(case: Case) -> dict[str, Any]:
    """Options and constraint with which the defense is plain SFT."""
    return {"options": dict(case.cls.off or {}), "given": {"constraint": SLACK}}


def trained(folder: Path, case: Case, *args: Any, **kwargs: Any) -> hf.SafeSFTTrainer:
    """The same after training."""
    trainer = build(folder, case, *args, **kwargs)
    trainer.train()
    return trainer


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def hooks_of(model: nn.Module) -> int:
    """Hooks on all modules and parameters, everywhere torch keeps them, and forwards replaced on one object."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    total = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    total += sum("forward" in vars(module) for module in model.modules())
    total += sum(len(getattr(p, "_backward_hooks", None) or {}) for p in model.parameters())
    total += sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or {}) for p in model.parameters())
    everywhere = [
        value for name, value in vars(torch_module).items() if name.startswith("_global_") and "hooks" in name
    ]
    return total + sum(len(value) for value in everywhere if isinstance(value, dict))


# -- watching hooks ----------------------------------------------------------------------------------------------------

RESTORING = ("choose_batch", "micro_step", "task_loss", "extra_loss", "on_gradient", "before_step")
"""Hooks after which every parameter is what it was."""
QUIET = ("choose_batch", "extra_loss", "on_gradient", "before_step", "after_step")
"""Hooks that leave the random state alone: dropout's next mask does not depend on the defense."""
OTHERS = ("validate", "initialise", "attach", "after_step", "transform", "row", "state_dict")
SIDE = {
    "safety": "safety", "safe": "safety", "harmful": "harmful", "harmful_examples": "harmful", "unaligned": "unaligned",
}  # fmt: skip
"""What a defense may read of a run -> the need it has then."""


class Watch:
    """Writes down what a defense's hooks leave changed and which side data they read."""

    def __init__(self) -> None:
        self.left_changed: set[str] = set()
        self.moved_random_state: set[str] = set()
        self.reads: set[str] = set()
        self.called: set[str] = set()
        self._depth = 0

    @contextmanager
    def _level(self, depth: int) -> Iterator[None]:
        before, self._depth = self._depth, depth
        try:
            yield
        finally:
            self._depth = before

    def read(self, name: str) -> None:
        """The run's attribute is read; by the defense if one of its hooks is running."""
        if self._depth and name in SIDE:
            self.reads.add(SIDE[name])

    def _outside(self, callback: Any) -> Any:
        """The trainer's own part of a hook (`accumulate`, `default`): what it reads is not the defense's doing."""

        def called(*args: Any, **options: Any) -> Any:
            with self._level(0):
                return callback(*args, **options)

        return called

    def _watch_run(self, name: str, run: Any) -> None:
        """Notice what is read of the run's data; what the engine reads for the task is not the defense's doing."""
        run.data.__class__ = watched_data(self)
        if name == "micro_step" and "accumulate" not in vars(run.engine):
            run.engine.accumulate = self._outside(run.engine.accumulate)

    def over(self, defense: Defense) -> Defense:
        """The same defense, watched."""
        for name in (*RESTORING, *OTHERS):
            setattr(defense, name, self._watched(name, getattr(defense, name)))
        return defense

    def _watched(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self.called.add(name)
            if args:  # `row` and `state_dict` see no run
                self._watch_run(name, args[0])
            if name == "task_loss":
                args = (*args[:-1], self._outside(args[-1]))
            before = snapshot(args[0].model) if name in RESTORING else None
            random = torch.get_rng_state()
            with self._level(1):
                found = hook(*args)
            if before is not None and not unchanged(args[0].model, before):
                self.left_changed.add(name)
            if name in QUIET and not torch.equal(random, torch.get_rng_state()):
                self.moved_random_state.add(name)
            return found

        return called


def snapshot(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    return [(p, p.detach().clone()) for p in model.parameters()]


def unchanged(model: nn.Module, before: list[tuple[nn.Parameter, Tensor]]) -> bool:
    same = [a is b for a, (b, _) in zip(model.parameters(), before, strict=True)]
    return all(same) and all(torch.equal(p.detach(), value) for p, value in before)


def watched_data(watch: Watch) -> type[SideData]:
    class WatchedData(SideData):
        def __getattribute__(self, name: str) -> Any:
            watch.read(name)
            return super().__getattribute__(name)

    return WatchedData
