"""Logs of inspect: `.eval` (a ZIP of JSON) and `.json`.

A sample is its id and epoch. What it asks for is its input, target and choices; message ids are drawn anew in every run
and do not count. A sample with an error, or one that ran into a limit, has no result.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_file, sha256_text
from holdfast.judging.logs import evaluation_log as log
from holdfast.judging.logs.evaluation_log import EvaluationLog, LoggedSample, bad_log, inner, loads, typed
from holdfast.judging.logs.zip_members import open_zip

MAX_JSON: Final = 256 << 20
_SAMPLE: Final = re.compile(r"samples/[^/\\]+\.json")
_HEADER: Final = "header.json"


def read_inspect(path: Path) -> EvaluationLog:
    """The log in an `.eval` or `.json`."""
    where = str(path)
    if path.suffix == ".eval":
        with open_zip(path) as members:
            if _HEADER not in members.names:
                raise _unfinished(where, "no header.json")
            header = loads(members.read(_HEADER), f"{where}, {_HEADER}")
            named = ((f"{where}, {log.shown(name)}", name) for name in members.names if _SAMPLE.fullmatch(name))
            samples = _samples(((place, loads(members.read(name), place)) for place, name in named))
    else:
        header = loads(log.read_bounded(path, MAX_JSON), where)
        listed = enumerate(typed(header, "samples", list, where))
        samples = _samples(((f"{where}, sample {i}", sample) for i, sample in listed))
    status = typed(header, "status", str, where)
    if status != "success" or header.get("invalidated") is True:
        raise _unfinished(where, f"status {log.shown(status)}" if status != "success" else "marked as invalid")
    spec = typed(header, "eval", dict, where)
    _require_all(where, inner(spec, "dataset", "sample_ids"), samples)
    scorers = spec.get("scorers")
    return EvaluationLog(
        path.name, sha256_file(path), "inspect",
        task=typed(spec, "task", str, where),
        task_version=log.optional_text(spec, "task_version"),
        dataset=log.optional_text(spec.get("dataset"), "name"),
        model=log.optional_text(spec, "model"),
        settings={
            "task_args": spec.get("task_args"), "solver": inner(header, "plan", "steps"),
            "generation": [inner(header, "plan", "config"), spec.get("model_generate_config")],
        },
        scorers={
            str(scorer.get("name")): [scorer.get("options"), scorer.get("metadata")]
            for scorer in (scorers if isinstance(scorers, list) else []) if isinstance(scorer, dict)
        },
        samples=samples,
    )  # fmt: skip


def _require_all(where: str, listed: Any, samples: list[LoggedSample]) -> None:
    if isinstance(listed, list):
        missing = len({_id(given) for given in listed if isinstance(given, str | int)} - {s.id for s in samples})
        if missing:
            raise _unfinished(where, f"{missing} of {len(listed)} samples are missing")


def _unfinished(where: str, what: str) -> DataError:
    return DataError(f"{where}: an unfinished evaluation: {what}", remedy="run it to its end (inspect eval-retry)")


def _samples(logged: Iterable[tuple[str, Any]]) -> list[LoggedSample]:
    samples: dict[tuple[str, int], LoggedSample] = {}
    for where, row in logged:
        sample = _sample(where, row)
        if samples.setdefault((sample.id, sample.epoch), sample) is not sample:
            raise bad_log(where, "its id and epoch occur twice")
    return list(samples.values())


def _sample(where: str, row: Any) -> LoggedSample:
    given = inner(row, "id")
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise bad_log(where, "a sample without an id")
    asked = row.get("input")
    if isinstance(asked, list):  # of messages, role and content alone
        asked = [{key: m.get(key) for key in ("role", "content")} if isinstance(m, dict) else m for m in asked]
    content = [asked, row.get("target"), row.get("choices")]
    return LoggedSample(
        _id(given), typed(row, "epoch", int, where),
        prompt=_prompt(where, asked),
        content_sha256=sha256_text(repr(_ordered(content))),
        scores=_scores(where, row.get("scores") or {}),
        category=log.optional_text(row.get("metadata"), "category"),
        lost=next((name for name in ("error", "limit") if row.get(name)), None),
    )  # fmt: skip


def _id(given: str | int) -> str:
    return str(given)[:1_000] if isinstance(given, str) else f"{given:d}"


def _prompt(where: str, asked: Any) -> str:
    if isinstance(asked, str):
        return asked
    if not isinstance(asked, list):
        raise bad_log(where, "an input that is neither text nor messages")
    contents = [message["content"] for message in asked if isinstance(message, dict)]
    return "\n".join(content if isinstance(content, str) else _parts(content) for content in contents)


def _parts(content: Any) -> str:
    texts = [inner(part, "text") for part in (content if isinstance(content, list) else [])]
    return "\n".join(text for text in texts if isinstance(text, str))


def _scores(where: str, given: Any) -> dict[str, Any]:
    """Values by scorer; of a scorer that gives several, each as `scorer.name`."""
    if not isinstance(given, dict):
        raise bad_log(where, "scores that are no object")
    scores: dict[str, Any] = {}
    for name, score in given.items():
        value = inner(score, "value")
        scores |= {f"{name}.{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
    return scores


def _ordered(value: Any) -> Any:
    """Objects as sorted pairs, so that the order of keys does not count; NaN and all else by their repr."""
    if isinstance(value, dict):
        return [(key, _ordered(value[key])) for key in sorted(value)]
    return [_ordered(part) for part in value] if isinstance(value, list) else value
