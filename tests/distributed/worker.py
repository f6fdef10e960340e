"""What each process of a distributed test does: train the tiny model under several settings and store what it saw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from trl import SFTConfig, SFTTrainer

import holdfast as hf
from holdfast.constraint.filter import SafetyFilter
from holdfast.constraint.gradients import ParameterSpace, trainable
from holdfast.core.errors import HoldfastError
from holdfast.core.ranks import rank, world
from tests import cheaper, tiny

GLOBAL_BATCH, STEPS, SAVED_AT = 8, 5, 3
BASE = {
    "max_steps": STEPS, "learning_rate": 0.5, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.5,
    "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "max_length": 32, "disable_tqdm": True,
    "gradient_checkpointing": False, "gradient_accumulation_steps": 1, "logging_strategy": "no",
}  # fmt: skip
SAFETY = {"safety_batch_size": GLOBAL_BATCH}
TIGHT = {"tau": 0.05, "alpha": 0.2, "beta": 20.0}
SLACK = {"tau": 10.0, "alpha": 0.05, "beta": 0.0999}
KL = {"unit": "kl_token", "tau": 0.01, "alpha": 0.2, "beta": 100.0}
ANCHORED = {"name": "holdfast", "anchor": True, "reserve": 0.2}

# What is trained, the same in every layout.
PROBLEMS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optim": "adamw_torch", "learning_rate": 2e-2},
    "kl": {"constraint": KL},
    # Tied: sharding must keep the head and the embedding in one group.
    "full": {"full": True, "learning_rate": 1.0, "constraint": KL, "defense": ANCHORED},
}
DRAWN = {"defense": {**ANCHORED, "verify": 8, "rest": 2, "draw": "importance"}}
ADAM_WITH_DROPOUT = {**PROBLEMS["adam"], "dropout": 0.2, "gradient_checkpointing": True}
FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
Record = dict[str, Any]


def fsdp2(**settings: Any) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {**FSDP2, **settings}}


def let_accelerate_shard_on_the_cpu() -> None:
    """Apply FSDP and DeepSpeed plugins on the CPU too: accelerate ignores them there, although both work."""
    settle = AcceleratorState.__init__

    def settle_with_plugin(
        self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, deepspeed_plugin: Any = None, **kwargs: Any
    ) -> None:
        settle(self, *args, fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        if deepspeed_plugin is not None:
            deepspeed_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.deepspeed_plugins = DistributedType.DEEPSPEED, deepspeed_plugin
            deepspeed_plugin.select(_from_accelerator_state=True)
        if fsdp_plugin is not None or deepspeed_plugin is not None:  # as accelerate does; a next call reads it there
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = settle_with_plugin


def layout(accumulation: int = 1) -> dict[str, int]:
    """Micro-batches that make the same eight rows per step, whatever the number of processes."""
    rows = GLOBAL_BATCH // world() // accumulation
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}


def at_once(accumulation: int) -> dict[str, int]:
    """Without micro-batches a step's safety rows are not split either; the noise floor then takes fewer passes."""
    return {"safety_micro_batch_size": GLOBAL_BATCH} if accumulation == 1 else {}


def make_trainer(
    folder: Path,
    constraint: dict[str, Any] = TIGHT,
    *,
    dropout: float = 0.0,
    full: bool = False,
    defense: Any = "holdfast",
    **arguments: Any,
) -> hf.SafeSFTTrainer:
    args = {**BASE, **SAFETY, **layout(), "reference_cache": str(folder / "cache"), **arguments}
    args |= at_once(args["gradient_accumulation_steps"])
    return hf.SafeSFTTrainer(
        tiny.tied() if full else tiny.model(), hf.SafeSFTConfig(str(folder), **args),
        processing_class=tiny.tokenizer(), train_dataset=tiny.dataset(48, seed=1, start="w1"),
        peft_config=None if full else tiny.lora(dropout), safety_dataset=tiny.dataset(60, seed=2),
        constraint=hf.ChanceConstraint(**{"unit": "nll_token", **constraint}), defense=defense,
    )  # fmt: skip


