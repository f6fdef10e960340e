"""What reaches the terminal: without control characters and secrets, results on stdout, the rest on stderr."""

import json
import logging
import re
import sys
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from holdfast.core.errors import HoldfastError, InfeasibleError
from holdfast.core.redaction import redact, redact_text

# CSI sequences, then OSC/DCS/APC/PM/SOS strings up to their terminator, then any other two-character escape.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)|\x1b."
)
_CHATTY = r"(torch|transformers|trl|peft|accelerate|datasets|huggingface_hub)\b"


def clean(text: str) -> str:
    """Text without escape sequences, control characters and bidirectional overrides; newlines stay."""
    lines = _ESCAPES.sub("", text).split("\n")
    return "\n".join("".join(c for c in line if unicodedata.category(c) not in {"Cc", "Cf", "Cs"}) for line in lines)


def shown(text: str) -> str:
    """Text as the terminal gets it: cleaned first, since an invisible character could split a secret in two."""
    return redact_text(clean(text))


def say(text: str) -> None:
    """Print a line of the result to stdout."""
    print(_encodable(shown(text), sys.stdout.encoding))


def note(text: str) -> None:
    """Print a line about the work to stderr."""
    print(_encodable(shown(text), sys.stderr.encoding), file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """Print strict JSON to stdout, ASCII only and without secrets."""
    print(json.dumps(redact(value), indent=2, allow_nan=False))


def refuse(error: HoldfastError, *, json: bool = False) -> None:
    """Print cause and remedy to stderr; with `json` also to stdout, where the result would be."""
    note(f"error: {error.what}\n  What to do: {error.remedy}")
    if json:
        say_json(refusal_json(error))


def refusal_json(error: HoldfastError) -> dict[str, Any]:
    return {"error": error.what, "remedy": error.remedy, "exit_code": error.exit_code}


def require_none(refusals: Sequence[HoldfastError]) -> None:
    """After the result was printed: refuse what was found, and exit with the first one's code."""
    for error in refusals:
        refuse(error)
    if refusals:
        raise typer.Exit(refusals[0].exit_code)


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """A context in which Ctrl-C ends the command with exit code 130, and says how it goes on."""
    try:
        yield
    except KeyboardInterrupt as error:
        note(f"interrupted: {advice}")
        raise typer.Exit(130) from error


def require_verdict(passed: bool) -> None:
    if not passed:
        raise typer.Exit(InfeasibleError.exit_code)


def note_loading() -> None:
    """Say on a terminal that torch is loaded now: it takes many seconds in which nothing else is to be seen."""
    if sys.stderr.isatty() and "torch" not in sys.modules:
        note("loading torch ...")


def quiet_libraries() -> None:
    """Silence bars and notices of the libraries below us; show our own messages as plain lines."""
    note_loading()
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", module=_CHATTY)
    for name in ("holdfast", "holdfast_lab"):
        logger = logging.getLogger(name)
        logger.handlers = [_NoteHandler()]
        logger.setLevel(logging.INFO)
        logger.propagate = False


class _NoteHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        note(f"{prefix}{record.getMessage()}")


def _encodable(text: str, encoding: str | None) -> str:
    """Replace what the terminal's encoding lacks, so that a foreign letter never ends a run."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def size(count: float) -> str:
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
