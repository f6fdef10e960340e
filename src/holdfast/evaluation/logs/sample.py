"""What every reader of evaluation logs gives: a log and its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """One sample of an evaluation, as logged.

    Attributes:
        id: within its log, together with the epoch.
        epoch: 1 unless samples were repeated.
        prompt: as text; not in the repr, which may reach a log.
        content_sha256: of what the sample asks for (input, target, choices); equal in two logs that asked the same.
        scores: values by name, as logged.
        category: of the sample's metadata, if it has one.
        lost: why there is no result ("error", "limit"), or None.
    """

    id: str
    epoch: int
    prompt: str = field(repr=False)
    content_sha256: str
    scores: Mapping[str, Any]
    category: str | None = None
    lost: str | None = None


@dataclass(frozen=True)
class EvaluationLog:
    """One log file.

    Attributes:
        file: its name, without folders.
        sha256: of its bytes.
        kind: the tool that wrote it.
        task: name of the task.
        task_version: as logged; None where the log does not say.
        dataset: name of the data, where the log says it.
        model: name of the model, where the log says it.
        settings: what should be alike in two logs that are compared: solver, generation, prompts.
        scorers: how each score was computed, where the log says it.
        samples: in the log's order.
    """

    file: str
    sha256: str
    kind: str
    task: str
    task_version: str | None
    dataset: str | None
    model: str | None
    settings: Mapping[str, Any]
    scorers: Mapping[str, Any]
    samples: Sequence[LoggedSample] = field(repr=False)

    @property
    def score_names(self) -> list[str]:
        """Scores that some sample has."""
        return sorted({name for sample in self.samples for name in sample.scores})
