"""Messages of one training step, by operation: counted where torch dispatches them, those of DDP and FSDP2 included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

import holdfast as hf
from holdfast.constraint.gradients import shard
from tests import tiny
from tests.distributed import worker

RANK = 3  # two ranks cannot share three rows equally: FSDP2 fills them up
Messages = dict[str, list[int]]
CASES: dict[str, dict[str, Any]] = {
    "lora": {"accumulation": 2},
    "lora fused": {"accumulation": 2, "step": "fused"},
    "full": {"full": True},
}


class Traffic(TorchDispatchMode):
    """`messages[operation]`: the bytes of each message, as the rank has it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Messages = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in {"c10d", "_c10d_functional"}:
            given = (*args, *(kwargs or {}).values(), result)
            self.messages[func.__name__.split(".")[0]].append(max(_sizes(given), default=0))
        return result


def _sizes(values: Any) -> Iterator[int]:
    """Bytes of each tensor, and of each list of tensors together."""
    for one in values:
        found = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(one) if isinstance(leaf, torch.Tensor)]
        if found:
            yield sum(found)


class SecondStep(TrainerCallback):
    """Keeps what was sent in the second step: the first also sets things up."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.found: Messages = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.traffic.messages.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found = dict(self.traffic.messages)


def counted(
    folder: Path, *, accumulation: int = 1, full: bool = False, step: str = "two_pass", **engine: Any
) -> dict[str, Any]:
    """The messages of a step of this rank, and the bytes of the weights that it holds."""
    args = {
        **worker.BASE, **worker.SAFETY, **worker.layout(accumulation), "max_steps": 2, "step": step,
        "safety_micro_batch_size": 2, "reference_cache": str(folder / "cache"), **engine,
    }  # fmt: skip
    adapted = ["q_proj", "v_proj"]
    trainer = hf.SafeSFTTrainer(
        tiny.model(), hf.SafeSFTConfig(str(folder), **args),
        processing_class=tiny.tokenizer(), train_dataset=tiny.dataset(48, seed=1, start="w1"),
        safety_dataset=tiny.dataset(60, seed=2),
        peft_config=None if full else LoraConfig(r=RANK, target_modules=adapted, task_type="CAUSAL_LM"),
        constraint=hf.ChanceConstraint(unit="kl_token", tau=0.05, alpha=0.3, beta=15.0),
    )  # fmt: skip
    traffic = Traffic()
    second = SecondStep(traffic)
    trainer.add_callback(second)
    with traffic:
        trainer.train()
    held = [shard(p) for p in trainer.model.parameters()]
    return {"messages": second.found, "weights": sum(p.numel() * p.element_size() for p in held)}


def every_case(folder: Path, names: list[str], **engine: Any) -> dict[str, dict[str, Any]]:
    return {name: counted(folder / name, **CASES[name], **engine) for name in names}
