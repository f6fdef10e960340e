"""The exception tree: every refusal says what happened and what to do, and carries the command's exit code."""

import functools
from typing import ClassVar

from holdfast.core.redaction import redact_text


class HoldfastError(Exception):
    """What is wrong, where, what was expected (one line); what to do about it (one line); both without secrets."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, remedy: str) -> None:
        self.what = redact_text(what)
        self.remedy = redact_text(remedy)
        super().__init__(self.what)

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes; the default would lose the remedy."""
        return functools.partial(type(self), remedy=self.remedy), (self.what,)

    def __str__(self) -> str:
        return f"{self.what}\n  What to do: {self.remedy}"


class ConfigError(HoldfastError, ValueError):
    """A setting is unknown, out of range, or unsupported in this combination."""

    exit_code = 2


class UnsupportedError(ConfigError):
    """A combination in which the guarantee would not be computed correctly, refused by name."""


class DataError(HoldfastError, ValueError):
    """Input data is malformed, empty, fully masked, or leaks between splits."""

    exit_code = 3


class InfeasibleError(HoldfastError):
    """The constraint does not hold at the start, cannot be restored, or cannot be certified."""

    exit_code = 4


class NumericalError(HoldfastError, ArithmeticError):
    """Non-finite numbers: the step was discarded, and it happened too often."""

    exit_code = 5


class CheckpointError(HoldfastError):
    """A checkpoint, reference table or fingerprint is damaged or belongs to something else."""

    exit_code = 6


class ResourceError(HoldfastError):
    """Out of memory or disk, or an optional package is not installed."""

    exit_code = 7
