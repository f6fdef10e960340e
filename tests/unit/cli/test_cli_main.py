"""The entry point: exit codes, help, and no heavy imports before they are needed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
import torch

from holdfast.cli.main import app, main
from holdfast.core import errors
from holdfast.core.version import VERSION

HEAVY = ("torch", "trl", "transformers", "peft", "datasets", "numpy", "scipy")
COMMANDS = ("check", "train", "study", "bench", "ls")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; from holdfast.cli.main import main; sys.argv = ['holdfast', *sys.argv[1:]]\n"
        "try: main()\n"
        f"finally: print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example(holdfast, command):
    code, out, _ = holdfast(command, "--help")
    assert code == 0
    assert f"holdfast {command} " in out.split("Example:")[1]


def test_the_list_of_commands_has_whole_sentences(holdfast):
    out = holdfast("--help")[1]
    assert "..." not in out.split("Commands:")[1]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("holdfast rep", {"report"}),
        ("holdfast cert", {"certify", "certify-counts"}),
        ("holdfast demo --fa", {"--fast"}),
    ],
)
def test_a_shell_completes_commands_and_options(typed, offered):
    """As the script of `holdfast --install-completion` asks in bash."""
    asked = {"_HOLDFAST_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "import sys; sys.argv = ['holdfast']; from holdfast.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered


def test_version(holdfast):
    assert holdfast("--version")[:2] == (0, f"{VERSION}\n")


@pytest.mark.parametrize("arguments", [["frobnicate"], ["train"], ["train", "--no-such-option"], ["ls", "nothing"]])
def test_usage_errors_exit_2(holdfast, arguments):
    code, _, err = holdfast(*arguments)
    assert code == 2
    assert "Usage:" in err


@pytest.mark.parametrize("kind", ["judges", "majorizers"])
def test_ls_lists_names_with_a_summary(holdfast, kind):
    code, out, _ = holdfast("ls", kind)
    assert code == 0
    code, as_json, _ = holdfast("ls", kind, "--json")
    rows = json.loads(as_json)
    assert len(rows) == len(out.splitlines())
    assert all(row["name"] and row["summary"] for row in rows)
    assert {"refusal"} <= {r["name"] for r in rows} or {"ramp", "cvar"} <= {r["name"] for r in rows}


@pytest.fixture
def failing(monkeypatch, capsys):
    """The exit code and stderr of the command line when its command raises."""

    def call(error: BaseException) -> tuple[int, str]:
        def command(*_args, **_kwargs):
            raise error

        monkeypatch.setattr("holdfast.cli.main.app", command)
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigError, 2), (errors.UnsupportedError, 2), (errors.DataError, 3), (errors.InfeasibleError, 4),
        (errors.NumericalError, 5), (errors.CheckpointError, 6), (errors.ResourceError, 7),
    ],
)  # fmt: skip
def test_a_refusal_is_two_lines_and_its_exit_code(failing, kind, code):
    assert failing(kind("the cause", remedy="the remedy")) == (code, "error: the cause\n  What to do: the remedy\n")


def test_with_json_a_refusal_is_on_stdout_too(holdfast, tmp_path):
    code, out, err = holdfast("report", tmp_path / "nothing", "--json")
    found = json.loads(out)
    assert (code, found["exit_code"]) == (2, 2)
    assert err == f"error: {found['error']}\n  What to do: {found['remedy']}\n"
    assert holdfast("report", tmp_path / "nothing")[:2] == (2, "")


def test_with_json_a_mistyped_option_is_on_stdout_too(holdfast):
    code, out, err = holdfast("ls", "--no-such-option", "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], sorted(found)) == (2, 2, ["error", "exit_code", "remedy"])
    assert "--no-such-option" in found["error"]
    assert "Usage:" in err


def test_with_json_only_the_first_of_several_processes_speaks(holdfast, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    code, out, err = holdfast("report", tmp_path / "nothing", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
    ],
)
def test_running_out_of_disk_or_memory_exits_7(failing, error):
    code, err = failing(error)
    assert code == 7
    assert "What to do: " in err


@pytest.mark.parametrize(("free", "named"), [(1, True), (70, False)])
def test_memory_that_other_processes_hold_is_named(failing, monkeypatch, free, named):
    """Of 100 GiB this process has 10."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 * 2**30)
    code, err = failing(torch.OutOfMemoryError("CUDA out of memory."))
    assert code == 7
    assert ("other processes hold 89 of the GPU's 100 GiB" in err) is named
    assert ("CUDA_VISIBLE_DEVICES" in err) is named
    assert "lower train.per_device_train_batch_size" in err
    assert "other processes" not in failing(MemoryError())[1]


@pytest.mark.parametrize("kind", [PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError])
def test_a_path_that_may_not_be_used_is_named_and_exits_7(failing, kind):
    numbers = {"PermissionError": errno.EACCES, "NotADirectoryError": errno.ENOTDIR}
    number = {**numbers, "IsADirectoryError": errno.EISDIR, "FileExistsError": errno.EEXIST}[kind.__name__]
    code, err = failing(kind(number, os.strerror(number), "/some/where"))
    assert code == 7
    assert err.startswith(f"error: /some/where: {os.strerror(number).lower()}\n  What to do: ")


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), OSError(errno.EIO, "broken disk"), OSError(errno.EACCES, "no path")]
)
def test_a_bug_keeps_its_traceback(monkeypatch, error):
    def command(*_args, **_kwargs):
        raise error

    monkeypatch.setattr("holdfast.cli.main.app", command)
    with pytest.raises(type(error)):
        main()


def test_the_app_has_the_documented_commands():
    assert {command.callback.__name__ for command in app.registered_commands} >= set(COMMANDS)


@pytest.mark.parametrize(("given", "set_to"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_told_otherwise(given, set_to):
    code = (
        "import os, sys; sys.argv = ['holdfast', '--version']; from holdfast.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\nprint(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | ({} if given is None else {"OMP_WAIT_POLICY": given}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == set_to
