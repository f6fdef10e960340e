"""Stopping a run on request: the first signal ends it after the current step, saved; the second at once.

Before and after training there is no step to finish, so there the first signal already ends the run at once.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """A context in which SIGINT and SIGTERM ask the trainer to save and stop; `requested` says whether one arrived.

    Use it as a context manager around the run and hand it to the trainer as a callback. Outside the main thread, where
    Python cannot install handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._training = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested or not self._training:
            raise KeyboardInterrupt
        self.requested = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on there is a step to finish and something to save."""
        self._training = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on a signal has nothing to wait for."""
        self._training = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint and the end of training once a signal has arrived at any process."""
        if torch.distributed.is_initialized():
            # Signals reach processes at different steps; all must stop at the same one, or some would wait.
            flag = torch.tensor(float(self.requested), device=args.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            self.requested = bool(flag.item())
        if self.requested:
            logger.warning("asked to stop: saving a checkpoint after step %d", state.global_step)
            control.should_save = True
            control.should_training_stop = True
