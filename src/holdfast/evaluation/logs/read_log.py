"""An evaluation log by its ending."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_file
from holdfast.evaluation.logs.inspect_log import read_inspect
from holdfast.evaluation.logs.lm_eval_log import read_lm_eval
from holdfast.evaluation.logs.sample import EvaluationLog

_READERS: Final = {".eval": read_inspect, ".json": read_inspect, ".jsonl": read_lm_eval}


def read_log(path: Path, *, category: str = "category") -> EvaluationLog:
    """An evaluation log by its ending; a `.json` is one of inspect's.

    Raises:
        DataError: another ending, or a log that cannot be read.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(
            f"{path}: an unknown kind of log", remedy="give an inspect log (.eval, .json) or lm-eval's samples_*.jsonl"
        )
    try:
        hashed = sha256_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy="give the path of a log file") from None
    found = reader(path, category=category)
    if found.sha256 != hashed:
        raise DataError(f"{path} changed while it was read", remedy="wait until the evaluation has ended")
    return found
