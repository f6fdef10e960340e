"""The public surface: names and commands are a list that grows on purpose."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

import holdfast as hf
from holdfast.cli.main import app

PUBLIC = [
    "ChanceConstraint", "SafeSFTConfig", "SafeSFTTrainer", "SafetyFilter", "barrier_multiplier", "load_config", "run",
]  # fmt: skip
COMMANDS = ["check", "demo", "ls", "train"]


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_public_names():
    assert hf.__all__ == PUBLIC
    assert dir(hf) == PUBLIC
    for name in PUBLIC:
        assert getattr(hf, name).__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'certifi'"):
        hf.certifi  # noqa: B018


def test_commands():
    group = typer.main.get_command(app)
    assert sorted(group.commands) == COMMANDS
    for name, command in group.commands.items():
        assert "Example:" in (command.help or ""), f"holdfast {name} --help shows no example"


@pytest.mark.parametrize("code", ["import holdfast", "import holdfast.cli.main"])
def test_importing_is_light(code):
    assert not {"torch", "transformers", "trl"} & imported_by(code)


def test_the_light_import_test_can_fail():
    assert "torch" in imported_by("import holdfast\nholdfast.SafetyFilter")
