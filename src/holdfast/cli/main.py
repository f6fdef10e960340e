"""The `holdfast` command: parses, calls, prints, and turns every refusal into an exit code.

Commands import torch and TRL themselves, so that `holdfast --help` answers at once.
"""

from __future__ import annotations

import errno
import importlib.metadata
import sys
from typing import Annotated

import typer

from holdfast.cli.align import align
from holdfast.cli.audit import audit
from holdfast.cli.bench import bench
from holdfast.cli.certify import certify
from holdfast.cli.certify_counts import certify_counts
from holdfast.cli.check import check
from holdfast.cli.compare import compare
from holdfast.cli.demo import demo
from holdfast.cli.evaluate import evaluate
from holdfast.cli.init import init
from holdfast.cli.judge import judge
from holdfast.cli.ls import ls
from holdfast.cli.old_spellings import require_new_spelling
from holdfast.cli.plan import plan
from holdfast.cli.report import report
from holdfast.cli.screen import screen
from holdfast.cli.study import study
from holdfast.cli.terminal import refuse, say
from holdfast.cli.train import train
from holdfast.cli.usage import Commands
from holdfast.cli.verify import verify
from holdfast.core.errors import ConfigError, HoldfastError, ResourceError

CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""What the system says of a path that is the user's to change."""
_LOCALE = "set a UTF-8 locale (LC_ALL=C.UTF-8) or PYTHONUTF8=1, or use names of ASCII letters"

app = typer.Typer(
    name="holdfast",
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo)
app.command()(init)
app.command()(align)
app.command()(screen)
app.command()(check)
app.command()(train)
app.command()(audit)
app.command()(certify)
app.command()(verify)
app.command()(certify_counts)
app.command()(evaluate)
app.command()(report)
app.command()(plan)
app.command()(compare)
app.command()(study)
app.command()(bench)
app.command()(ls)
app.add_typer(judge, name="judge")


def _version(wanted: bool) -> None:
    if wanted:
        say(importlib.metadata.version("holdfast"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune a language model while at most a share alpha of the safety examples degrade by more than tau.

    \b
    Example:
      holdfast check run.yaml && holdfast train run.yaml

    \b
    Exit codes: 0 ok, 2 usage or settings, 3 data, 4 infeasible or not certified, 5 numerical,
    6 checkpoint or fingerprint, 7 memory, disk or a missing package, 130 interrupted.
    """


def main() -> None:
    """Entry point: run the command; a refusal prints its cause and its remedy and sets the exit code.

    Any other exception is a bug and keeps its traceback (exit code 1).
    """
    try:
        require_new_spelling(sys.argv[1:])
        _require_text(sys.argv[1:])
        app()
    except HoldfastError as error:
        refuse(error)
        sys.exit(error.exit_code)
    except Exception as error:
        refusal = _shortage(error) or _closed_path(error) or _other_locale(error)
        if refusal is None:
            raise
        refuse(refusal)
        sys.exit(refusal.exit_code)


def _require_text(arguments: list[str]) -> None:
    """Refuse an argument with bytes that are no text in this locale: libraries fail on it when work has been done."""
    for argument in arguments:
        shown = argument.encode("ascii", "replace").decode()
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ConfigError(
                f"the argument {shown!r} is no text in this locale ({sys.getfilesystemencoding()})", remedy=_LOCALE
            )


def _other_locale(error: Exception) -> ConfigError | None:
    """The refusal that stands for a path that this locale cannot name; None for any other exception."""
    if not isinstance(error, UnicodeEncodeError):
        return None
    return ConfigError(f"a path cannot be written in this locale ({error.encoding})", remedy=_LOCALE)


def _closed_path(error: Exception) -> ResourceError | None:
    """The refusal that stands for a path that may not be used, or is of another kind; None for any other exception."""
    if not isinstance(error, OSError) or error.errno not in CLOSED or error.filename is None:
        return None
    return ResourceError(
        f"{error.filename}: {(error.strerror or str(error)).lower()}",
        remedy="name a place that you may read and write (output_dir, --output), or change its permissions",
    )


def _shortage(error: Exception) -> ResourceError | None:
    """The refusal that stands for running out of disk or memory, None for any other exception."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left on the disk: {error}", remedy="free disk space, then use --resume")
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return ResourceError(
            "out of memory",
            remedy="set train.gradient_checkpointing: true or train.step: two_pass (one pass holds both batches), or "
            "lower train.per_device_train_batch_size, safety_micro_batch_size or max_length",
        )
    return None
