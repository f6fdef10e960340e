"""Copies between host and device that nobody waits for: the device works on while the host prepares what is next."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; to a GPU through pinned memory, which its owner keeps until the copy is made."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class OnHost:
    """A tensor on its way to the host. The copy is queued now, so that work queued later does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # from a GPU: into pinned memory
        self._done = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def get(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._copy
