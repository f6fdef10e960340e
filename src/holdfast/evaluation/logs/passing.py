"""Whether a logged score is a pass.

C = 1, P = 1/2, I = N = 0, yes = true = 1, no = false = 0; numbers are themselves. Passed: value >= threshold. Without a
threshold a pass is 1, and numbers other than 0, 1/2 (of P) and 1 are refused: where they pass must be said.
"""

from __future__ import annotations

import math
from typing import Any, Final

from holdfast.core.errors import ConfigError, DataError
from holdfast.evaluation.logs.hostile_json import bad_log, shown

_WORDS: Final = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def require_threshold(threshold: float | None) -> None:
    """Refuse a threshold that is no finite number."""
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"threshold = {threshold!r}, expected a number", remedy="give, say, --set threshold=0.5")


def passed(value: Any, threshold: float | None, where: str) -> bool:
    """Whether the value of a score passes.

    Raises:
        DataError: NaN or no value of a score; or a number that needs a threshold.
    """
    number = _number(value, where)
    if threshold is not None:
        return number >= threshold
    if not isinstance(value, str) and number not in (0.0, 1.0):
        raise DataError(
            f"{where}: the score is {number:g}, neither 0 nor 1",
            remedy="say from which value on it passes: --set threshold=VALUE",
        )
    return number == 1.0


def _number(value: Any, where: str) -> float:
    if isinstance(value, str):
        if value not in _WORDS:
            raise bad_log(where, f"the score is {shown(value)}, expected C, P, I, N or a number")
        return _WORDS[value]
    if not isinstance(value, bool | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        what = "missing" if value is None else f"{type(value).__name__}, not a finite number"
        raise bad_log(where, f"the score is {what}")
    if abs(value) > 1e300:
        raise bad_log(where, "the score is too large a number")
    return float(value)
