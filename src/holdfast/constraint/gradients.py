"""Trainable parameters as one vector: the only file of the constraint that touches parameter tensors.

A vector is a list of float tensors, one per trainable parameter, each holding this rank's shard. Inner products
are accumulated in float64 and, for sharded (FSDP2) parameters, summed over the ranks, so that every rank sees
the same scalars and takes the same decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.core.errors import ConfigError, UnsupportedError

Vector = list[Tensor]
BLOCK = 4 * 2**20  # numbers of each vector that are held in float64 at one time


def shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached; the tensor itself when it is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Free the gathered copies that FSDP2 keeps after a forward without backward.

    The next forward would use such a copy instead of the shards, and so miss every change made to them meanwhile.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trainable(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters that require a gradient, in its own order.

    Looked up at each use, never kept: FSDP2 exchanges the parameter objects after the optimizer is made.
    """
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


class ParameterSpace:
    """Vectors over a list of parameters."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        if not params:
            raise ConfigError(
                "no trainable parameter: every parameter is frozen",
                remedy="attach an adapter (lora: ...) or unfreeze the weights to be trained",
            )
        for p in params:
            if p.dtype not in (torch.float32, torch.float64):
                raise UnsupportedError(
                    f"trainable parameters in {str(p.dtype).removeprefix('torch.')}: the applied step would be mostly "
                    "rounding",
                    remedy="keep trainable weights in float32 (the frozen base may be bfloat16; bf16=True autocasts)",
                )
            if isinstance(p, DTensor) and p.device_mesh.ndim != 1:
                raise UnsupportedError(
                    "parameters sharded over a mesh of several dimensions (HSDP, tensor or context parallelism)",
                    remedy="use DDP or one-dimensional FSDP2",
                )
        if len({isinstance(p, DTensor) for p in params}) > 1:
            raise UnsupportedError(
                "trainable parameters of which FSDP2 shards only some: nothing reduces the gradients of the others",
                remedy="remove ignored_modules from the FSDP configuration, or freeze these parameters",
            )
        self.params = list(params)

    def zeros(self) -> Vector:
        """The zero vector."""
        return [torch.zeros_like(shard(p)) for p in self.params]

    def weights(self) -> Vector:
        """The parameters' storage (not a copy: writing to it moves the model)."""
        return [shard(p) for p in self.params]

    def snapshot(self) -> Vector:
        """A copy of the parameters."""
        return [shard(p).clone() for p in self.params]

    @contextmanager
    def moved(self, direction: Vector, step: float) -> Iterator[None]:
        """A context in which the parameters are `theta + step direction`; afterwards theta is back bit for bit."""
        before = self.snapshot()
        try:
            for weight, d in zip(self.weights(), direction, strict=True):
                weight.add_(d, alpha=step)
            yield
        finally:
            self._put(before)

    @contextmanager
    def exchanged(self, weights: Vector) -> Iterator[None]:
        """A context in which the parameters are `weights`; afterwards theta is back bit for bit."""
        before = self.snapshot()
        try:
            self._put(weights)
            yield
        finally:
            self._put(before)

    def _put(self, weights: Vector) -> None:
        for weight, value in zip(self.weights(), weights, strict=True):
            weight.copy_(value)

    def task_gradient(self) -> Vector:
        """`.grad` of every parameter, zero where there is none."""
        return [torch.zeros_like(shard(p)) if p.grad is None else shard(p.grad) for p in self.params]

    def add_to_gradient(self, vectors: Sequence[Vector], weights: Sequence[float]) -> None:
        """`.grad += sum_k weights[k] vectors[k]`."""
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradient = [shard(p.grad) for p in self.params if p.grad is not None]
        for vector, weight in zip(vectors, weights, strict=True):
            torch._foreach_add_(gradient, vector, alpha=weight)

    def drop_gradient(self) -> None:
        """Set every `.grad` to None: optimizers skip such parameters, moments and weight decay included."""
        for p in self.params:
            p.grad = None

    def dots(self, pairs: Sequence[tuple[Vector, Vector]]) -> list[float]:
        """Inner products of several pairs, with one reduction and one host synchronisation for all.

        Vectors are joined block by block and multiplied as the rows of one matrix, F F^T in float64, where products of
        float32 numbers are exact: an adapter has hundreds of small tensors, and a kernel for each of them would take
        longer than the arithmetic.
        """
        vectors = list({id(v): v for pair in pairs for v in pair}.values())
        place = {id(v): i for i, v in enumerate(vectors)}
        device = shard(self.params[0]).device
        gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=device)
        for block in self._blocks():
            rows = [torch.cat([v[i].reshape(-1)[part] for i, part in block]).double() for v in vectors]
            joined = torch.stack(rows)
            gram += (joined @ joined.T).to(device)
        if any(isinstance(p, DTensor) for p in self.params):
            dist.all_reduce(gram)
        found = gram.tolist()
        return [float(found[place[id(a)]][place[id(b)]]) for a, b in pairs]

    def _blocks(self) -> Iterator[list[tuple[int, slice]]]:
        """Stretches of the flattened parameters in groups of at most `BLOCK` numbers on one device, in order."""
        block: list[tuple[int, slice]] = []
        held = 0
        for i, p in enumerate(self.params):
            local = shard(p)
            for start in range(0, local.numel(), BLOCK):
                size = min(BLOCK, local.numel() - start)
                if block and (held + size > BLOCK or local.device != shard(self.params[block[0][0]]).device):
                    yield block
                    block, held = [], 0
                block.append((i, slice(start, start + size)))
                held += size
        if block:
            yield block

    def full(self, vector: Vector) -> Vector:
        """The vector with every shard gathered, on the CPU: what a checkpoint stores. A collective call."""
        return [
            (
                DTensor.from_local(x, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
                if isinstance(p, DTensor)
                else x
            ).cpu()
            for p, x in zip(self.params, vector, strict=True)
        ]

    def scatter(self, vector: Sequence[Tensor]) -> Vector:
        """The inverse of `full`."""
        return [
            shard(distribute_tensor(x.to(p.device, p.dtype), p.device_mesh, p.placements))
            if isinstance(p, DTensor)
            else x.to(p.device, p.dtype)
            for p, x in zip(self.params, vector, strict=True)
        ]
