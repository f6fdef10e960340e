"""Logs of inspect: `.eval` (a ZIP of JSON) and `.json`.

A sample is its id and epoch. What it asks for is its input, target and choices; message ids are drawn anew in every run
and do not count. A sample with an error, or one that ran into a limit, has no result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_file, sha256_text
from holdfast.evaluation.logs.hostile_json import bad_log, loads, optional_text, read_bounded, shown, typed
from holdfast.evaluation.logs.sample import EvaluationLog, LoggedSample
from holdfast.evaluation.logs.zip_members import open_zip

MAX_JSON: Final = 256 << 20
_SAMPLE: Final = re.compile(r"samples/[^/\\]+\.json")
_HEADER: Final = "header.json"


def read_inspect(path: Path, *, category: str = "category") -> EvaluationLog:
    """The log with all its samples.

    Args:
        path: ending with `.eval` or `.json`.
        category: the field of a sample's metadata that names its category.

    Raises:
        DataError: not such a log, damaged, unfinished, or beyond the limits.
    """
    where = str(path)
    if path.suffix == ".eval":
        with open_zip(path) as members:
            if _HEADER not in members.names:
                raise _unfinished(where, "no header.json")
            header = loads(members.read(_HEADER), f"{where}, {_HEADER}")
            found = (
                (f"{where}, {shown(name)}", loads(members.read(name), f"{where}, {shown(name)}"))
                for name in members.names
                if _SAMPLE.fullmatch(name)
            )
            samples = list(_samples(found, category))
    else:
        header = loads(read_bounded(path, MAX_JSON), where)
        listed = typed(header, "samples", list, where)
        samples = list(_samples(((f"{where}, sample {i}", one) for i, one in enumerate(listed)), category))
    return _log(path, header, samples)


def _log(path: Path, header: Any, samples: list[LoggedSample]) -> EvaluationLog:
    where = str(path)
    status = typed(header, "status", str, where)
    if status != "success" or header.get("invalidated") is True:
        raise _unfinished(where, f"status {shown(status)}" if status != "success" else "marked as invalid")
    spec = typed(header, "eval", dict, where)
    dataset = spec.get("dataset")
    _require_all(where, dataset, samples)
    plan = header.get("plan")
    steps = plan.get("steps") if isinstance(plan, dict) else None
    scorers = spec.get("scorers")
    return EvaluationLog(
        path.name, sha256_file(path), "inspect",
        task=typed(spec, "task", str, where),
        task_version=optional_text(spec, "task_version"),
        dataset=optional_text(dataset, "name"),
        model=optional_text(spec, "model"),
        settings={
            "task_args": spec.get("task_args"), "solver": steps,
            "generation": [plan.get("config") if isinstance(plan, dict) else None, spec.get("model_generate_config")],
        },
        scorers={
            str(one.get("name")): [one.get("options"), one.get("metadata")]
            for one in (scorers if isinstance(scorers, list) else []) if isinstance(one, dict)
        },
        samples=samples,
    )  # fmt: skip


def _require_all(where: str, dataset: Any, samples: list[LoggedSample]) -> None:
    """Every id that the header lists has a sample."""
    listed = dataset.get("sample_ids") if isinstance(dataset, dict) else None
    if isinstance(listed, list):
        missing = len({_id(one) for one in listed if isinstance(one, str | int)} - {s.id for s in samples})
        if missing:
            raise _unfinished(where, f"{missing} of {len(listed)} samples are missing")


def _unfinished(where: str, what: str) -> DataError:
    return DataError(f"{where}: an unfinished evaluation: {what}", remedy="run it to its end (inspect eval-retry)")


def _samples(found: Iterator[tuple[str, Any]], category: str) -> Iterator[LoggedSample]:
    seen = set()
    for where, one in found:
        made = _sample(where, one, category)
        if (made.id, made.epoch) in seen:
            raise bad_log(where, "its id and epoch occur twice")
        seen.add((made.id, made.epoch))
        yield made


def _sample(where: str, one: Any, category: str) -> LoggedSample:
    given = one.get("id") if isinstance(one, dict) else None
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise bad_log(where, "a sample without an id")
    metadata = one.get("metadata")
    asked = _without_ids(one.get("input"))
    lost = next((name for name in ("error", "limit") if one.get(name)), None)
    return LoggedSample(
        _id(given), typed(one, "epoch", int, where),
        prompt=_prompt(where, asked),
        content_sha256=_hash([asked, one.get("target"), one.get("choices")]),
        scores=_scores(where, one),
        category=optional_text(metadata, category),
        lost=lost,
    )  # fmt: skip


def _id(given: str | int) -> str:
    return str(given)[:1_000] if isinstance(given, str) else f"{given:d}"


def _without_ids(asked: Any) -> Any:
    """An input whose messages have role and content alone."""
    if not isinstance(asked, list):
        return asked
    return [{k: m.get(k) for k in ("role", "content")} if isinstance(m, dict) else m for m in asked]


def _prompt(where: str, asked: Any) -> str:
    if isinstance(asked, str):
        return asked
    if isinstance(asked, list):
        contents = [m["content"] for m in asked if isinstance(m, dict)]
        return "\n".join(c if isinstance(c, str) else _text(c) for c in contents)
    raise bad_log(where, "an input that is neither text nor messages")


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "\n".join(str(p["text"]) for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def _scores(where: str, one: dict[str, Any]) -> dict[str, Any]:
    """Values by scorer; of a scorer that gives several, each as `scorer.name`."""
    scores: dict[str, Any] = {}
    given = one.get("scores") or {}
    if not isinstance(given, dict):
        raise bad_log(where, "scores that are no object")
    for name, score in given.items():
        value = score.get("value") if isinstance(score, dict) else None
        if isinstance(value, dict):
            scores |= {f"{name}.{part}": inner for part, inner in value.items()}
        else:
            scores[name] = value
    return scores


def _hash(content: Any) -> str:
    return sha256_text(repr(_ordered(content)))


def _ordered(value: Any) -> Any:
    """Objects as sorted pairs, so that the order of keys does not count; NaN and all else by their repr."""
    if isinstance(value, dict):
        return [(key, _ordered(value[key])) for key in sorted(value)]
    return [_ordered(inner) for inner in value] if isinstance(value, list) else value
