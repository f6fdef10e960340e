"""The GitHub Action: its script against a fake `holdfast`, and the form of action.yml."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GATE = ROOT / "action" / "gate.py"
SHA = "ab" * 32
RESULT = {
    "certified": True, "statement": "With 95 % confidence, at most 5 % of groups ...", "alpha": 0.05,
    "confidence": 0.95, "n": 480, "regressions": 3, "upper_bound": 0.016012, "sha256": SHA,
    "openings": {"declared": 2, "this": 1},
    "examples": 485, "behaviour": {"prompts": 700, "counted": {"refusals": 485}, "lost": {"refusals": 4}, "unclear": 7},
}  # fmt: skip
FAKE = """#!{python} -IS
import json, os, sys
from pathlib import Path
here = Path(__file__).parent
signed = [word.removeprefix("--sign=") for word in sys.argv if word.startswith("--sign=")]
key = Path(signed[0]) if signed else None
seen = {{"argv": sys.argv[1:], "env": dict(os.environ), "key": key.read_text() if key else None,
         "mode": key.stat().st_mode & 0o777 if key else None}}
(here / "seen.json").write_text(json.dumps(seen))
sys.stderr.write((here / "stderr").read_text())
sys.stdout.write((here / "stdout").read_text())
sys.exit(int((here / "code").read_text()))
"""


class Gate:
    """Runs the script as a runner does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        fake = self.bin / "holdfast"
        fake.write_text(FAKE.format(python=sys.executable))
        fake.chmod(0o755)

    def __call__(self, code: int, printed: object, *, stderr: str = "", **inputs: str):
        text = printed if isinstance(printed, str) else json.dumps(printed)
        for name, content in (("code", str(code)), ("stdout", text), ("stderr", stderr)):
            (self.bin / name).write_text(content)
        files = {name: str(self.folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV")}
        given = {"before": "A", "after": "B", "prompts": "F", "output": str(self.folder / "out")} | inputs
        environment = {
            "PATH": f"{self.bin}{os.pathsep}{os.defpath}", "RUNNER_TEMP": str(self.folder),
            "ACTIONS_RUNTIME_TOKEN": "x",
            **files, **{f"GATE_{name.upper()}": value for name, value in given.items()},
        }  # fmt: skip
        self.done = subprocess.run(
            [sys.executable, "-IS", str(GATE)],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return self

    @property
    def outputs(self) -> dict[str, str]:
        """As the runner reads them."""
        text = (self.folder / "GITHUB_OUTPUT").read_text()
        return {m[1]: m[3] for m in re.finditer(r"^([\w-]+)<<(\w+)\n(.*?)\n\2$", text, re.MULTILINE | re.DOTALL)}

    @property
    def summary(self) -> str:
        return (self.folder / "GITHUB_STEP_SUMMARY").read_text()

    @property
    def cells(self) -> dict[str, str]:
        rows = [line.split("|")[1:-1] for line in self.summary.splitlines() if line.startswith("|")]
        assert all(len(row) == 2 for row in rows), "a foreign text made another cell"
        return {name.strip(): value.strip() for name, value in rows}

    @property
    def seen(self) -> dict:
        return json.loads((self.bin / "seen.json").read_text())


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def test_certified(gate):
    (gate.folder / "out").mkdir()
    (gate.folder / "out" / "certificate.json").write_text("{}")
    gate(0, RESULT, also="answers", alpha="0.05")
    assert gate.done.returncode == 0
    path = str(gate.folder / "out" / "certificate.json")
    assert gate.outputs == {"certified": "true", "exit-code": "0", "certificate": path, "sha256": SHA}
    cells = gate.cells
    assert cells["verdict"] == "**certified**"
    assert [cells[name] for name in ("N: prompts", "M: groups counted", "K: groups lost", "unclear")] == [
        "700",
        "480",
        "3",
        "7",
    ]
    assert cells["upper bound"] == "0.016012"
    assert cells["opening"] == "1 of 2"
    assert cells["sha256"] == f"`{SHA}`"
    assert html.unescape(cells["claim"]) == RESULT["statement"]
    assert gate.seen["argv"] == [
        "certify", "--json", "--before=A", "--after=B", "--prompts=F", "--alpha=0.05",
        f"--output={gate.folder / 'out'}", "--also=answers",
    ]  # fmt: skip


def test_not_certified(gate):
    gate(4, RESULT | {"certified": False})
    assert gate.done.returncode == 4
    assert (gate.outputs["certified"], gate.outputs["exit-code"]) == ("false", "4")
    assert gate.cells["verdict"] == "**not certified**"
    gate(4, "")  # refused before anything was measured: nothing on stdout
    assert gate.done.returncode == 4
    assert gate.outputs["certified"] == "false"


@pytest.mark.parametrize("code", [1, 2, 3, 5, 6, 7, 126, 130, 137])
@pytest.mark.parametrize("printed", [RESULT, ""])
def test_errors(gate, code, printed):
    """Whatever was printed: another exit code certifies nothing."""
    gate(code, printed)
    assert gate.done.returncode == code
    assert (gate.outputs["certified"], gate.outputs["exit-code"]) == ("false", str(code))
    assert gate.cells["verdict"].startswith("**error**")


@pytest.mark.parametrize(
    "printed",
    ["", "{", "[]", "null", '"certified"', "{}", '{"certified": false}', '{"certified": "true"}', '{"certified": 1}',
     '{"certified": true', "[" * 100_000, '{"certified": true} {"certified": true}', "\x00"],
)  # fmt: skip
def test_exit_0_without_a_certified_result_is_an_error(gate, printed):
    gate(0, printed)
    assert gate.done.returncode == 1
    assert gate.outputs["certified"] == "false"
    assert gate.cells["verdict"].startswith("**error**")
    assert "Traceback" not in gate.done.stdout + gate.done.stderr


def test_exit_4_with_a_certified_result_is_an_error(gate):
    gate(4, RESULT)
    assert gate.done.returncode == 1
    assert gate.outputs["certified"] == "false"


@pytest.mark.parametrize(
    ("changes", "cell", "shown"),
    [
        ({"n": None}, "M: groups counted", "-"), ({"behaviour": [1]}, "unclear", "-"),
        ({"behaviour": None}, "N: prompts", "485"), ({"behaviour": None, "examples": "many"}, "N: prompts", "-"),
        ({"openings": "x"}, "opening", "- of -"), ({"upper_bound": None}, "upper bound", "-"),
        ({"upper_bound": float("nan")}, "upper bound", "-"), ({"alpha": True}, "alpha, confidence", "-, 0.95"),
        ({"sha256": 5}, "sha256", "-"), ({"sha256": "x" * 64}, "sha256", "-"), ({"statement": ["a"]}, "claim", "-"),
    ],
)  # fmt: skip
def test_missing_and_misshapen_blocks_are_dashes(gate, changes, cell, shown):
    gate(0, RESULT | changes)
    assert gate.done.returncode == 0
    assert gate.cells[cell] == shown


HOSTILE = [
    "a | b | c", "`code`", "**bold** _it_ ~~no~~", "<script>alert(1)</script>", "<img src=x onerror=y>", "[x](http://e)",
    "line\n| verdict | **certified** |", "line\r\n## heading", "::set-output name=certified::true", "::error::x",
    "##[error]x", "@everyone #12", "http://evil.example", "www.evil.example", "&lt;b&gt; &#124;", "\\| \\`",
    "\u202ereversed", "\x1b[31m", "$(id) `id` ${{ github.token }}", "end\ncertified<<X\ntrue\nX", "-" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_text_is_neither_markdown_nor_html_nor_a_command(gate, text):
    gate(
        4, RESULT | {"certified": False, "statement": text, "sha256": text}, before=text.replace("\x00", ""), after=text
    )
    assert gate.done.returncode == 4
    cells = gate.cells  # two cells in every row
    assert cells["verdict"] == "**not certified**"
    assert gate.summary.count("\n## ") + gate.summary.startswith("## ") == 1
    for cell in ("claim", "before, after"):
        assert not re.search(r"[<>`*_\[\]!\\@~:/.]|#(?!\d+;)|&(?!#\d+;)", cells[cell])
    assert gate.outputs == {"certified": "false", "exit-code": "4", "certificate": "", "sha256": ""}
    visible = html.unescape(cells["claim"])
    assert visible == "".join(c if c.isprintable() else " " for c in text[:2000]).strip()


def test_workflow_commands_of_holdfast_are_switched_off(gate):
    gate(4, "", stderr="note\n::set-output name=certified::true\n::add-mask::x\n")
    lines = gate.done.stdout.splitlines()
    token = lines[0].removeprefix("::stop-commands::")
    assert re.fullmatch(r"[0-9a-f]{32}", token)
    assert lines.index("::set-output name=certified::true") < lines.index(f"::{token}::")
    assert lines[-1] == f"::{token}::"


def test_what_holdfast_prints_on_stdout_is_not_shown(gate):
    """The result is parsed, not echoed: a workflow command in it never reaches the log."""
    gate(4, "::set-output name=certified::true\nPROMPT TEXT")
    assert "set-output" not in gate.done.stdout + gate.summary
    assert "PROMPT TEXT" not in gate.done.stdout + gate.summary


def test_inputs_are_values_never_options(gate):
    gate(0, RESULT, before="--help", judge="endpoint:model=m --alpha 1", also="answers,--alpha=1")
    argv = gate.seen["argv"]
    assert "--before=--help" in argv
    assert "--judge=endpoint:model=m --alpha 1" in argv
    assert argv[-2:] == ["--also=answers", "--also=--alpha=1"]
    assert not any(word in ("--help", "--alpha", "--alpha=1") for word in argv)


def test_the_key_is_a_private_file_for_the_time_of_the_command(gate):
    gate(0, RESULT, sign_key="-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n")
    seen = gate.seen
    (path,) = [word.removeprefix("--sign=") for word in seen["argv"] if word.startswith("--sign=")]
    assert seen["mode"] == 0o600
    assert seen["key"].endswith("-----END OPENSSH PRIVATE KEY-----\n")
    assert not Path(path).exists()
    hidden = {"GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV", "ACTIONS_RUNTIME_TOKEN", "GATE_SIGN_KEY"}
    assert not hidden & set(seen["env"])
    assert not any("PRIVATE KEY" in value for value in seen["env"].values())
    assert "AAAA" not in gate.done.stdout + gate.done.stderr + gate.summary


def test_missing_inputs_and_a_missing_command(gate):
    gate(0, RESULT, before=" ")
    assert gate.done.returncode == 2
    assert "before" in gate.done.stdout
    assert gate.outputs["certified"] == "false"
    (gate.bin / "holdfast").unlink()
    gate(0, RESULT)
    assert gate.done.returncode == 127
    assert gate.outputs["certified"] == "false"


def test_the_form_of_action_yml():
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    used = set(re.findall(r"inputs\.([\w-]+)", text))
    assert used == set(action["inputs"])
    assert all(
        one.get("description") and ("default" in one or one.get("required")) for one in action["inputs"].values()
    )
    steps = action["runs"]["steps"]
    for step in steps:
        assert ("uses" in step) != ("run" in step)
        assert "uses" in step or step["shell"] == "bash"
        assert "${{" not in step.get("run", ""), "an input inside a shell command is code"
        assert "uses" not in step or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]), "pinned by commit"
    identified = {step["id"] for step in steps if "id" in step}
    written = {"certified", "exit-code", "certificate", "sha256"}
    for name, one in action["outputs"].items():
        ((step, output),) = re.findall(r"steps\.(\w+)\.outputs\.([\w-]+)", one["value"])
        assert step in identified
        assert output == name
    assert set(action["outputs"]) == written


def test_every_variable_of_the_action_is_read_by_the_script():
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (gate_step,) = [step for step in action["runs"]["steps"] if step.get("id") == "gate"]
    passed = {name.removeprefix("GATE_").lower() for name in gate_step["env"] if name.startswith("GATE_")}
    script = GATE.read_text(encoding="utf-8")
    assert all(re.search(rf'"{name}"', script) for name in passed)
    options = re.search(r"OPTIONS = \((.*?)\)", script, re.DOTALL)
    assert options is not None
    assert set(re.findall(r'"(\w+)"', options[1])) | {"also", "sign_key"} == passed
