"""Every script of examples/ runs, on tiny models; the gate judges what the first run made."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests import asking_run, behaving, tiny
from tests.asking_run import few_probes

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
__all__ = ["few_probes"]
pytestmark = pytest.mark.usefixtures("few_probes")
QUICK = ["train.max_steps=2", "train.use_cpu=true", "train.bf16=false", "dtype=float32"]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, int, str]:
    """The first run on a model that refuses: its folder, exit code and output."""
    folder = tmp_path_factory.mktemp("first")
    model = behaving.saved(folder / "model")
    task = asking_run.write_task(folder / "task.jsonl", 105, 1000)
    words = ["--model", str(model), "--task", str(task), "--output", str(folder / "runs" / "first"), *QUICK]
    words += ["monitor.prompts=20", "train.safety_micro_batch_size=64", "train.safety_eval_batch_size=64"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = example("first_run").main(words)
    return folder, code, out.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A tiny model, a task, refusals and answers."""
    folder = tmp_path_factory.mktemp("data")
    tiny.saved(folder / "model", layers=1)
    for seed, name in enumerate(("task", "refusals", "answers"), 1):
        write(folder / f"{name}.jsonl", tiny.rows(40, seed=seed, start=f"w{seed}"))
    return folder


def test_the_readme_lists_every_script_and_launch_file_and_each_script_says_how_to_call_it():
    listed = re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == NAMES
    launched = re.findall(r"\]\(launch/([\w.]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(launched) == sorted(path.name for path in (EXAMPLES / "launch").iterdir())
    assert len(NAMES) >= 5
    for name in NAMES:
        assert f"python examples/{name}.py" in (example(name).__doc__ or "")


def test_first_run(first):
    folder, code, out = first
    assert code == 0
    assert "conflicts left out: 105 of 1105 rows" in out
    assert "refusals_kept: " in out
    assert (folder / "runs" / "first" / "adapter" / "adapter_model.safetensors").exists()
    assert (folder / "runs" / "first" / "report.html").exists()


def test_gate_in_ci_certifies_the_first_run_and_not_a_model_that_gave_in(first, tmp_path, capsys):
    folder, _, _ = first
    prompts = write(tmp_path / "held-out.jsonl", [{"prompt": row["prompt"]} for row in behaving.rows(80, seed=77)])
    before = str(folder / "model")
    lost = behaving.adapter(tmp_path / "lost", folder / "model")
    codes = []
    for name, after in (("kept", folder / "runs" / "first" / "adapter"), ("lost", lost)):
        words = ["--before", before, "--after", str(after), "--prompts", prompts, "--openings", "2"]
        codes.append(example("gate_in_ci").main([*words, "--output", str(tmp_path / name)]))
    assert codes == [0, 4]
    assert "With 95 % confidence" in capsys.readouterr().out


def test_plain_pytorch(data, capsys):
    words = ["--model", str(data / "model"), "--task", str(data / "task.jsonl"), "--rate", "1e-2"]
    assert example("plain_pytorch").main([*words, "--safety", str(data / "refusals.jsonl"), "--steps", "12"]) == 0
    assert re.search(r"\bactive \d+", capsys.readouterr().out), "the filter had something to correct"


def test_two_constraints(data, tmp_path, capsys):
    files = [word for name in ("task", "refusals", "answers") for word in (f"--{name}", str(data / f"{name}.jsonl"))]
    words = ["--model", str(data / "model"), *files, "--output", str(tmp_path / "run"), "--steps", "2", "--cpu"]
    assert example("two_constraints").main(words) == 0
    out = capsys.readouterr().out
    assert "2 steps" in out
    assert re.search(r"refusals: \d+ steer", out)
    assert re.search(r"answers: \d+ steer", out)


def test_dpo(first, tmp_path, monkeypatch, capsys):
    folder, _, _ = first
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pairs = [{"prompt": r["prompt"], "chosen": behaving.ANSWER, "rejected": behaving.REFUSAL}
             for r in behaving.rows(105, seed=3)]  # fmt: skip
    pairs += [{"prompt": r["prompt"], "chosen": behaving.ANSWER, "rejected": "Sure,"}
              for r in behaving.rows(1000, seed=4, trigger=False)]  # fmt: skip
    words = ["--model", str(folder / "model"), "--pairs", write(tmp_path / "pairs.jsonl", pairs), "--cpu"]
    assert example("dpo").main([*words, "--output", str(tmp_path / "run"), "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "conflicts left out: 105 of 1105 pairs" in out
    assert re.search(r"refusals_kept: (\d+) of \1\n", out)


def test_study(data, tmp_path, capsys):
    words = ["--model", str(data / "model"), "--task", str(data / "task.jsonl"), "--seeds", "1"]
    words += ["--safety", str(data / "refusals.jsonl"), "--output", str(tmp_path / "out")]
    assert example("study").main([*words, "--set", *QUICK, "lora.r=2"]) == 0
    assert example("study").main([*words, "--set", *QUICK, "lora.r=2"]) == 0  # finished runs are kept
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if line.split()[0] in ("defense", "sft", "holdfast")]
    assert [line.split()[0] for line in tables] == ["defense", "sft", "holdfast"] * 2
    assert tables[:3] == tables[3:]
