"""What a run costs: seconds by part, and the most memory; of this start, as the first process sees it."""

import time

import torch

from holdfast.core.provenance import peak_memory
from holdfast.records.result_values import Cost


class Clock:
    """Seconds since the last part ended, added to the part that ends now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def ends(self, part: str) -> None:
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


def cost(seconds: dict[str, float], *, monitoring: float) -> Cost:
    """What result.json says; `monitoring`: the seconds of `training` in which the behaviour monitor asked."""
    parts = dict(seconds)
    if "training" in parts and monitoring:
        parts |= {"training": parts["training"] - monitoring, "monitoring": monitoring}
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    memory = {"host": peak_memory()} | ({} if device is None else {"device": device})
    return {"seconds": {part: round(value, 3) for part, value in parts.items()}, "peak_memory": memory}
