"""The step and the files to read first stay small: what a defense may ask, mixins, the diagram."""

from __future__ import annotations

import ast
import re

from tools import architecture

from tests.architecture.source import SOURCE, modules

ROOT = SOURCE.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def members(node: ast.ClassDef) -> list[str]:
    """Methods, properties and annotated attributes of a class."""
    named = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
    return named + [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]


def test_what_a_defense_may_ask_of_a_run_is_one_small_protocol():
    protocols = {node.name: node for node in classes(modules()["holdfast.training.hooks"])}
    assert 5 < len(members(protocols["TrainingRun"])) <= 12
    assert members(ast.parse("class A:\n  x: int\n  def f(self): ...").body[0]) == ["f", "x"]


def test_checkpointing_is_the_only_mixin():
    found = {node.name for tree in modules().values() for node in classes(tree) if node.name.endswith("Mixin")}
    assert found == {"CheckpointMixin"}


def test_no_heuristics_on_modules_or_class_dictionaries_decide_how_a_step_is_computed():
    for name in ("fused_engine", "fused_setup", "step"):
        text = (SOURCE / "holdfast" / "training" / f"{name}.py").read_text(encoding="utf-8")
        assert "__module__" not in text
        assert "vars(cls)" not in text


def test_the_diagram_is_drawn_from_the_imports():
    assert architecture.rewritten(PAGE) == PAGE


def test_every_package_has_its_paragraph():
    described = set(re.findall(r"\*\*([a-z_.]+)\*\*", PAGE))
    assert described >= set(architecture.edges())


def test_the_reduction_keeps_the_order():
    assert architecture.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_the_files_to_read_first_exist():
    paths = re.findall(r"\]\(\.\./(src/[^)]+\.py)\)", PAGE)
    assert len(paths) > 3
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_files_that_the_readme_names_are_read_in_an_afternoon():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"\]\((src/holdfast/[^)]+\.py)\)", readme)
    assert [path.split("/", 2)[2] for path in named] == [
        "runs/pipeline.py", "training/trainer.py", "training/step.py", "defenses/holdfast.py",
        "constraint/chance.py", "constraint/filter.py", "constraint/barrier.py",
    ]  # fmt: skip
    assert sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in named) < 1200
