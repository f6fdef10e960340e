"""A GPU that records on the CPU, for passes that are recorded as CUDA graphs.

A recording is the list of tensor operations below autograd, each with the tensors it read and wrote: like a CUDA graph
it keeps addresses, freezes what the host decided, and cannot contain a look at a value. All recordings share their
memory: one that runs overwrites the others', but what its backward needs of its forward. A capture that fails is left
as torch leaves it: on its stream, counted by the allocator, with a generator that draws for captures alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOKS = ("_local_scalar_dense", "nonzero")


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Tape(TorchDispatchMode):
    """The operations of a block, run again on the same tensors by `replay`.

    Args:
        earlier: the tapes recorded before, of which the last may be the forward of this backward.
    """

    spoilt = 0.0

    def __init__(self, earlier):
        super().__init__()
        self.operations, self.replays = [], 0
        self.all, self.place = earlier, len(earlier)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in LOOKS):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        out = func(*args, **(kwargs or {}))
        read = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        fresh = [t.untyped_storage().data_ptr() not in read for t in tensors(out)]
        self.operations.append((func, args, kwargs or {}, out, fresh))
        return out

    @cached_property
    def memory(self):
        """The tensors that come into being here, by their addresses."""
        made = [x for _, _, _, out, fresh in self.operations for x, own in zip(tensors(out), fresh, strict=True) if own]
        return {x.untyped_storage().data_ptr(): x for x in made if x.is_floating_point() and x.numel()}

    @cached_property
    def read(self):
        """The addresses that are read here."""
        arguments = (tensors((args, more)) for _, args, more, _, _ in self.operations)
        return {x.untyped_storage().data_ptr() for some in arguments for x in some}

    def continues(self, other):
        """Whether this is the backward of that forward."""
        return other.place == self.place - 1 and bool(self.read & other.memory.keys())

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for other in self.all:
            if other is not self and not self.continues(other):
                for address, tensor in other.memory.items():
                    if address not in self.memory:
                        tensor.detach().fill_(float("nan"))
        for func, args, kwargs, out, fresh in self.operations:
            again = func(*args, **kwargs)
            for old, new, own in zip(tensors(out), tensors(again), fresh, strict=True):
                if own:
                    old.detach().copy_(new.detach() + (self.spoilt if new.is_floating_point() else 0))


class Generator:
    """The part of a generator that captures look at."""

    def __init__(self):
        self.capturing = False

    def clone_state(self):
        return SimpleNamespace(capturing=self.capturing)

    def graphsafe_set_state(self, other):
        self.capturing = other.capturing


class Cuda:
    """What a test may look at.

    Attributes:
        tapes: everything that was recorded.
        fails: raised instead of a recording beyond the first `allowed`.
        stream: the current one.
        underway: the pool of a capture that has begun and not ended.
        pools: handles given out, and how many recordings use each.
    """

    def __init__(self):
        self.tapes, self.emptied, self.fails, self.allowed = [], 0, None, 10**6
        self.stream, self.underway, self.generator = "default", None, Generator()
        self.pools = {}

    def graph(self):
        self.tapes.append(Tape(self.tapes))
        return self.tapes[-1]

    @contextmanager
    def recording(self, tape, pool, **_):
        self.empty_cache(counted=False)
        if self.fails is not None and len(self.tapes) > self.allowed:
            raise self.fails
        before, self.stream = self.stream, "capture"
        self.underway, self.generator.capturing = pool, True
        self.pools[pool] += 1
        with tape:
            yield
        # An error does not come here: torch raises a second one where it ends the capture.
        self.stream, self.underway, self.generator.capturing = before, None, False

    @contextmanager
    def on_stream(self, stream):
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    def new_stream(self, name="side"):
        return SimpleNamespace(name=name, wait_stream=lambda _: None)

    def new_pool(self):
        self.pools[len(self.pools) + 1] = 0
        return len(self.pools)

    def empty_cache(self, *, counted=True):
        if self.underway is not None:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.emptied += counted

    def end_allocating(self, _device, pool):
        if self.underway != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway = None

    def release(self, _device, pool):
        self.pools[pool] -= 1


def install(monkeypatch) -> Cuda:
    made, inner = Cuda(), torch.random.fork_rng
    for name, value in (
        ("CUDAGraph", made.graph),
        ("graph", made.recording),
        ("graph_pool_handle", made.new_pool),
        ("Stream", made.new_stream),
        ("current_stream", lambda: made.new_stream(made.stream)),
        ("stream", made.on_stream),
        ("current_device", lambda: 0),
        ("default_generators", (made.generator,)),
        ("empty_cache", made.empty_cache),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocating)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices=(), **more: inner(devices=[], **more))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return made
