"""Data flows down and imports follow it. Each rule has a test that shows it can fail."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import SOURCE, function_lengths, imports, layer, modules

# The statistics and the report must run on a laptop without torch, so they see neither models nor the constraint.
LAYERS = {
    "core": set(),
    "defaults": set(),
    "data": {"core"},
    "tasks": {"core", "data"},
    "protocol": {"core", "data", "tasks"},
    "models": {"core", "data"},
    "constraint": {"core", "data", "models"},
    "fused": {"core", "data", "models", "constraint"},
    "trainers": {"core", "data", "models", "constraint", "fused", "certification", "evaluation", "screening"},
    "defenses": {"core", "data", "models", "constraint", "trainers"},
    "certification": {"core"},
    "records": {"core", "data", "certification"},
    "evaluation": {"core", "data", "tasks", "models", "certification"},
    "screening": {"core", "defaults", "data", "models", "evaluation", "certification", "records"},
    "auditing": {"core", "data", "models", "constraint", "certification", "records", "evaluation", "screening"},
    "report": {"core", "data", "certification", "records"},
    "tables": {"core", "certification"},
    "stages": {
        "core",
        "data",
        "tasks",
        "protocol",
        "models",
        "constraint",
        "trainers",
        "defenses",
        "certification",
        "records",
        "evaluation",
        "screening",
    },
    "config": {
        "core",
        "defaults",
        "data",
        "tasks",
        "protocol",
        "models",
        "constraint",
        "trainers",
        "defenses",
        "certification",
        "records",
        "evaluation",
        "screening",
    },
    "shares": {"core", "stages", "config"},
    "pipeline": {
        "shares",
        "core",
        "data",
        "tasks",
        "protocol",
        "models",
        "constraint",
        "trainers",
        "defenses",
        "auditing",
        "stages",
        "config",
        "screening",
    },
    "study": {
        "core",
        "data",
        "tasks",
        "protocol",
        "models",
        "constraint",
        "trainers",
        "defenses",
        "certification",
        "records",
        "evaluation",
        "auditing",
        "stages",
        "config",
        "pipeline",
    },
    "finished": {"core", "data", "constraint", "trainers", "records", "stages", "config", "screening"},
    "demo": {
        "core",
        "data",
        "models",
        "constraint",
        "trainers",
        "defenses",
        "evaluation",
        "stages",
        "config",
        "screening",
    },
    "bench": {"core", "data", "models", "constraint", "trainers", "tables"},
    "cli": {
        "core",
        "data",
        "tasks",
        "protocol",
        "models",
        "constraint",
        "trainers",
        "defenses",
        "certification",
        "records",
        "evaluation",
        "auditing",
        "report",
        "tables",
        "stages",
        "config",
        "pipeline",
        "study",
        "finished",
        "demo",
        "bench",
        "screening",
    },
    "__main__": {"cli"},
    "holdfast": {"constraint", "certification", "auditing", "trainers", "config", "pipeline", "screening"},
}
# Single modules of a layer that is closed otherwise: what a model's content is, is known in one place only.
MODULES = {"records": {"holdfast.models.content"}, "finished": {"holdfast.models.content"}}
# Where an upstream library may be named: when its next release breaks something, it breaks here.
HOMES = {
    "trl": {"holdfast.trainers.config", "holdfast.trainers.trainer", "holdfast.bench.paths"},
    "peft": {
        "holdfast.models",
        "holdfast.fused.support",
        "holdfast.stages.align",
        "holdfast.stages.estimate",
        "holdfast.config",
        "holdfast.demo",
        "holdfast.bench",
        "holdfast.cli",
    },
    "yaml": {"holdfast.records", "holdfast.stages", "holdfast.report"},
    "jinja2": {"holdfast.report", "holdfast.models.chat_template", "holdfast.models.template_trial"},
    "matplotlib": {"holdfast.demo", "holdfast.tables", "holdfast.bench"},
    "typer": {"holdfast.cli"},
    "rich": {"holdfast.cli"},
    "pydantic": {"holdfast.config", "holdfast.study"},
    "ray": {"holdfast.study"},
    "vllm": {"holdfast.evaluation"},
    "cryptography": {"holdfast.certification.signing", "holdfast.certification.allowed_signers"},
}
MAX_FILE, MAX_FUNCTION = 350, 60


def layer_violations(trees: dict[str, ast.Module]) -> list[str]:
    wrong = []
    for name, tree in trees.items():
        allowed = {layer(name), *LAYERS[layer(name)]}
        for target in imports(tree):
            single = MODULES.get(layer(name), set())
            if target.startswith("holdfast.") and layer(target) not in allowed and not _inside(target, single):
                wrong.append(f"{name} imports {target}")
    return wrong


def _inside(target: str, modules: set[str]) -> bool:
    return any(target == module or target.startswith(f"{module}.") for module in modules)


def home_violations(trees: dict[str, ast.Module]) -> list[str]:
    wrong = []
    for name, tree in trees.items():
        for target in imports(tree):
            homes = HOMES.get(target.split(".")[0])
            if homes is not None and not any(name == home or name.startswith(f"{home}.") for home in homes):
                wrong.append(f"{name} imports {target}")
    return wrong


def test_imports_go_down():
    assert layer_violations(modules()) == []


def test_upstream_libraries_have_one_home():
    assert home_violations(modules()) == []


def test_barrier_and_majorizers_are_pure():
    """Arithmetic on scalars and elementwise functions: no parameters, no models, no Trainer."""
    trees = modules()
    for name in ("barrier", "majorizers", "chance", "estimators"):
        below = {t for t in imports(trees[f"holdfast.constraint.{name}"]) if t.startswith("holdfast.")}
        assert not [t for t in below if ".gradients" in t or ".models" in t or ".completion" in t], below
    assert "torch" not in imports(trees["holdfast.constraint.barrier"])


def test_defenses_do_not_import_one_another():
    wrong = [
        f"{name} imports {target}"
        for name, tree in modules().items()
        if layer(name) == "defenses"
        for target in imports(tree)
        if target.startswith("holdfast.defenses.") and not target.startswith(name)
    ]
    assert wrong == []


def test_files_and_functions_stay_short():
    long_files = {p.name: n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > MAX_FILE}
    assert long_files == {}
    long_functions = {
        f"{name}.{function}": n for name, tree in modules().items() for function, n in function_lengths(tree).items()
        if n > MAX_FUNCTION
    }  # fmt: skip
    assert long_functions == {}


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc"])
def test_no_drawer_for_everything(name):
    assert not list(SOURCE.rglob(f"{name}.py"))


def test_the_rules_can_fail():
    wrong = {"holdfast.core.x": ast.parse("from holdfast.trainers import trainer")}
    assert layer_violations(wrong)
    assert layer_violations({"holdfast.records.x": ast.parse("from holdfast.models import handle")})
    assert home_violations({"holdfast.data.x": ast.parse("import trl")})
    assert function_lengths(ast.parse("def f():\n" + "    x = 1\n" * 70)) == {"f:1": 71}
