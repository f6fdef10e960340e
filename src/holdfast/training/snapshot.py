"""The state of a training run as plain structures of tensors and numbers, whole (not sharded), and back again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.constraint.gradients import reshard
from holdfast.core.errors import CheckpointError
from holdfast.core.ranks import rank

TRAINABLE = "trainable.safetensors"
CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."  # in parameter names under FSDP's activation_checkpointing


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def _cut(whole: Tensor, like: DTensor) -> Tensor:
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by the name they have without wrappers, which is the one that PEFT and transformers load."""
    return {name.replace(CHECKPOINT_WRAPPER, ""): p for name, p in model.named_parameters() if p.requires_grad}


def trainable_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every trainable parameter by name, gathered (a collective call), on the CPU."""
    return {name: _whole(p) for name, p in _trainable(model).items()}


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, gathered (a collective call), on the CPU of rank 0; empty elsewhere."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        gathered = _whole(tensor)
        if rank() == 0:
            found[name] = gathered
    return found


def save_trainable(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the weights, in their own dtype."""
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, folder / TRAINABLE)


@torch.no_grad()
def load_trainable(model: nn.Module, folder: Path) -> None:
    """Copy the stored weights into the model; a missing or differently shaped one is a `CheckpointError`."""
    reshard(model)
    stored = load_file(folder / TRAINABLE)
    params = _trainable(model)
    shapes = [name for name, p in params.items() if name in stored and p.shape != stored[name].shape]
    differing = sorted({*stored} ^ {*params}) + shapes
    if differing:
        raise CheckpointError(
            f"{folder / TRAINABLE} holds other trainable parameters than this model ({len(differing)} differ, "
            f"first: {differing[0]})",
            remedy="resume with the model and adapter settings of the original run",
        )
    for name, p in params.items():
        value = stored[name].to(p.dtype)
        p.copy_(_cut(value, p) if isinstance(p, DTensor) else value)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with sharded tensors gathered (a collective call)."""

    def gathered(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _whole(value)
        if isinstance(value, dict):
            return {key: gathered(item) for key, item in value.items()}
        return [gathered(item) for item in value] if isinstance(value, list) else value

    state: dict[str, Any] = gathered(optimizer.state_dict())
    return state


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of `optimizer_state`."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, entries in state["state"].items():
        p = params[int(number)]
        for key, value in entries.items() if isinstance(p, DTensor) else ():
            if isinstance(value, Tensor) and value.shape == p.shape:
                entries[key] = _cut(value, p)
    optimizer.load_state_dict(state)
