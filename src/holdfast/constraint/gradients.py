"""Trainable parameters as one vector: the only file of the constraint that touches parameter tensors.

A vector is a list of float tensors, one per trainable parameter, each holding this rank's shard; or, joined, one per
stretch of parameters of one device and type, which takes a few kernels where an adapter's hundreds of small tensors
would take thousands. Inner products are accumulated in float64 and, for sharded (FSDP2) parameters, summed over the
ranks, so that every rank sees the same scalars and takes the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.core.errors import ConfigError, UnsupportedError

Vector = list[Tensor]
BLOCK = 4 * 2**20  # numbers of each vector that are held in float64 at one time


def shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached; the tensor itself when it is not sharded."""
    if tensor.requires_grad:  # a view takes time, and an adapter has hundreds of tensors
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


def _stretches(vector: Sequence[Tensor], most: float = math.inf) -> Iterator[slice]:
    """Consecutive tensors of one device and type, of at most `most` numbers unless a single one has more."""
    start, held = 0, 0
    for i, x in enumerate(vector):
        first = vector[start]
        if i > start and (held + x.numel() > most or x.device != first.device or x.dtype != first.dtype):
            yield slice(start, i)
            start, held = i, 0
        held += x.numel()
    yield slice(start, len(vector))


def _joined(tensors: Vector) -> Tensor:
    """The numbers of several tensors in a row; of a single one without a copy."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def _blocks(vector: Sequence[Tensor]) -> Iterator[Tensor]:
    """The numbers of a vector, at most BLOCK at a time."""
    for stretch in _stretches(vector, BLOCK):
        yield from torch.split(_joined(list(vector[stretch])), BLOCK)


def _total(sums: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


def _product(a: Vector, b: Vector, *, exact: bool) -> Tensor:
    """a . b: on a CPU, or if `exact`, with products in float64, where those of float32 numbers are exact.

    Else on a GPU in the vectors' own type, a block at a time: float64 takes many times as long there, and a block's
    sum of float32 products is off by a few parts in 10^7 of norm(a) norm(b).
    """
    pairs = ((x, x) for x in _blocks(a)) if a is b else zip(_blocks(a), _blocks(b), strict=True)
    wide = exact or not a[0].is_cuda
    return _total([torch.dot(x.double(), y.double()) if wide else torch.dot(x, y).double() for x, y in pairs])


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
        self._storage = [p.data_ptr() for p in self.params] if not self.sharded else []
        self._weights = [shard(p) for p in self.params]
        self._stretches = list(_stretches(self._weights))

    @classmethod
    def of(cls, params: Sequence[nn.Parameter], known: ParameterSpace) -> ParameterSpace:
        """`known`, if it is of these parameters and they have the storage they had; sharded ones get a new space."""
        same = [id(p) for p in params] == [id(p) for p in known.params] and not known.sharded
        return known if same and [p.data_ptr() for p in params] == known._storage else cls(params)

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a shard of the parameters (FSDP2, ZeRO)."""
        return isinstance(self.params[0], DTensor)  # all of them or none

    def weights(self) -> Vector:
        """The parameters' storage (not a copy: writing to it moves the model)."""
        return list(self._weights)

    def join(self, vector: Sequence[Tensor]) -> Vector:
        """A vector given by parameter, as one tensor per stretch; new tensors.

        Raises:
            ConfigError: other shapes than the parameters', which joined could not be told from the right ones.
        """
        for i, (x, w) in enumerate(zip_longest(vector, self._weights)):
            if x is None or w is None or x.shape != w.shape:
                found, wanted = (None if t is None else tuple(t.shape) for t in (x, w))
                raise ConfigError(
                    f"tensor {i} of a vector over the trained parameters: found shape {found}, expected {wanted}",
                    remedy="pass one tensor per trainable parameter, in the order of the optimizer's groups",
                )
        return self._join(vector)

    def _join(self, vector: Sequence[Tensor]) -> Vector:
        joined = [_joined(list(vector[stretch])) for stretch in self._stretches]
        return [x.clone() if len(vector[s]) == 1 else x for x, s in zip(joined, self._stretches, strict=True)]

    def split(self, joined: Vector) -> Vector:
        """The inverse of `join`: views, one per parameter."""
        parts: Vector = []
        for stretch, flat in zip(self._stretches, joined, strict=True):
            parts += _unflatten_dense_tensors(flat, self._weights[stretch])  # type: ignore[no-untyped-call]
        # an empty shard, (0, n), comes back as (0,) from some versions of torch
        return [x if x.numel() else x.view(w.shape) for x, w in zip(parts, self._weights, strict=True)]

    def theta(self) -> Vector:
        """A copy of the parameters, joined."""
        return self._join(self._weights)

    def put(self, joined: Vector) -> None:
        """Set the parameters."""
        torch._foreach_copy_(self._weights, self.split(joined))

    def move(self, joined: Vector, step: float) -> None:
        """`theta += step joined`."""
        torch._foreach_add_(self._weights, self.split(joined), alpha=step)

    def pull(self, joined: Vector, share: float) -> None:
        """`theta += share (joined - theta)`."""
        torch._foreach_lerp_(self._weights, self.split(joined), share)

    def snapshot(self) -> Vector:
        """A copy of the parameters, in a few kernels."""
        return list(torch._foreach_mul(self._weights, 1.0))

    @contextmanager
    def _restored(self) -> Iterator[None]:
        before = self.snapshot()
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, before)

    @contextmanager
    def moved(self, direction: Vector, step: float) -> Iterator[None]:
        """A context in which the parameters are `theta + step direction`; afterwards theta is back bit for bit."""
        with self._restored():
            torch._foreach_add_(self._weights, direction, alpha=step)
            yield

    @contextmanager
    def exchanged(self, weights: Vector) -> Iterator[None]:
        """A context in which the parameters are `weights`; afterwards theta is back bit for bit."""
        with self._restored():
            torch._foreach_copy_(self._weights, weights)
            yield

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

    def dots(self, pairs: Sequence[tuple[Vector, Vector]], *, exact: bool = False) -> list[float]:
        """Inner products of several pairs, with one reduction and one host synchronisation for all.

        Vectors are joined block by block: an adapter has hundreds of small tensors, and a kernel for each of them would
        take longer than the arithmetic.
        """
        products = {frozenset((id(a), id(b))): (a, b) for a, b in pairs}
        found = dict(
            zip(products, self._totals([_product(a, b, exact=exact) for a, b in products.values()]), strict=True)
        )
        return [found[frozenset((id(a), id(b)))] for a, b in pairs]

    def means(self, vectors: Sequence[Vector]) -> list[float]:
        """The mean number of each vector, with one reduction and one host synchronisation for all."""
        # The sum makes a float64 copy of a block.
        sums = [_total([x.sum(dtype=torch.float64) for x in _blocks(vector)]) for vector in vectors]
        return [found / sum(p.numel() for p in self.params) for found in self._totals(sums)]

    def _totals(self, sums: Sequence[Tensor]) -> list[float]:
        """Sums over the ranks, each on the device of its vectors."""
        total = torch.stack([one.to(sums[0].device) for one in sums])
        if self.sharded:
            dist.all_reduce(total)
        return [float(one) for one in total.tolist()]

    def nonfinite(self, vector: Vector) -> Tensor:
        """1 where some number of some rank is not finite, else 0; on the device, without waiting for it."""
        device = vector[0].device
        # inf or nan where a number is
        sizes = torch.stack([torch.linalg.vector_norm(x, 1).to(device) for x in _blocks(vector)])
        lost = (~sizes.isfinite()).any().float()
        if self.sharded:
            dist.all_reduce(lost, op=dist.ReduceOp.MAX)
        return lost

    def per_parameter(self, numbers: Sequence[float]) -> float | Vector:
        """Numbers given by parameter: the one that they all are, or a joined vector."""
        if len(set(numbers)) == 1:
            return numbers[0]
        return self._join([torch.full_like(w, number) for w, number in zip(self._weights, numbers, strict=True)])

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