def trained_by_trl(folder: Path, *, dropout: float, **arguments: Any) -> Record:
    trainer = SFTTrainer(
        tiny.model(), SFTConfig(str(folder), **{**BASE, **layout(), **arguments}), processing_class=tiny.tokenizer(),
        train_dataset=tiny.dataset(48, seed=1, start="w1"), peft_config=tiny.lora(dropout),
    )  # fmt: skip
    trainer.train()
    return {"weights": weights(trainer)}


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of the trained weights by their plain names, shards gathered."""
    params = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (p.full_tensor() if isinstance(p, DTensor) else p).clone()
        for name, p in params.items()
    }


@contextmanager
def watched(trainer: Any):
    """Note every step's row, both gradients, and the task rows it was made of."""
    record: Record = {"rows": [], "safety": [], "task": [], "inputs": [set() for _ in range(STEPS)], "sharded": []}
    trainer.step_listeners.append(record["rows"].append)
    arm, prepare = SafetyFilter.arm, trainer._prepare_inputs

    def noted_arm(
        self: SafetyFilter, values: Any, gradients: Any, estimates: Any = None, limits: Any = (), verify: Any = None
    ) -> None:
        space = ParameterSpace(trainable(self.optimizer))
        record["safety"].append([x.clone() for x in space.full(gradients[0])])
        record["task"].append([x.clone() for x in space.full(space.task_gradient())])
        record["sharded"].append(all(isinstance(p, DTensor) for p in space.params))
        arm(self, values, gradients, estimates, limits, verify)

    def noted_inputs(inputs: Any) -> Any:  # of the task alone; a `training_step` of our own would decline fused steps
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            record["inputs"][trainer.state.global_step].add(tuple(ids[mask.bool()].tolist()))
        return prepare(inputs)

    SafetyFilter.arm, trainer._prepare_inputs = noted_arm, noted_inputs
    try:
        yield record
    finally:
        SafetyFilter.arm = arm


def run(folder: Path, *, bucket_view: bool = False, resume: Path | None = None, **settings: Any) -> Record:
    """Train once and return the record, with the final weights and the monitor's figures."""
    trainer = make_trainer(folder, **settings)
    if bucket_view:
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
    with watched(trainer) as record:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    record["bucket_view"] = getattr(trainer.model_wrapped, "gradient_as_bucket_view", False)
    record["metrics"] = trainer.evaluate()
    trainer.save_model(str(folder / "final"))
    record["weights"] = weights(trainer)
    return record


def run_and_resume(folder: Path, **settings: Any) -> dict[str, Record]:
    """A whole run that saves on its way, and a second process's continuation of it."""
    saving = {"save_strategy": "steps", "save_steps": SAVED_AT, **settings}
    whole = run(folder, **saving)
    return {"whole": whole, "resumed": run(folder, resume=folder / f"checkpoint-{SAVED_AT}", **saving)}


def without_time(rows: list[Record]) -> list[Record]:
    """Rows of the event log as far as they can repeat."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def refusal(action: Callable[[], Any]) -> tuple[str, int, str]:
    """How `action` is refused: the error's class, exit code and message."""
    try:
        action()
    except HoldfastError as error:
        return type(error).__name__, error.exit_code, str(error)
    return "nothing", 0, ""


def in_one_process(folder: Path) -> dict[str, Record]:
    from tests.distributed import preference_cases

    found = {name: run(folder / name, **settings) for name, settings in PROBLEMS.items()}
    found["accumulated"] = run(folder / "accumulated", **PROBLEMS["sgd"], **layout(4))
    found["dpo"] = preference_cases.tight(folder / "dpo")
    found["drawn"] = run(folder / "drawn", **DRAWN)
    return found


