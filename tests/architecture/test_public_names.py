"""The public surface: names and commands are a list that grows on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

import holdfast as hf
from holdfast.cli.main import app
from holdfast.training.hooks import DEFENSES, make_defense

PUBLIC = [
    "Audit", "Certificate", "CertificateRecord", "ChanceConstraint", "Defense", "PromptSet", "RunConfig",
    "RunResult", "SafeDPOConfig", "SafeDPOTrainer", "SafeGRPOConfig", "SafeGRPOTrainer", "SafeSFTConfig",
    "SafeSFTTrainer", "SafetyFilter", "Screening", "ScreeningSettings", "__version__", "audit",
    "barrier_multiplier", "certify", "certify_counts", "errors", "events", "load_config", "plan",
    "register_defense", "report", "run", "screen", "verify",
]  # fmt: skip
COMMANDS = [
    "align", "audit", "bench", "certify", "certify-counts", "check", "compare", "demo", "evaluate", "init", "judge",
    "ls", "plan", "report", "screen", "study", "tables", "train", "verify",
]  # fmt: skip


SHOW = "import sys; print(' '.join(sys.modules))"


def imported_by(code: str, *first: Path) -> set[str]:
    """Modules loaded at the end; those of the folders `first` are found before any other."""
    paths = [*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{SHOW}"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    return set(done.stdout.split())


@pytest.fixture
def ends_at_torch(tmp_path) -> Path:
    """A folder whose torch shows what is loaded and ends the process: the real one takes seconds."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"{SHOW}; sys.stdout.flush(); import os; os._exit(0)")
    return tmp_path


def test_public_names():
    assert hf.__all__ == PUBLIC
    assert dir(hf) == PUBLIC
    for name in PUBLIC:
        assert getattr(hf, name).__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'certifi'"):
        hf.certifi  # noqa: B018


def test_a_defense_is_registered_by_name_and_modules_are_reached_from_the_top(monkeypatch):
    monkeypatch.setattr(DEFENSES, "_entries", dict(DEFENSES.items()))

    @hf.register_defense("of_this_test")
    class OfThisTest(hf.Defense):
        """Plain SFT."""

        name = "of_this_test"

    assert make_defense("of_this_test").name == "of_this_test"
    assert issubclass(hf.errors.ConfigError, hf.errors.HoldfastError)
    active: object = hf.events.Event.ACTIVE
    assert active == "active"
    assert hf.__version__[0].isdigit()


def test_commands():
    group = typer.main.get_command(app)
    assert sorted(group.commands) == COMMANDS  # type: ignore[attr-defined]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert "Example:" in (command.help or ""), f"holdfast {name} --help shows no example"


@pytest.mark.parametrize("code", ["import holdfast", "import holdfast.cli.main"])
def test_importing_is_light(code):
    assert not {"torch", "transformers", "trl"} & imported_by(code)


def test_the_light_import_test_can_fail(ends_at_torch):
    assert "torch" in imported_by("import holdfast\nholdfast.SafetyFilter", ends_at_torch)


def imported_by_commands(*commands: str, first: Sequence[Path] = ()) -> set[str]:
    """Modules loaded once all commands have run to their ends."""
    return imported_by(
        "import sys\n"
        "from holdfast.cli.main import main\n"
        f"for command in {commands!r}:\n"
        "    sys.argv = ['holdfast', *command.split()]\n"
        "    try:\n        main()\n    except SystemExit as stopped:\n        assert not stopped.code",
        *first,
    )


def test_planning_needs_no_torch():
    """Sample sizes are asked for on a laptop, before anything is installed for training."""
    loaded = imported_by_commands("plan", "plan --n 200 --true-rate 0.02 --power 0.9", "plan --json")
    assert "holdfast.certification.binomial" in loaded
    assert not {"torch", "transformers", "trl", "scipy.stats"} & loaded


def test_the_planning_test_can_fail(ends_at_torch):
    assert "torch" in imported_by_commands("ls majorizers", first=[ends_at_torch])


def test_certifying_a_count_needs_no_torch():
    loaded = imported_by("import holdfast\nassert holdfast.certify_counts(0, 59).certified")
    assert not {"torch", "transformers", "trl", "scipy.stats"} & loaded
