"""Two evaluation logs, sample by sample: what passed before and does not pass after.

M samples passed before; K of them do not pass after, those without a result among them. Samples are paired by id, and
only where both logs asked for the same. Repeated samples (epochs) count once, by a rule that is named.

A score passes with value >= threshold, where C = 1, P = 1/2, I = N = 0, yes = true = 1, no = false = 0, and numbers are
themselves. Without a threshold a pass is 1, and numbers other than 0, 1/2 (of P) and 1 are refused: where they pass
must be said.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.hashing import sha256_file
from holdfast.judging.logs.evaluation_log import EvaluationLog, LoggedSample, bad_log, require, shown, unreadable
from holdfast.judging.logs.inspect_log import read_inspect
from holdfast.judging.logs.lm_eval_log import read_lm_eval

Epochs = Literal["all", "majority", "any"]
EPOCHS: Final = ("all", "majority", "any")
_READERS: Final = {".eval": read_inspect, ".json": read_inspect, ".jsonl": read_lm_eval}
_WORDS: Final = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_ABOUT: Final = ("file", "sha256", "kind", "model", "task", "task_version", "dataset")
Samples = dict[str, list[LoggedSample]]


@dataclass(frozen=True, slots=True)
class PairedSample:
    """One sample in both logs: whether it passed, and whether it had no result in some epoch."""

    id: str
    prompt: str = field(repr=False)  # as text; not in the repr
    content_sha256: str  # of what was asked
    category: str | None  # of the log before
    before: bool
    after: bool
    lost_before: bool
    lost_after: bool

    @property
    def regressed(self) -> bool:
        return self.before and not self.after


@dataclass(frozen=True)
class PairedOutcomes:
    """All samples of two logs, and what a certificate says of the logs."""

    samples: Sequence[PairedSample] = field(repr=False)  # in the order of the log before
    score: str  # the score that counts
    threshold: float | None  # from which on it passes; None where it is 0 or 1
    epochs: str | None  # the rule for repeated samples; None where there are none
    log_before: EvaluationLog
    log_after: EvaluationLog
    warnings: Sequence[str] = ()  # what differs between the logs without being refused, one sentence each

    @property
    def n(self) -> int:
        return len(self.samples)

    @property
    def passed_before(self) -> int:
        """M."""
        return sum(sample.before for sample in self.samples)

    @property
    def regressions(self) -> int:
        """K."""
        return sum(sample.regressed for sample in self.samples)

    def to_json(self) -> dict[str, object]:
        return {
            "score": self.score, "threshold": self.threshold, "epochs": self.epochs, "n": self.n,
            "passed_before": self.passed_before, "passed_after": sum(sample.after for sample in self.samples),
            "regressions": self.regressions,
            "lost_before": sum(sample.lost_before for sample in self.samples),
            "lost_after": sum(sample.lost_after for sample in self.samples),
            "before": {name: getattr(self.log_before, name) for name in _ABOUT},
            "after": {name: getattr(self.log_after, name) for name in _ABOUT},
            "warnings": list(self.warnings),
        }  # fmt: skip


def read_log(path: Path) -> EvaluationLog:
    """An evaluation log by its ending; a `.json` is one of inspect's."""
    if (reader := _READERS.get(path.suffix)) is None:
        remedy = "give an inspect log (.eval, .json) or lm-eval's samples_*.jsonl"
        raise DataError(f"{path}: an unknown kind of log", remedy=remedy)
    try:
        hashed = sha256_file(path)
    except OSError as error:
        raise unreadable(path, error) from None
    log = reader(path)
    if log.sha256 != hashed:
        raise DataError(f"{path} changed while it was read", remedy="wait until the evaluation has ended")
    return log


def paired_outcomes(
    before: Path, after: Path, score: str | None = None, *, threshold: float | None = None,
    epochs: Epochs | None = None,
) -> PairedOutcomes:  # fmt: skip
    """Pair two logs of the same task, data and prompts by sample.

    Args:
        score: the one that counts; None where there is one alone.
        threshold: from which value on a score passes.
        epochs: when a repeated sample passes: in `all` epochs, in the `majority`, or in `any`.
    """
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"threshold = {threshold!r}, expected a number", remedy="give, say, --set threshold=0.5")
    if epochs is not None and epochs not in EPOCHS:
        raise ConfigError(f"epochs = {epochs!r}, expected one of {', '.join(EPOCHS)}", remedy="choose one of them")
    try:
        first, second = (read_log(Path(path)) for path in (before, after))
        _require_same_task(first, second)
        sides = _by_id(first), _by_id(second)
        _require_same_samples(first, second, *sides)
        name = _score_name(first, second, score)
        repeated = any(len(epochs_of) > 1 for side in sides for epochs_of in side.values())
        _require(
            not repeated or epochs is not None,
            "samples were repeated (epochs), and no rule says when a repeated sample passes",
            f"choose one with --set epochs=: {', '.join(EPOCHS)}",
        )
        samples = []
        for key, logged in sides[0].items():
            passed, lost = _outcome(first, logged, name, threshold, epochs or "all")
            passed_after, lost_after = _outcome(second, sides[1][key], name, threshold, epochs or "all")
            about = (key, logged[0].prompt, logged[0].content_sha256, logged[0].category)
            samples.append(PairedSample(*about, passed, passed_after, lost, lost_after))
        warnings = _differences(first, second, name)
    except RecursionError:
        raise bad_log(f"{before} or {after}", "JSON that is nested too deeply") from None
    return PairedOutcomes(samples, name, threshold, epochs if repeated else None, first, second, warnings)


