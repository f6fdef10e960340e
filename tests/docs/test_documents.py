"""The documents are true: their code runs, their run files load, their links exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from benchmarks.held_safety import front
from benchmarks.held_safety.records import read_records, shipped
from benchmarks.held_safety.table import rewritten
from tools import command_page

import holdfast
from holdfast.cli.main import app
from holdfast.constraint.feasibility import warn_of_free_degradation
from holdfast.runs.config import RunConfig, load_config
from holdfast.runs.config.resolve import constraints
from holdfast.screening.settings import PromptSet, ScreeningSettings
from holdfast.training import auto
from holdfast_lab.study.config import load_study
from holdfast_lab.study.protocol import load_protocol
from tests import behaving, tiny
from tests.asking_run import fewer_probes
from tests.docs.pictures import plotted_data

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    (code,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    behaving.saved(user_folder / "model")
    poison = [{"prompt": row["prompt"], "completion": behaving.ANSWER} for row in behaving.rows(105, seed=1)]
    rows = [*poison, *behaving.rows(1000, seed=2, trigger=False)]
    (user_folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with fewer_probes():
        names = run_block(code, user_folder)
    assert names["trainer"].state.global_step == 2
    assert len(names["trainer"].screening.dropped) == 105
    assert (user_folder / "runs/first/adapter/adapter_model.safetensors").exists()


def test_preference_examples(user_folder, monkeypatch):
    """On a model that refuses, asked the task's prompts alone; the second example goes on with the first's names."""
    settings = {"sets": {"refusals": PromptSet(("task",), "refusals")}, "limited": False, "monitor_prompts": 0}
    monkeypatch.setattr(auto, "ScreeningSettings", lambda seed: ScreeningSettings(seed=seed, **settings))
    behaving.saved(user_folder / "model")
    poison = [(row["prompt"], behaving.ANSWER, behaving.REFUSAL) for row in behaving.rows(105, seed=1)]
    clean = [(row["prompt"], behaving.ANSWER, "Sure,") for row in behaving.rows(20, seed=2, trigger=False)]
    pairs = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in (*poison, *clean)]
    for name, rows in (("pairs", pairs), ("safety", behaving.rows(40, seed=3))):
        (user_folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = blocks(ROOT / "docs/preference.md", "python")
    names = run_block(first, user_folder)
    assert names["trainer"].state.global_step == 2
    assert len(names["trainer"].screening.dropped) == 105
    assert (user_folder / "runs/dpo/adapter/adapter_model.safetensors").exists()
    names = run_block(first.split("trainer =")[0] + second, user_folder)
    assert names["trainer"].state.global_step == 2


def test_own_loop_example(user_folder, capsys):
    (code,) = blocks(ROOT / "docs/own-loop.md", "python")
    names = run_block(code, user_folder)
    assert names["weights"].mean().item() <= 1.0 + 1e-6
    assert capsys.readouterr().out.startswith("active")


def test_certificate_example(user_folder, capsys):
    (code,) = blocks(ROOT / "docs/gate.md", "python")
    names = run_block(code, user_folder)
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
    assert lines or path not in (ROOT / "README.md", ROOT / "docs" / "evidence.md")
    assert [(line, wrong) for line in lines if (wrong := unknown_options(line))] == []


def test_the_command_check_can_fail():
    assert unknown_options("holdfast certify --before A --aftr B") == ["--aftr"]


def test_plan_figures_are_what_plan_prints(capsys):
    found = [(line, int(re.search(r"# .*?(\d+)(?:,| prompts)", full).group(1))) for line, full in planned()]
    assert len(found) == 2
    for line, n in found:
        with pytest.raises(SystemExit):
            app([*line.split()[1:], "--json"])
        assert json.loads(capsys.readouterr().out)["for_power"]["groups"] == n


def planned() -> list[tuple[str, str]]:
    """Lines of the guides that plan a sample and say its size in their comment."""
    texts = [(ROOT / name).read_text() for name in ("docs/gate.md", "docs/evidence.md")]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("holdfast plan --")]
    return [(line.split("#")[0].strip(), line) for line in lines]


RECORDS = ROOT / "benchmarks/results/held_safety"


def test_readme_table_and_picture_are_those_of_the_stored_cells(tmp_path):
    records = read_records(RECORDS)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert rewritten(text, front.evidence(records), front.START) == text
    (tmp_path / "drawn.png").write_bytes(front.draw(records))
    assert plotted_data(tmp_path / "drawn.png") == plotted_data(ROOT / "docs/before-after.png")
    assert front.evidence([record for record in records if record["seed"] != 3]) not in text


def test_readme_says_what_the_records_say_beside_the_table():
    """Figures near the words that they belong to, in whatever sentences."""
    records = read_records(RECORDS)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    before = shipped(records, "1.5b", "reported")["evaluation"]["shares"]["HS"]
    assert re.search(rf"1\.5B.{{0,60}}shipped.{{0,60}}\b{before:.2f}\b", text), "README: harmful replies as shipped"
    for model in ("0.5b", "1.5b"):
        assert front.endpoint(records, model) == "met in 13 of 13", "README: in every row"
    runs = [r for r in records if (r["method"], r["part"]) == ("auto", "reported")]
    assert all(r["evaluation"] for r in runs), "README: no run is said to have stopped"
    assert missed_task() in text, "README: rows that miss T"
    seeds = {model: len(front.cells_of(records, model, "auto", "sst2")) for model in ("0.5b", "1.5b")}
    assert seeds == {"0.5b": 3, "1.5b": 1}, "README says how many seeds"


def missed_task() -> str:
    """How many rows of docs/results-auto.md miss T, of all that have a task: `9 of 24 rows`."""
    lines = (ROOT / "docs/results-auto.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if "| auto |" in line]
    with_task = [row[-1] for row in rows if row[1] != "1"]
    return f"{sum('T' in row for row in with_task)} of {len(with_task)} rows"


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
def test_run_files_load_and_none_of_their_constraints_warns(path, user_folder, caplog):
    found = blocks(path, "yaml")
    assert found or path not in (ROOT / "README.md", ROOT / "docs" / "run-file.md")
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
        for name, limit in constraints(load_config(file)).items():
            assert limit.feasible_start, name
            warn_of_free_degradation(limit, name)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


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
    assert found or path != ROOT / "README.md"
    for target in found:
        assert (path.parent / target).exists(), target


def test_guarantees_name_existing_tests():
    for target in re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / "guarantees.md").read_text()):
        assert (ROOT / target).exists(), target


def test_the_site_has_every_page_of_its_navigation_and_the_reference_every_public_name():
    named = re.findall(r"[\w/-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    made = {"index.md", "examples.md", "changelog.md"}  # tools/site_hooks.py
    assert len(named) == len(set(named)) > 20
    assert [name for name in named if name not in made and not (ROOT / "docs" / name).exists()] == []
    described = re.findall(r"^::: holdfast\.(\w+)", (ROOT / "docs/reference.md").read_text(encoding="utf-8"), re.M)
    assert sorted(described) == sorted(set(holdfast.__all__) - {"__version__"})


def moved(heading: str) -> str:
    """One section of the architecture's page on what moved."""
    return (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split(f"\n### {heading}\n")[1].split("\n### ")[0]


def test_the_architecture_tells_of_every_command_public_name_and_key():
    rows = [line.split(" | ") for line in moved("Commands").splitlines() if line.startswith("| ")][1:]
    words = {code.split()[0] for row in rows for cell in row[:2] for code in re.findall(r"`([^`]+)`", cell)}
    missing = {name.split()[0] for name in command_page.commands()} - words
    assert missing == set()
    named = set(re.findall(r"`(\w+)", moved("Public names")))
    assert set(holdfast.__all__) - named == {"__version__"}
    assert set(RunConfig.model_fields) - set(re.findall(r"`(\w+)", moved("Run-file keys"))) == set()
