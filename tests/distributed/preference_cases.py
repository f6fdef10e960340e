"""DPO and GRPO on several processes: the same problem in every layout, and a slack filter beside TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import tiny
from tests.distributed import worker
from tests.unit.trainers import preferring

SGD = {"optim": "sgd", "learning_rate": 2.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0}


def _trained(trainer: Any) -> worker.Record:
    rows: list[worker.Record] = []
    if hasattr(trainer, "step_listeners"):
        trainer.step_listeners.append(rows.append)
    trainer.train()
    return {"weights": worker.weights(trainer), "rows": rows}


def tight(folder: Path, **options: Any) -> worker.Record:
    """DPO on eight pairs a step, in two micro-batches per process, under a constraint that binds."""
    own = {"peft_config": tiny.lora(), "train_dataset": preferring.pairs(16)}
    settings = {**SGD, **worker.layout(2), "max_steps": 3, "safety_batch_size": 8, **options}
    model = tiny.model(layers=1)
    return _trained(preferring.safe("dpo", folder, model, own=own, constraint=preferring.TIGHT, **settings))


def slack(method: str, folder: Path, **options: Any) -> dict[str, worker.Record]:
    """A filter with nothing to do, and TRL's own trainer."""
    settings = {"max_steps": 2, **options}
    ours = _trained(preferring.safe(method, folder, tiny.model(layers=1), **settings))
    return {"slack": ours, "trl": _trained(preferring.trl(method, folder, tiny.model(layers=1), **settings))}
