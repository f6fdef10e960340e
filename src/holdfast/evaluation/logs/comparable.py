"""Whether two evaluation logs may be compared: the same task, the same samples, a score computed in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import DataError
from holdfast.evaluation.logs.hostile_json import shown
from holdfast.evaluation.logs.sample import EvaluationLog, LoggedSample


def require_same_task(first: EvaluationLog, second: EvaluationLog) -> None:
    """Refuse the same log twice, and logs of different tasks, versions or data."""
    if first.sha256 == second.sha256:
        raise DataError("before and after are the same log", remedy="give the logs of two models")
    for name in ("kind", "task", "task_version", "dataset"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            raise DataError(
                f"the logs differ in their {name.replace('_', ' ')}: {shown(one)} before, {shown(other)} after",
                remedy="evaluate both models on the same task, in the same version",
            )
    if not first.samples:
        raise DataError(f"{first.file} has no samples", remedy="log samples (lm-eval: --log_samples)")


def by_id(log: EvaluationLog) -> dict[str, list[LoggedSample]]:
    """Samples by id, repeated ones together."""
    found: dict[str, list[LoggedSample]] = {}
    for sample in log.samples:
        found.setdefault(sample.id, []).append(sample)
    return found


def require_same_samples(
    first: EvaluationLog,
    second: EvaluationLog,
    before: Mapping[str, list[LoggedSample]],
    after: Mapping[str, list[LoggedSample]],
) -> None:
    """Refuse logs that do not have the same ids, asked the same, as many times."""
    only_before, only_after = before.keys() - after.keys(), after.keys() - before.keys()
    if only_before or only_after:
        raise DataError(
            f"{len(only_before)} of {len(before)} samples of {first.file} are not in {second.file}, and "
            f"{len(only_after)} of {len(after)} the other way round",
            remedy="evaluate both models on the same samples",
        )
    other = sum({s.content_sha256 for s in found} != {s.content_sha256 for s in after[key]} or
                len({s.content_sha256 for s in found}) > 1 for key, found in before.items())  # fmt: skip
    if other:
        raise DataError(
            f"{other} of {len(before)} samples have the same id and ask for something else",
            remedy="evaluate both models on the same data, with the same prompts",
        )
    times = sum(sorted(s.epoch for s in found) != sorted(s.epoch for s in after[key]) for key, found in before.items())
    if times:
        raise DataError(
            f"{times} of {len(before)} samples were repeated in other numbers",
            remedy="evaluate both models with the same epochs",
        )


def score_name(first: EvaluationLog, second: EvaluationLog, score: str | None) -> str:
    """The score that counts, if both logs know it and computed it in the same way."""
    known = sorted(set(first.score_names) | set(second.score_names))
    listed = ", ".join(shown(name) for name in known[:20]) or "none"
    if score is None and len(known) == 1:
        score = known[0]
    if score is None or score not in known:
        what = "the score that counts is not named" if score is None else f"no score is called {shown(score)}"
        raise DataError(f"{what}; scores of these logs: {listed}", remedy="name one of them: --score NAME")
    one, other = (log.scorers.get(score.split(",")[0].split(".")[0]) for log in (first, second))
    if _plain(one) != _plain(other):
        raise DataError(
            f"the score {shown(score)} was computed with other options after than before",
            remedy="score both models in the same way",
        )
    if isinstance(one, dict) and one.get("higher_is_better") is False:
        raise DataError(f"of the score {shown(score)} less is better", remedy="name a score of which more is better")
    return score


def differences(first: EvaluationLog, second: EvaluationLog, score: str) -> list[str]:
    """What differs without being refused."""
    found = []
    if first.model is None or second.model is None:
        found.append("a log does not name its model")
    elif first.model == second.model:
        found.append(f"both logs name the same model, {shown(first.model)}")
    for name in sorted(first.settings.keys() | second.settings.keys()):
        if _plain(first.settings.get(name)) != _plain(second.settings.get(name)):
            found.append(f"the logs differ in their {name.replace('_', ' ')}")
    if score.split(",", maxsplit=1)[0].split(".", maxsplit=1)[0] not in first.scorers:
        found.append("the logs do not say how the score was computed")
    return found


def _plain(value: Any) -> str:
    """Text by which settings are compared: NaN equals itself."""
    return repr(value)
