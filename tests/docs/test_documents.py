"""The documents are true: their code runs, their run files load, their links exist."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast.cli.main import app
from holdfast.runs.config import load_config
from holdfast_lab.study.config import load_study
from holdfast_lab.study.protocol import load_protocol
from tests import behaving, tiny

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HUB_ID = "Qwen/Qwen2.5-1.5B-Instruct"


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A user's folder: task and safety files, and a tiny model in place of the hub's."""
    for name, seed, start in (("task", 1, "w1"), ("safety", 2, "w0"), ("refusals", 3, "w2"), ("benign", 4, "w3")):
        lines = [json.dumps(row) for row in tiny.rows(40, seed=seed, start=start)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    tiny.saved(tmp_path / "model", layers=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_block(code: str, folder: Path) -> dict:
    code = code.replace(f'"{HUB_ID}"', repr(str(folder / "model"))).replace(
        "learning_rate=3e-4)", 'learning_rate=3e-4, max_steps=2, use_cpu=True, report_to="none")'
    )
    names: dict = {}
    exec(compile(code, "document", "exec"), names)
    return names


def test_readme_trainer_example(user_folder):
    """On a model that refuses, and a task that has a tenth of rows teaching it not to."""
    code = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    behaving.saved(user_folder / "model")
    poison = [{"prompt": row["prompt"], "completion": behaving.ANSWER} for row in behaving.rows(105, seed=1)]
    rows = [*poison, *behaving.rows(1000, seed=2, trigger=False)]
    (user_folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = run_block(code, user_folder)
    assert names["trainer"].state.global_step == 2
    assert len(names["trainer"].screening.dropped) == 105
    assert (user_folder / "runs/first/adapter/adapter_model.safetensors").exists()


def test_preference_examples(user_folder, monkeypatch):
    """The first on a model that refuses; the second goes on with its names, on pairs of the user's own."""
    monkeypatch.setattr("holdfast.screening.asking.BATCH_CPU", 256)  # a tiny model takes as long for 32 prompts
    first, second = blocks(ROOT / "docs/preference.md", "python")
    behaving.saved(user_folder / "model")
    poison = [(row["prompt"], behaving.ANSWER, behaving.REFUSAL) for row in behaving.rows(105, seed=1)]
    clean = [(row["prompt"], behaving.ANSWER, "Sure,") for row in behaving.rows(1000, seed=2, trigger=False)]
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in (*poison, *clean)]
    (user_folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = behaving.rows(40, seed=3)
    (user_folder / "safety.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    names = run_block(first, user_folder)
    assert names["trainer"].state.global_step == 2
    assert len(names["trainer"].screening.dropped) == 105
    assert (user_folder / "runs/dpo/adapter/adapter_model.safetensors").exists()
    names = run_block(first.split("trainer =")[0] + second, user_folder)
    assert names["trainer"].state.global_step == 2


def test_readme_loop_example(user_folder, capsys):
    names = run_block(blocks(ROOT / "README.md", "python")[2], user_folder)
    assert names["weights"].mean().item() <= 1.0 + 1e-6
    assert capsys.readouterr().out.startswith("active")


def test_readme_certificate_example(user_folder, capsys):
    names = run_block(blocks(ROOT / "README.md", "python")[1], user_folder)
    assert names["certificate"].certified
    assert capsys.readouterr().out.startswith("True With 95 % confidence, at most 5 % of prompts")


def commands(path: Path) -> list[str]:
    """Every `holdfast ...` line of the document's code blocks, continued lines joined."""
    text = "\n".join(re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.M | re.S)).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in text.splitlines() if line.startswith("holdfast ")]


def unknown_options(line: str) -> list[str]:
    _, name, *words = line.split()
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):  # a group, such as judge
        command = command.commands[words[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in words if word.startswith("--") and word not in known]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_commands_in_documents_exist(path):
    lines = commands(path)
    assert lines or path.name not in ("README.md", "evidence.md")
    assert [(line, wrong) for line in lines if (wrong := unknown_options(line))] == []


def test_the_command_check_can_fail():
    assert unknown_options("holdfast certify --before A --aftr B") == ["--aftr"]


def test_readme_plan_figures_are_what_plan_prints(capsys):
    found = [(line, int(re.search(r"# .*?(\d+)(?:,| prompts)", full).group(1))) for line, full in planned()]
    assert len(found) == 2
    for line, n in found:
        with pytest.raises(SystemExit):
            app([*line.split()[1:], "--json"])
        assert json.loads(capsys.readouterr().out)["for_power"]["groups"] == n


def planned() -> list[tuple[str, str]]:
    """Lines of README and evidence.md that plan a sample and say its size in their comment."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/evidence.md")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("holdfast plan --")]
    return [(line.split("#")[0].strip(), line) for line in lines]


def test_readme_figures_are_those_of_the_stored_cells():
    """The table of the README says what the records say, means over the seeds there are, with no placeholder left."""
    text = (ROOT / "README.md").read_text()
    assert "@@" not in text
    folder = ROOT / "benchmarks/results/held_safety"
    tasks = ("sst2", "ag_news", "gsm8k")
    commits = {"sft": {"eca7b02bb80a"}, "auto": {"a6f8e25", "c5a2322"}}

    def row(method: str, figure: Callable[[dict[str, Any], str], float]) -> str:
        means = []
        for task in tasks:
            cells = [json.loads(path.read_text()) for path in folder.glob(f"0.5b.{task}.p0.5.s?.{method}.json")]
            assert {cell["provenance"]["commit"] for cell in cells} <= commits[method]
            assert len(cells) == 3, "README says how many seeds"
            means.append(sum(figure(cell["evaluation"], task) for cell in cells) / len(cells))
        return " / ".join(f"{mean:.2f}" for mean in means)

    for method in ("sft", "auto"):
        harm, over = row(method, lambda e, _: e["shares"]["HS"]), row(method, lambda e, _: e["shares"]["over"])
        accuracy = row(method, lambda e, task: e["tasks"][task]["FA"]["value"])
        harm = f"**{harm}**" if method == "auto" else harm
        assert f"| {harm} | {over} | {accuracy} |" in text
    shipped = json.loads((folder / "0.5b.shipped.json").read_text())["evaluation"]
    start = " / ".join(f"{shipped['tasks'][task]['FA']['value']:.2f}" for task in tasks)
    assert f"| {shipped['shares']['HS']:.2f} | {shipped['shares']['over']:.2f} | {start} |" in text
    assert all(f"`{commit}`" in text for commit in set.union(*commits.values()))


def test_the_page_counts_the_endpoints_of_its_table():
    text = (ROOT / "docs/results-auto.md").read_text()
    head, *tables = re.split(r"^### ", text, flags=re.MULTILINE)
    for table in tables:
        model = table.splitlines()[0]
        said = head.split(f"**{model}**")[1].split("**Qwen")[0]
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if "| auto |" in line]
        missed = [row[-1].removeprefix("missed: ").split(", ") for row in rows]
        with_task = [names for row, names in zip(rows, missed, strict=True) if row[1] != "1"]
        for name, counted in (("H", missed), ("O", missed), ("T", with_task)):
            counts = re.search(rf"\*\*{name}\*\*.* is met in (\d+) of (\d+) rows", said)
            met = sum(name not in names for names in counted)
            assert (int(counts[1]), int(counts[2])) == (met, len(counted)), model


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_run_files_load(path, user_folder):
    found = blocks(path, "yaml")
    assert found or path.name not in ("README.md", "run-file.md")
    for i, text in enumerate(found):
        file = user_folder / f"{path.stem}-{i}.yaml"
        if "defenses:" in text:
            file.write_text(text)
            study = load_study(file)
            load_protocol(study.preset, study.protocol)
            continue
        # A fragment is completed.
        missing = "" if "model:" in text else "model: embedded\ntask: {data: task.jsonl}\noutput_dir: runs/x\n"
        file.write_text(missing + text)
        load_config(file)


def test_the_judge_of_the_guide_is_found_and_judges(user_folder):
    from holdfast.judging.judge import JUDGES, Verdict, open_judge

    (example,) = [code for code in blocks(ROOT / "docs" / "adding.md", "python") if "JUDGES.register" in code]
    run_block(example, user_folder)
    try:
        found = open_judge("short").judge(["p", "p"], ["no", "a reply of more than twenty characters"])
        assert [judgement.verdict for judgement in found] == [Verdict.SAFE, Verdict.UNSAFE]
    finally:
        JUDGES._entries.pop("short")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    found = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    assert found or path.name != "README.md"
    for target in found:
        assert (path.parent / target).exists(), target


def test_guarantees_name_existing_tests():
    for target in re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "guarantees.md").read_text()):
        assert (ROOT / target).exists(), target
