"""What every reader of evaluation logs gives: a log and its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """One sample of an evaluation, as logged."""

    id: str  # within its log, together with the epoch
    epoch: int  # 1 unless samples were repeated
    prompt: str = field(repr=False)  # as text; not in the repr, which may reach a log
    content_sha256: str  # of what the sample asks for (input, target, choices); equal in two logs that asked the same
    scores: Mapping[str, Any]  # values by name, as logged
    category: str | None = None  # of the sample's metadata, if it has one
    lost: str | None = None  # why there is no result ("error", "limit"), or None


@dataclass(frozen=True)
class EvaluationLog:
    """One log file: its name without folders, the sha256 of its bytes, and what it says; None where it does not."""

    file: str
    sha256: str
    kind: str  # the tool that wrote it
    task: str
    task_version: str | None
    dataset: str | None
    model: str | None
    settings: Mapping[str, Any]  # what should be alike in two logs that are compared: solver, generation, prompts
    scorers: Mapping[str, Any]  # how each score was computed
    samples: Sequence[LoggedSample] = field(repr=False)  # in the log's order

    @property
    def score_names(self) -> list[str]:
        """Scores that some sample has."""
        return sorted({name for sample in self.samples for name in sample.scores})
