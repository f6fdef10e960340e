"""CUDA as it was before a recording, also where the recording fails.

torch ends a capture that the driver has given up half-way (`torch.cuda.graph.__exit__` raises): its stream stays the
current one; the allocator goes on counting the capture, and so frees no cached memory or refuses to; the pool keeps a
user that does not exist; and the generator may stay in a mode in which it draws for captures alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def recoverable(pool: Any) -> Iterator[None]:
    """A context for recordings into a memory pool; where one fails, stream, allocator and generator are put back."""
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
