"""What happened in a run, step by step: the filter's events by name, and the rows of `events.jsonl`."""

from pathlib import Path
from typing import Any

from holdfast.constraint.event import Event, FilterEvent
from holdfast.core import event_log

__all__ = ["Event", "FilterEvent", "read"]


def read(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run folder's `events.jsonl`, one a step; `event` in them is a name of `Event`.

    Raises:
        CheckpointError: a line is damaged.
    """
    return event_log.read(Path(run) / "events.jsonl")
