"""Every block of Python in the documents is executed by a test, or named here with the reason why not."""

from __future__ import annotations

import re
from pathlib import Path

from datasets import load_dataset

import holdfast as hf
from holdfast.training.step import ENGINES
from tests import tiny
from tests.docs.test_documents import DOCUMENTS, ROOT, blocks, run_block, user_folder

__all__ = ["user_folder"]
HERE = "tests/docs/test_python_blocks.py::"
DOCUMENTED = "tests/docs/test_documents.py::"
ADDING = "tests/docs/test_adding_defense.py::"
EXECUTED = {
    ("README.md", 0): DOCUMENTED + "test_readme_trainer_example",
    ("docs/adding.md", 0): ADDING + "test_it_is_listed_documented_and_trained_from_a_run_file",
    ("docs/adding.md", 1): HERE + "test_the_step_engine_of_the_guide_trains",
    ("docs/adding.md", 2): DOCUMENTED + "test_the_judge_of_the_guide_is_found_and_judges",
    ("docs/gate.md", 0): DOCUMENTED + "test_certificate_example",
    ("docs/getting-started.md", 0): HERE + "test_a_run_file_is_run_from_python",
    ("docs/own-loop.md", 0): DOCUMENTED + "test_own_loop_example",
    ("docs/preference.md", 0): DOCUMENTED + "test_preference_examples",
    ("docs/preference.md", 1): DOCUMENTED + "test_preference_examples",
    ("docs/several-gpus.md", 0): HERE + "test_an_audit_joins_its_processes",
}
SKIPPED = {("docs/unsloth.md", 0): "Unsloth needs a GPU; on a CPU it leaves TRL alone"}


def test_every_block_is_executed_or_skipped_for_a_reason():
    found = {(str(path.relative_to(ROOT)), i) for path in DOCUMENTS for i in range(len(blocks(path, "python")))}
    assert found == EXECUTED.keys() | SKIPPED.keys()
    assert all(SKIPPED.values())
    for target in EXECUTED.values():
        file, name = target.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), target


def test_no_block_of_python_is_without_its_language():
    for path in DOCUMENTS:
        plain = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        found = [text for language, text in plain if not language and re.search(r"^(import|from) \w", text, re.M)]
        assert found == [], path


def test_a_run_file_is_run_from_python(user_folder):
    """The page's run file, on a tiny model and with pairs of its own, so that nothing is asked."""
    Path("run.yaml").write_text(
        "model: model\ndtype: float32\ntask: {data: task.jsonl}\nsafety: {data: safety.jsonl}\noutput_dir: runs/first\n"
        "lora: {r: 2, target_modules: [q_proj]}\ntrain: {max_steps: 2, bf16: false, use_cpu: true}\n"
    )
    (code,) = blocks(ROOT / "docs/getting-started.md", "python")
    result = run_block(code, user_folder)["result"]
    assert result.folder == Path("runs/first")
    assert result.values["steps"] == 2


def test_an_audit_joins_its_processes(user_folder):
    """Alone, as without a launch; tests/distributed/test_audit.py has two processes."""
    tiny.saved(user_folder / "A", layers=1)
    tiny.saved(user_folder / "B", layers=1)
    (user_folder / "safety.jsonl").rename(user_folder / "prompts.jsonl")
    (code,) = blocks(ROOT / "docs/several-gpus.md", "python")
    audit = run_block(code, user_folder)["audit"]
    assert audit.n > 0
    assert audit.violations == 0, "A and B are the same model"


def test_the_step_engine_of_the_guide_trains(user_folder, monkeypatch, capsys):
    monkeypatch.setattr(ENGINES, "_entries", {**ENGINES._entries})
    run_block(blocks(ROOT / "docs/adding.md", "python")[1], user_folder)
    rows = load_dataset("json", data_files="task.jsonl", split="train")
    held = load_dataset("json", data_files="safety.jsonl", split="train")
    args = hf.SafeSFTConfig("out", step="logged", max_steps=2, use_cpu=True, bf16=False, report_to="none")
    trainer = hf.SafeSFTTrainer(str(user_folder / "model"), args, train_dataset=rows, safety_dataset=held)
    trainer.train()
    assert len(re.findall(r"^safety -?\d", capsys.readouterr().out, re.M)) == 2
