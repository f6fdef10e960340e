"""What readers of evaluation logs give, a log and its samples; and hostile JSON, read with every fault named."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core.errors import DataError

SHOWN = 60  # characters of a foreign name that a message repeats
Kind = TypeVar("Kind")


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
        return sorted({name for sample in self.samples for name in sample.scores})


def shown(value: object) -> str:
    """A foreign value as it may appear in a message: ASCII, escaped, short."""
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def bad_log(where: str, what: str) -> DataError:
    """The refusal of a damaged or foreign log."""
    return DataError(f"{where}: {what}", remedy="give a log that inspect or lm-eval wrote to its end, unchanged")


def require(holds: object, where: str, what: str) -> None:
    if not holds:
        raise bad_log(where, what)


def unreadable(path: Path, error: OSError) -> DataError:
    """The refusal of a file that cannot be opened."""
    return DataError(f"{path} cannot be read: {error.strerror}", remedy="give the path of a log file")


def loads(data: bytes | str, where: str) -> Any:
    """Any JSON; NaN and infinity are refused where a score has them."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_log(where, f"not valid JSON ({type(error).__name__})") from None


def read_bounded(path: Path, limit: int) -> bytes:
    """The bytes of a file of at most `limit` bytes."""
    try:
        with path.open("rb") as handle:
            data = handle.read(limit + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) > limit:
        remedy = "convert it to the .eval format (inspect log convert --to eval), or evaluate in parts"
        raise DataError(f"{path} has more than {limit >> 20} MiB", remedy=remedy)
    return data


def typed(holder: object, name: str, kind: type[Kind], where: str) -> Kind:
    """The field of an object, of this type and no other; True is no number."""
    value = inner(holder, name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_log(where, f"{name} is {type(value).__name__}, expected {kind.__name__}")
    return value


def inner(holder: object, *names: str) -> Any:
    """A nested field; None where something on the way is no object."""
    for name in names:
        holder = holder.get(name) if isinstance(holder, dict) else None
    return holder


def optional_text(holder: object, name: str) -> str | None:
    """A field as text; None where it is missing, null, or no text or number."""
    value = inner(holder, name)
    return str(value)[:1_000] if isinstance(value, str | int | float) and not isinstance(value, bool) else None
