"""Two evaluation logs, sample by sample: what passed before and does not pass after.

M samples passed before; K of them do not pass after, those without a result among them. Samples are paired by id, and
only where both logs asked for the same. Repeated samples (epochs) count once, by a rule that is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from holdfast.core.errors import ConfigError, DataError
from holdfast.evaluation.logs.comparable import by_id, differences, require_same_samples, require_same_task, score_name
from holdfast.evaluation.logs.hostile_json import bad_log, shown
from holdfast.evaluation.logs.passing import passed, require_threshold
from holdfast.evaluation.logs.read_log import read_log
from holdfast.evaluation.logs.sample import EvaluationLog, LoggedSample

Epochs = Literal["all", "majority", "any"]
EPOCHS: Final = ("all", "majority", "any")


@dataclass(frozen=True, slots=True)
class PairedSample:
    """One sample in both logs.

    Attributes:
        id: in both logs.
        prompt: as text; not in the repr.
        content_sha256: of what was asked.
        category: of the log before.
        before: passed.
        after: passed.
        lost_before: had no result: an error or a limit, in any epoch.
        lost_after: the same of the log after.
    """

    id: str
    prompt: str = field(repr=False)
    content_sha256: str
    category: str | None
    before: bool
    after: bool
    lost_before: bool
    lost_after: bool

    @property
    def regressed(self) -> bool:
        """Passed before, does not after."""
        return self.before and not self.after


@dataclass(frozen=True)
class PairedOutcomes:
    """All samples of two logs, and what a certificate says of the logs.

    Attributes:
        samples: in the order of the log before.
        score: the score that counts.
        threshold: from which on it passes; None where it is 0 or 1.
        epochs: the rule for repeated samples; None where there are none.
        log_before: the log without its samples.
        log_after: the same.
        warnings: what differs between the logs without being refused, one sentence each.
    """

    samples: Sequence[PairedSample] = field(repr=False)
    score: str
    threshold: float | None
    epochs: str | None
    log_before: EvaluationLog
    log_after: EvaluationLog
    warnings: Sequence[str] = ()

    @property
    def n(self) -> int:
        """Samples."""
        return len(self.samples)

    @property
    def passed_before(self) -> int:
        """M."""
        return sum(sample.before for sample in self.samples)

    @property
    def regressions(self) -> int:
        """K."""
        return sum(sample.regressed for sample in self.samples)

    def to_json(self) -> dict[str, Any]:
        """Counts and names; no text."""
        return {
            "score": self.score,
            "threshold": self.threshold,
            "epochs": self.epochs,
            "n": self.n,
            "passed_before": self.passed_before,
            "passed_after": sum(sample.after for sample in self.samples),
            "regressions": self.regressions,
            "lost_before": sum(sample.lost_before for sample in self.samples),
            "lost_after": sum(sample.lost_after for sample in self.samples),
            "before": _about(self.log_before),
            "after": _about(self.log_after),
            "warnings": list(self.warnings),
        }


def paired_outcomes(
    before: Path,
    after: Path,
    score: str | None = None,
    *,
    threshold: float | None = None,
    epochs: Epochs | None = None,
    category: str = "category",
) -> PairedOutcomes:
    """Pair two logs by sample.

    Args:
        before: an inspect `.eval` or `.json` log, or an lm-eval `samples_*.jsonl`.
        after: of the same task, data and prompts.
        score: the one that counts; None where there is one alone.
        threshold: from which value on a score passes.
        epochs: when a repeated sample passes: in `all` epochs, in the `majority`, or in `any`.
        category: the field that names a sample's category.

    Raises:
        ConfigError: an unknown rule for epochs, or a threshold that is no number.
        DataError: logs that cannot be read or do not belong together, an unknown score, a score that is no number.
    """
    require_threshold(threshold)
    if epochs is not None and epochs not in EPOCHS:
        raise ConfigError(f"epochs = {epochs!r}, expected one of {', '.join(EPOCHS)}", remedy="choose one of them")
    try:
        return _paired(Path(before), Path(after), score, threshold, epochs, category)
    except RecursionError:
        raise bad_log(f"{before} or {after}", "JSON that is nested too deeply") from None


def _paired(
    before: Path, after: Path, score: str | None, threshold: float | None, epochs: Epochs | None, category: str
) -> PairedOutcomes:
    first, second = read_log(before, category=category), read_log(after, category=category)
    require_same_task(first, second)
    sides = by_id(first), by_id(second)
    require_same_samples(first, second, *sides)
    name = score_name(first, second, score)
    repeated = any(len(found) > 1 for side in sides for found in side.values())
    if repeated and epochs is None:
        raise DataError(
            "samples were repeated (epochs), and no rule says when a repeated sample passes",
            remedy=f"choose one with --set epochs=: {', '.join(EPOCHS)}",
        )
    rule = (name, threshold, epochs or "all")
    samples = [_pair(first, second, found, sides[1][key], rule) for key, found in sides[0].items()]
    return PairedOutcomes(
        samples, name, threshold, epochs if repeated else None, first, second, differences(first, second, name)
    )


def _about(log: EvaluationLog) -> dict[str, Any]:
    return {
        "file": log.file, "sha256": log.sha256, "kind": log.kind, "model": log.model,
        "task": log.task, "task_version": log.task_version, "dataset": log.dataset,
    }  # fmt: skip


def _pair(
    first: EvaluationLog,
    second: EvaluationLog,
    before: list[LoggedSample],
    after: list[LoggedSample],
    rule: tuple[str, float | None, str],
) -> PairedSample:
    passed_before, lost_before = _outcome(first, before, rule)
    passed_after, lost_after = _outcome(second, after, rule)
    one = before[0]
    return PairedSample(
        one.id, one.prompt, one.content_sha256, one.category, passed_before, passed_after, lost_before, lost_after
    )


def _outcome(log: EvaluationLog, found: list[LoggedSample], rule: tuple[str, float | None, str]) -> tuple[bool, bool]:
    """Passed by the rule for epochs, and whether an epoch has no result: it did not pass."""
    name, threshold, epochs = rule
    results = []
    for sample in found:
        where = f"{log.file}, sample {shown(sample.id)}"
        results.append(sample.lost is None and passed(sample.scores.get(name), threshold, where))
    needed = {"all": len(results), "majority": len(results) // 2 + 1, "any": 1}[epochs]
    return sum(results) >= needed, any(sample.lost for sample in found)
