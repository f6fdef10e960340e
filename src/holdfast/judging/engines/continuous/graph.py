"""A step as CUDA graphs: its kernels are recorded once and launched together from then on."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.models.library_errors import out_of_memory

logger = logging.getLogger(__name__)

Step = Callable[[int], Tensor]
"""Takes the width that attention looks at, changes the loop's state in place, returns the scores of the next token."""
WARM_UPS = 2
TOLERANCE = 0.05


class CudaRecorder:
    """Records calls as `torch.cuda.CUDAGraph`s of one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        """The graph, and the tensor that every replay writes the result to."""
        graph = torch.cuda.CUDAGraph()
        # Another thread's allocation must not spoil the recording.
        with torch.cuda.device(self._device), torch.cuda.graph(
            graph, pool=self._pool, capture_error_mode="thread_local"
        ):  # fmt: skip
            found = function()
        self._pool = graph.pool()
        return graph, found

    def aside(self, function: Callable[[], Tensor]) -> Tensor:
        """Run on a stream of its own, as torch asks of what is recorded next: libraries set themselves up there."""
        with torch.cuda.device(self._device):
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = function()
            torch.cuda.current_stream().wait_stream(stream)
        return found


class GraphedStep:
    """A step that is recorded the first time it runs at a width, and replayed from then on.

    A recording freezes everything that the host decides. So each is checked once: replayed from the same state, it has
    to give the scores that the step itself gives. Where recording fails, or the check does, the step runs unrecorded.
    `state` are the tensors that a step changes, and that a rehearsal leaves as they were.
    """

    def __init__(self, step: Step, state: Sequence[Tensor], record: CudaRecorder | None = None) -> None:
        self._step, self._state = step, state
        self._record = record or CudaRecorder(state[0].device)
        self._graphs: dict[int, Any] = {}
        self.recording = True

    def __call__(self, width: int) -> None:
        if self.recording and width not in self._graphs:
            self._rehearse(width)
        if self.recording:
            self._graphs[width].replay()
        else:
            self._step(width)

    def _rehearse(self, width: int) -> None:
        before = [tensor.clone() for tensor in self._state]
        try:
            problem = self._recorded(width, before)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            problem = str(error).strip().split("\n")[0]
        self._restore(before)
        if problem is not None:
            self.recording = False
            self._graphs.clear()
            logger.warning("generation: the decode step runs without a CUDA graph: %s", problem)

    def _recorded(self, width: int, before: Sequence[Tensor]) -> str | None:
        for _ in range(WARM_UPS):
            self._restore(before)
            expected = self._record.aside(lambda: self._step(width)).clone()
        self._restore(before)
        graph, scores = self._record(lambda: self._step(width))
        graph.replay()
        largest = expected.abs().max()
        if not bool(((scores - expected).abs().max() <= TOLERANCE * largest).item()):
            return "its recording gives other scores"
        self._graphs[width] = graph
        return None

    def _restore(self, before: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._state, before, strict=True):
            tensor.copy_(value)
