"""The layers' passes as CUDA graphs: recorded once for every size of batch, launched together from then on.

A small model's step is a few thousand kernels that take less time to run than to launch. Batches are filled up to one
of few sizes (at most an eighth more tokens, a quarter where rows are padded), so that a run needs a handful of
recordings; the head, which depends on how many tokens are scored, stays outside.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.fused.body import Body, EagerPasses, GradientOf
from holdfast.fused.packed_rows import SEGMENTS, Groups, Layout, Sizes, lay_out, sizes
from holdfast.models.library_errors import out_of_memory

logger = logging.getLogger(__name__)

MAX_TOKENS = 16_384  # beyond that a launch is short against its kernel, and recordings would keep much memory
MAX_RECORDINGS = 32
WARM_UPS = 2
TOLERANCE = 0.05  # between a recording and the pass it was made of, relative; rounding alone is far below


def rounded(groups: Groups, *, padded: bool) -> Sizes:
    """The size that a batch is filled up to: at most an eighth more tokens.

    Where rows are never padded the longest one's length is only a bound, a power of two of at least 512. Where they
    are, it is part of the size, at most a quarter more, and so are tokens: else there would be too many sizes.
    """
    rows = _up(sum(len(group) for group in groups), 4)
    need = sizes(groups, rows=rows, segments=SEGMENTS if padded else 1)
    step = _step(need.tokens, 2 if padded else 3)
    tokens = _up(need.tokens, step)
    if padded:
        return Sizes(rows, tokens, tuple(_up(width, _step(width, 2)) for width in need.widths), step)
    return Sizes(rows, tokens, (max(512, 1 << (need.widths[0] - 1).bit_length()),), step)


def _step(size: int, bits: int) -> int:
    """A power of two of which `size` has between 2^bits and 2^(bits + 1)."""
    return max(64, 1 << max(size.bit_length() - 1 - bits, 0))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass
class Recording:
    """A pass at one size: where its rows are read from and its results are written to."""

    layout: Layout
    hidden: Tensor
    forward: Any
    seed: Tensor | None = None
    backward: Any = None

    def load(self, groups: Groups, fill: Sizes) -> None:
        """Put a batch where the recording reads it."""
        new = lay_out(groups, fill).tensors()
        for name, tensor in self.layout.tensors().items():
            tensor.copy_(new[name].pin_memory(), non_blocking=True)


class RecordedPasses(EagerPasses):
    """Passes that are recorded the first time a size is met; where that fails, they run kernel by kernel."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._recordings: dict[tuple[Sizes, str], Recording] = {}
        self._pool: Any = None
        self._gradients: list[list[Tensor]] = []
        self._rehearsed: set[str] = set()
        self._expected: tuple[Tensor, list[Tensor]] | None = None
        self.recording = True

    def states(self, groups: Groups, *, adapters: bool = True, once: bool = False) -> Tensor:
        """Hidden states of all rows, laid end to end; overwritten by the next pass. `once`: not worth a recording."""
        if once:
            self._follow()
        recording = None if once else self._loaded(groups, "states" if adapters else "reference")
        if recording is None:
            return super().states(groups, adapters=adapters)
        recording.forward.replay()
        return recording.hidden

    def gradients(self, groups: Groups, gradient_of: GradientOf, *, dropout: bool = True) -> list[list[Tensor]]:
        """Every group's gradient; overwritten by the next pass."""
        drops = dropout and self.body.adapter.dropout > 0
        recording = self._loaded(groups, "gradients with dropout" if drops else "gradients")
        if recording is None:
            return super().gradients(groups, gradient_of, dropout=dropout)
        assert recording.seed is not None
        recording.forward.replay()
        recording.seed.copy_(gradient_of(recording.hidden))
        recording.backward.replay()
        return self._gradients

    def _follow(self) -> None:
        """Forget recordings of leaves that lie elsewhere now, also before a pass that is not recorded."""
        if self.body.adapter.refresh():
            self.forget()

    def _loaded(self, groups: Groups, kind: str) -> Recording | None:
        """The recording for a batch, with the batch in it."""
        self._follow()
        fill = rounded(groups, padded=self.body.pads)
        if not self.recording or fill.tokens > MAX_TOKENS:
            return None
        key = (fill, kind)
        recording = self._recordings.pop(key, None) or self._made(groups, fill, kind)
        if recording is None:
            return None
        if len(self._recordings) >= MAX_RECORDINGS:  # the one that was not used for longest
            del self._recordings[next(iter(self._recordings))]
        self._recordings[key] = recording
        recording.load(groups, fill)
        return recording

    def forget(self) -> None:
        self._recordings.clear()
        self._gradients, self._expected = [], None
        self._pool = None  # torch does not take up a pool again that nothing uses

    def _made(self, groups: Groups, fill: Sizes, kind: str) -> Recording | None:
        layout = lay_out(groups, fill).to(self.body.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        problem: str | None
        try:
            # A rehearsal draws dropout masks; the run must not depend on when recordings are made.
            unchanged = torch.random.fork_rng(devices=[torch.cuda.current_device()])
            with recoverable(self._pool), unchanged, self.body.running():
                recording = self._record(layout, kind)
            problem = self._check(recording)
        except RuntimeError as error:
            lacking = "not enough memory for a recording"
            problem = lacking if out_of_memory(error) else str(error).strip().splitlines()[0]
        if problem is None:
            self._rehearsed.add(kind)
            return recording
        logger.warning("the step runs without CUDA graphs: %s", problem)
        self.recording = False
        self.forget()
        torch.cuda.empty_cache()
        return None

    def _record(self, layout: Layout, kind: str) -> Recording:
        body, trains, adapters = self.body, kind.startswith("gradients"), kind != "reference"
        drops = kind == "gradients with dropout"
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.set_grad_enabled(trains):
            for _ in range(0 if kind in self._rehearsed else WARM_UPS):  # libraries set themselves up
                hidden = body.forward(layout, adapters=adapters, dropout=drops)
                found = [g.clone() for g in self._back(hidden)] if trains else []
                self._expected = None if drops else (hidden.detach(), found)  # with dropout: other masks each time
                del hidden
        torch.cuda.current_stream().wait_stream(stream)
        if trains and not self._gradients:
            own = body.adapter.parameters
            self._gradients = [[torch.zeros_like(p.detach()) for p in own] for _ in range(body.adapter.count)]
        if kind not in self._rehearsed:
            torch.cuda.empty_cache()  # the rehearsal's memory, before the recording asks for as much
        forward, backward = torch.cuda.CUDAGraph(), None
        with torch.set_grad_enabled(trains):
            with self._recorded(forward):
                hidden = body.forward(layout, adapters=adapters, dropout=drops)
            if not trains:
                return Recording(layout, hidden, forward)
            seed = torch.zeros_like(hidden.detach())
            backward = torch.cuda.CUDAGraph()
            with self._recorded(backward):
                found = [g for group in body.backward(hidden, seed) for g in group]
                torch._foreach_copy_([g for group in self._gradients for g in group], found)
        return Recording(layout, hidden.detach(), forward, seed, backward)

    def _recorded(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[object]:
        """Record into the memory all recordings share: they never run at the same time."""
        # Another thread's allocation must not spoil the recording.
        return torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")

    def _back(self, hidden: Tensor) -> list[Tensor]:
        return [g for group in self.body.backward(hidden, _seed(hidden.detach())) for g in group]

    def _check(self, recording: Recording) -> str | None:
        """What is wrong with the first recording of a kind: from the same rows it has to give what the pass gave."""
        if self._expected is None:
            return None
        (hidden, gradients), self._expected = self._expected, None
        recording.forward.replay()
        far = [_apart([recording.hidden], [hidden])]
        if recording.seed is not None:
            recording.seed.copy_(_seed(recording.hidden))
            recording.backward.replay()
            far.append(_apart([g for group in self._gradients for g in group], gradients))
        same = all(gap <= TOLERANCE for gap in far)  # not max(far), which may pass over a NaN
        return None if same else "a recording gives other numbers than the pass it was made of"


@contextmanager
def recoverable(pool: tuple[int, int]) -> Iterator[None]:
    """A context for recordings into a memory pool; where one fails, stream, allocator and generator are put back.

    torch ends a capture that the driver has given up half-way (`torch.cuda.graph.__exit__` raises): its stream stays
    the current one; the allocator goes on counting the capture, and so frees no cached memory or refuses to; the pool
    keeps a user that does not exist; and the generator may stay in a mode in which it draws for captures alone.
    """
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    state = generator.clone_state()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):
            yield
    except Exception:
        generator.graphsafe_set_state(state)
        with suppress(RuntimeError, AttributeError):  # the capture was ended or had not begun, or torch renamed these
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


def _seed(hidden: Tensor) -> Tensor:
    """Some gradient of the size that losses have."""
    scale: Tensor = float(hidden.numel()) ** 0.5 * hidden.float().norm().clamp(min=1e-6)
    return (hidden.float() / scale).to(hidden.dtype)


def _apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference relative to the expected norm."""
    difference = torch.stack(torch._foreach_norm(torch._foreach_sub(found, expected))).float().norm()
    scale = torch.stack(torch._foreach_norm(expected)).float().norm()
    return float(difference / scale.clamp(min=1e-20))