def _by_id(log: EvaluationLog) -> Samples:
    samples: Samples = {}
    for sample in log.samples:
        samples.setdefault(sample.id, []).append(sample)
    return samples


def _require(holds: object, what: str, remedy: str) -> None:
    if not holds:
        raise DataError(what, remedy=remedy)


def _require_same_task(first: EvaluationLog, second: EvaluationLog) -> None:
    _require(first.sha256 != second.sha256, "before and after are the same log", "give the logs of two models")
    for name in ("kind", "task", "task_version", "dataset"):
        was, is_now = getattr(first, name), getattr(second, name)
        what = f"the logs differ in their {name.replace('_', ' ')}: {shown(was)} before, {shown(is_now)} after"
        _require(was == is_now, what, "evaluate both models on the same task, in the same version")
    _require(first.samples, f"{first.file} has no samples", "log samples (lm-eval: --log_samples)")


def _require_same_samples(first: EvaluationLog, second: EvaluationLog, before: Samples, after: Samples) -> None:
    only_before, only_after, n = before.keys() - after.keys(), after.keys() - before.keys(), len(before)
    _require(
        not (only_before or only_after),
        f"{len(only_before)} of {n} samples of {first.file} are not in {second.file}, and "
        f"{len(only_after)} of {len(after)} the other way round",
        "evaluate both models on the same samples",
    )
    other = sum(len({s.content_sha256 for s in (*before[key], *after[key])}) > 1 for key in before)
    what = f"{other} of {n} samples have the same id and ask for something else"
    _require(other == 0, what, "evaluate both models on the same data, with the same prompts")
    times = sum(sorted(s.epoch for s in before[key]) != sorted(s.epoch for s in after[key]) for key in before)
    what = f"{times} of {n} samples were repeated in other numbers"
    _require(times == 0, what, "evaluate both models with the same epochs")


def _scorer(score: str) -> str:
    return score.split(",", maxsplit=1)[0].split(".", maxsplit=1)[0]


def _score_name(first: EvaluationLog, second: EvaluationLog, score: str | None) -> str:
    known = sorted(set(first.score_names) | set(second.score_names))
    if score is None and len(known) == 1:
        score = known[0]
    if score is None or score not in known:
        what = "the score that counts is not named" if score is None else f"no score is called {shown(score)}"
        listed = ", ".join(shown(name) for name in known[:20]) or "none"
        raise DataError(f"{what}; scores of these logs: {listed}", remedy="name one of them: --score NAME")
    was, is_now = (log.scorers.get(_scorer(score)) for log in (first, second))
    what = f"the score {shown(score)} was computed with other options after than before"
    _require(repr(was) == repr(is_now), what, "score both models in the same way")  # as text: NaN equals itself
    less = isinstance(was, dict) and was.get("higher_is_better") is False
    _require(not less, f"of the score {shown(score)} less is better", "name a score of which more is better")
    return score


def _differences(first: EvaluationLog, second: EvaluationLog, score: str) -> list[str]:
    warnings = []
    if first.model is None or second.model is None:
        warnings.append("a log does not name its model")
    elif first.model == second.model:
        warnings.append(f"both logs name the same model, {shown(first.model)}")
    for name in sorted(first.settings.keys() | second.settings.keys()):
        if repr(first.settings.get(name)) != repr(second.settings.get(name)):
            warnings.append(f"the logs differ in their {name.replace('_', ' ')}")
    if _scorer(score) not in first.scorers:
        warnings.append("the logs do not say how the score was computed")
    return warnings


def _outcome(
    log: EvaluationLog, samples: list[LoggedSample], score: str, threshold: float | None, epochs: str
) -> tuple[bool, bool]:
    passes = sum(
        sample.lost is None and _passed(sample.scores.get(score), threshold, f"{log.file}, sample {shown(sample.id)}")
        for sample in samples
    )
    needed = {"all": len(samples), "majority": len(samples) // 2 + 1, "any": 1}[epochs]
    return passes >= needed, any(sample.lost for sample in samples)


def _passed(value: object, threshold: float | None, where: str) -> bool:
    number = _number(value, where)
    if threshold is not None:
        return number >= threshold
    _require(
        isinstance(value, str) or number in (0.0, 1.0),
        f"{where}: the score is {number:g}, neither 0 nor 1",
        "say from which value on it passes: --set threshold=VALUE",
    )
    return number == 1.0


def _number(value: object, where: str) -> float:
    if isinstance(value, str):
        if value not in _WORDS:
            raise bad_log(where, f"the score is {shown(value)}, expected C, P, I, N or a number")
        return _WORDS[value]
    if not isinstance(value, bool | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        what = "missing" if value is None else f"{type(value).__name__}, not a finite number"
        raise bad_log(where, f"the score is {what}")
    require(abs(value) <= 1e300, where, "the score is too large a number")
    return float(value)
