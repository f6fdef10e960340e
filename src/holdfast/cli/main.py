"""The `holdfast` command. Commands import torch and TRL themselves, so that `holdfast --help` answers at once."""

import errno
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from holdfast.cli.align import align
from holdfast.cli.audit import audit
from holdfast.cli.certify import certify, verify
from holdfast.cli.check import check
from holdfast.cli.compare import compare
from holdfast.cli.demo import demo, init
from holdfast.cli.ls import ls
from holdfast.cli.options import Opt
from holdfast.cli.plan import certify_counts, plan
from holdfast.cli.report import report
from holdfast.cli.screen import screen
from holdfast.cli.terminal import refusal_json, refuse, say, say_json, shown
from holdfast.cli.train import train
from holdfast.core.errors import ConfigError, HoldfastError, ResourceError
from holdfast.core.version import VERSION
from holdfast.models.library_errors import held_by_others, out_of_memory

CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""What the system says of a path that is the user's to change."""
_LOCALE = "set a UTF-8 locale (LC_ALL=C.UTF-8) or PYTHONUTF8=1, or use names of ASCII letters"

MUCH = 0.2  # of a GPU's memory
OLD_CERTIFY = {
    "--safety": "--prompts FILE",
    "--verify": "holdfast verify PATH",
    "--expect": "holdfast verify PATH --expect SHA256",
    **dict.fromkeys(("--regressions", "--n"), "holdfast certify-counts K N"),
    "--unit": "--by kl, or --by likelihood with --set unit=nll_sum",
    "--columns": "--set columns.prompt=NAME",
    "--safety-revision": "--set revision=VALUE",
    "--allow-tau-below-noise": "--set allow_tau_below_noise=true",
} | {
    f"--{name.replace('_', '-')}": f"--set {name}=VALUE"
    for name in (
        "first_k", "template", "tokenizer", "max_length", "before_revision", "after_revision", "split", "subset",
        "max_new_tokens",
    )
}  # fmt: skip
"""Options of the first release, each with what it is called now."""


class Commands(TyperGroup):
    """The group of commands. Complaints quote what was typed: they are cleaned and redacted like every other line."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _redacted():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _redacted():
            return super().invoke(ctx)


@contextmanager
def _redacted() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # A ClickException, which typer takes from click or brings along, depending on its version.
        if hasattr(error, "format_message") and hasattr(error, "message"):
            error.message = shown(str(error.message))
            if _wants_json():
                usage = ConfigError(error.format_message(), remedy="read `holdfast COMMAND --help`")
                say_json(refusal_json(usage))
        raise


def _wants_json() -> bool:
    """Whether stdout is to hold one JSON document; of several processes the first speaks for all."""
    return "--json" in sys.argv[1:] and os.environ.get("RANK", "0") == "0"


app = typer.Typer(
    name="holdfast", cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False,
    rich_markup_mode=None,
)  # fmt: skip
for _command in (
    demo, init, align, screen, check, train, audit, certify, verify, certify_counts, report, plan, compare, ls,
):  # fmt: skip
    app.command()(_command)
for _entry_point in importlib.metadata.entry_points(group="holdfast.commands"):
    _loaded = _entry_point.load()
    if isinstance(_loaded, typer.Typer):
        app.add_typer(_loaded, name=_entry_point.name)
    else:
        app.command(_entry_point.name)(_loaded)


def _version(wanted: bool) -> None:
    if wanted:
        say(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, Opt("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
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
    """Run the command; a refusal prints cause and remedy, with an exit code; a bug keeps its traceback (code 1).

    With --json a refusal is on stdout too, as the one document there. Commands that refuse after their result was
    printed do so themselves (`require_none`).
    """
    # Before torch is loaded: threads that spin while they wait take the time of whatever else runs on a machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _require_new_spelling(sys.argv[1:])
        _require_text(sys.argv[1:])
        app()
    except Exception as error:
        refusal = error if isinstance(error, HoldfastError) else _refusal(error)
        if refusal is None:
            raise
        refuse(refusal, json=_wants_json())
        sys.exit(refusal.exit_code)


def _require_new_spelling(arguments: list[str]) -> None:
    if arguments[:1] == ["report"] and "--tables" in arguments:
        what = "holdfast report --tables is a command of its own since version 0.2"
        raise ConfigError(what, remedy="write holdfast tables STUDY")
    for name in (word.partition("=")[0] for word in arguments if arguments[0] == "certify"):
        if name in OLD_CERTIFY:
            what = f"holdfast certify {name} is spelled otherwise since version 0.2"
            raise ConfigError(what, remedy=f"write {OLD_CERTIFY[name]}; holdfast certify --help")


def _require_text(arguments: list[str]) -> None:
    """Refuse an argument with bytes that are no text in this locale: libraries fail on it when work has been done."""
    for argument in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            quoted = repr(argument.encode("ascii", "replace").decode())
            what = f"the argument {quoted} is no text in this locale ({sys.getfilesystemencoding()})"
            raise ConfigError(what, remedy=_LOCALE)


def _refusal(error: Exception) -> HoldfastError | None:
    """The refusal that stands for a shortage, a closed path or a foreign locale; None where the exception is a bug."""
    if isinstance(error, UnicodeEncodeError):
        return ConfigError(f"a path cannot be written in this locale ({error.encoding})", remedy=_LOCALE)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left on the disk: {error}", remedy="free disk space, then use --resume")
    if isinstance(error, OSError) and error.errno in CLOSED and error.filename is not None:
        remedy = "name a place that you may read and write (output_dir, --output), or change its permissions"
        return ResourceError(f"{error.filename}: {(error.strerror or str(error)).lower()}", remedy=remedy)
    return _out_of_memory(error) if out_of_memory(error) else None


def _out_of_memory(error: Exception) -> ResourceError:
    """Names the memory that other processes hold, where it is much."""
    on_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's, which need not be imported
    others, total = (held_by_others() if on_gpu else None) or (0.0, 1.0)
    what = "out of memory"
    remedy = (
        "set train.gradient_checkpointing: true or train.step: two_pass (one pass holds both batches), or "
        "lower train.per_device_train_batch_size, safety_micro_batch_size or max_length"
    )
    if others > MUCH * total:
        what += f": other processes hold {others:.0f} of the GPU's {total:.0f} GiB"
        remedy = f"wait for them (nvidia-smi shows them) or set CUDA_VISIBLE_DEVICES; or {remedy}"
    return ResourceError(what, remedy=remedy)
