"""Training a run file under one of the launch configurations of examples/launch, on the CPU.

`accelerate launch ... -m tests.distributed.launch_cases RUN_FILE` is what a user starts with `-m holdfast train`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.core.ranks import rank, world
from tests import forkserver
from tests.distributed import worker

CONFIGS = Path(__file__).parents[2] / "examples" / "launch"


def variables(name: str, processes: int) -> dict[str, str]:
    """What `accelerate launch` puts into its processes' environment for a configuration."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(CONFIGS / f"{name}.yaml"), "--num_processes", str(processes)]
    words += ["--main_process_port", "0", "-m", "holdfast"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    found: dict[str, str] = prepare_multi_gpu_env(args)
    return found


def deepspeed_variables(words: list[str]) -> dict[str, str]:
    """What it adds for DeepSpeed."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "-m", "holdfast"]))
    args.deepspeed_fields_from_accelerate_config = ""
    _, found = prepare_deepspeed_cmd_env(args)
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


def train(run_file: Path) -> None:
    """`holdfast train RUN_FILE`; each rank notes its share of the weights beside the run file."""
    from holdfast.training.trainer import SafeTrainer

    worker.let_accelerate_shard_on_the_cpu()
    inner = SafeTrainer.train

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(self, *args, **kwargs)
        every = list(self.model.parameters())
        own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in every)
        found = {"share": own / sum(p.numel() for p in every), "world": world(), "zero": self.run.parts is not None}
        torch.save(found, run_file.parent / f"rank-{rank()}.pt")
        return output

    SafeTrainer.train = noted
    forkserver.command("train", str(run_file))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