def under_ddp(folder: Path) -> dict[str, Any]:
    from tests.distributed import behaviour_cases, fused_cases, preference_cases, traffic_cases

    p = PROBLEMS
    return {
        "fused": fused_cases.fused(folder / "fused"),
        "two_pass": fused_cases.two_pass(folder / "two_pass"),
        "sgd": run(folder / "sgd", **p["sgd"]),
        "adam": run(folder / "adam", **p["adam"], gradient_checkpointing=True),
        "full": run(folder / "full", **p["full"]),
        "accumulated": run(folder / "accumulated", **layout(2), bucket_view=True),
        "drawn": run(folder / "drawn", **DRAWN),
        "trl": trained_by_trl(folder / "trl", **ADAM_WITH_DROPOUT),
        "slack": run(folder / "slack", constraint=SLACK, **ADAM_WITH_DROPOUT),
        "resume": run_and_resume(folder / "resume", **ADAM_WITH_DROPOUT),
        "uneven": refusal(lambda: make_trainer(folder / "uneven", safety_batch_size=7)),
        "traffic": traffic_cases.every_case(folder / "traffic", ["lora fused", "full"]),
        "behaviour": behaviour_cases.trained(folder / "behaviour", watch=True),
        "unwatched": behaviour_cases.trained(folder / "unwatched", watch=False),
        "dpo": preference_cases.tight(folder / "dpo"),
        "slack_dpo": preference_cases.slack("dpo", folder / "slack_dpo"),
        "slack_grpo": preference_cases.slack("grpo", folder / "slack_grpo"),
    }


def under_fsdp2(folder: Path) -> dict[str, Any]:
    from tests.distributed import behaviour_cases, fused_cases, preference_cases, traffic_cases

    p = PROBLEMS
    return {
        "fused": fused_cases.sharded(folder / "fused"),
        "sgd": run(folder / "sgd", **p["sgd"], **fsdp2()),
        "adam": run(
            folder / "adam", **p["adam"], **fsdp2(state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=False)
        ),
        "kl": run(folder / "kl", **p["kl"], **fsdp2()),
        "full": run(folder / "full", **p["full"], **fsdp2(activation_checkpointing=True)),
        "accumulated": run(folder / "accumulated", **layout(2), **fsdp2(), gradient_checkpointing=True),
        "drawn": run(folder / "drawn", **DRAWN, **fsdp2()),
        "trl": trained_by_trl(folder / "trl", **ADAM_WITH_DROPOUT, **fsdp2()),
        "slack": run(folder / "slack", constraint=SLACK, **ADAM_WITH_DROPOUT, **fsdp2()),
        "resume": run_and_resume(folder / "resume", **ADAM_WITH_DROPOUT, **fsdp2()),
        "resume_full": run_and_resume(
            folder / "resume_full", **p["full"], **fsdp2(reshard_after_forward=False, activation_checkpointing=True)
        ),
        "dpo": preference_cases.tight(folder / "dpo", **fsdp2()),
        "slack_dpo": preference_cases.slack("dpo", folder / "slack_dpo", **fsdp2()),
        "grpo": refusal(lambda: preference_cases.slack("grpo", folder / "grpo", **fsdp2())),
        "empty": refusal(lambda: make_trainer(folder / "empty", **fsdp2(activation_checkpointing=True))),
        "early": refusal(lambda: make_trainer(folder / "early", **fsdp2()).evaluate()),
        "traffic": traffic_cases.every_case(folder / "traffic", ["lora", "full"], **fsdp2()),
        "behaviour": refusal(lambda: behaviour_cases.watch_behaviour(make_trainer(folder / "behaviour", **fsdp2()))),
    }


def main(folder: Path, engine: str) -> None:
    PartialState(cpu=True)  # makes the process group, which `layout` asks for its size
    cheaper.same_rows = True
    let_accelerate_shard_on_the_cpu()
    found = {"ddp": under_ddp, "fsdp2": under_fsdp2}[engine](folder / engine)
    torch.save(found, folder / f"{engine}-{rank()}.pt")
