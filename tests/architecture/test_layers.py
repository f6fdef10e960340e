"""Data flows down and imports follow it. Each rule has a test that shows it can fail."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import SOURCE, function_lengths, imports, layer, modules

# The statistics, the records and the report must run on a laptop without torch, so they see neither models nor scoring.
STATISTICS = {"core", "data", "certification", "records"}
MODEL = {"core", "defaults", "data", "models", "constraint", "scoring"}
ASKING = {*STATISTICS, "models", "judging", "screening", "defaults"}
STEP = {*MODEL, *ASKING, "fused", "training", "defenses"}
RUN = {*STEP, "auditing", "runs"}
LAYERS = {
    "core": set(),
    "defaults": {"core"},
    "data": {"core"},
    "certification": {"core"},
    "records": STATISTICS,
    "reporting": STATISTICS,
    "models": {"core", "data"},
    "constraint": {"core", "defaults"},
    "scoring": MODEL,
    "fused": MODEL,
    "judging": {"core", "data", "models", "certification"},
    "screening": ASKING,
    "training": {*MODEL, *ASKING, "fused"},
    "defenses": {*MODEL, "training"},
    "auditing": {*MODEL, *ASKING},
    "runs": {*STEP, "auditing"},
    "demo": RUN,
    "cli": {*RUN, "reporting", "demo"},
    "integrations": RUN,  # each stands inside another stack; nothing stands on them
    "__main__": {"cli"},
    "events": {"core", "constraint"},
    "holdfast": {*RUN, "reporting", "events"},
    # The laboratory stands on the product; the product never imports it.
    "lab.data": {"core", "data"},
    "lab.tasks": {"core", "data", "lab.data"},
    "lab.protocol": {"core", "data", "lab.data"},
    "lab.evaluation": {"core", "data", "models", "scoring", "judging", "certification", "lab.data"},
    "lab.building_blocks": {*MODEL, "training"},
    "lab.defenses": {*MODEL, "training", "defenses", "lab.building_blocks"},
    "lab.tables": {"core", "certification"},
    "lab.study": {*RUN, "lab.data", "lab.tasks", "lab.protocol", "lab.evaluation"},
    "lab.bench": {*MODEL, "training", "lab.tables"},
    "lab.cli": {*RUN, "cli", "lab.data", "lab.protocol", "lab.evaluation", "lab.tables", "lab.study", "lab.bench"},
    "lab": set(),
}
# Single modules of a layer that is closed otherwise: what a model's content is, is known in one place only.
MODULES = {"records": {"holdfast.models.content"}}
# Where an upstream library may be named: when its next release breaks something, it breaks here.
HOMES = {
    "trl": {
        "holdfast.training.config",
        "holdfast.training.dpo",
        "holdfast.training.grpo",
        "holdfast.training.trainer",
        "holdfast_lab.bench.paths",
    },
    "peft": {
        "holdfast.core.library_types",
        "holdfast.models",
        "holdfast.fused.support",
        "holdfast.runs.stages.align",
        "holdfast.runs.stages.estimate",
        "holdfast.runs.config",
        "holdfast.demo",
        "holdfast_lab.bench",
        "holdfast.cli",
    },
    "yaml": {"holdfast.records", "holdfast.runs.stages", "holdfast.reporting"},
    "jinja2": {"holdfast.reporting", "holdfast.models.chat_template", "holdfast.models.template_trial"},
    "matplotlib": {"holdfast.demo", "holdfast_lab.tables", "holdfast_lab.bench"},
    "typer": {"holdfast.cli", "holdfast_lab.cli"},
    "rich": {"holdfast.cli", "holdfast_lab.cli"},
    "pydantic": {"holdfast.runs.config", "holdfast.integrations.axolotl.settings", "holdfast_lab.study"},
    "ray": {"holdfast_lab.study"},
    "filelock": {"holdfast.core.file_lock"},
    "vllm": {"holdfast.judging"},
    "cryptography": {"holdfast.certification.signing"},
    "axolotl": {"holdfast.integrations.axolotl"},
}
MAX_FILE, MAX_FUNCTION = 350, 50


def layer_violations(trees: dict[str, ast.Module]) -> list[str]:
    wrong = []
    for name, tree in trees.items():
        allowed = {layer(name), *LAYERS[layer(name)]}
        for target in imports(tree):
            single = MODULES.get(layer(name), set())
            if (
                target.startswith(("holdfast.", "holdfast_lab"))
                and layer(target) not in allowed
                and not _inside(target, single)
            ):
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
        if layer(name) in ("defenses", "lab.defenses")
        for target in imports(tree)
        if target.startswith(("holdfast.defenses.", "holdfast_lab.defenses."))
        and not target.startswith((name, "holdfast.defenses.holdfast"))  # the algorithm, of which variants may be made
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
    wrong = {"holdfast.core.x": ast.parse("from holdfast.training import trainer")}
    assert layer_violations(wrong)
    assert layer_violations({"holdfast.records.x": ast.parse("from holdfast.models import handle")})
    assert layer_violations({"holdfast.cli.x": ast.parse("from holdfast_lab.study import load")})
    assert layer_violations({"holdfast.cli.x": ast.parse("import holdfast_lab")})
    assert home_violations({"holdfast.data.x": ast.parse("import trl")})
    assert function_lengths(ast.parse("def f():\n" + "    x = 1\n" * 70)) == {"f:1": 71}
