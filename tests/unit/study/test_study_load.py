"""Reading a study file: every mistake is named by its key, and the shipped studies are what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from holdfast.core.errors import ConfigError
from holdfast_lab.study.cells import build_graph, expand, split_known
from holdfast_lab.study.config import load_study, study_from_dict

STUDIES = Path(__file__).parents[3] / "studies"
GOOD = {"models": ["embedded"], "tasks": ["sst2"], "defenses": ["sft"], "output_dir": "out"}


def with_defense(**values):
    return {"defenses": [{"name": "holdfast", **values}]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"modles": []}, ["modles: unknown key", "'models'"], id="unknown-key"),
        pytest.param(with_defense(lable="x"), ["defenses.0.lable: unknown key", "'label'"], id="key-of-defense"),
        pytest.param({"grids": [{"seed": [1]}]}, ["grids.0.seed: unknown key", "'seeds'"], id="key-of-grid"),
        pytest.param({"models": [{"name": "x"}]}, ["models.0.ref: missing"], id="no-ref"),
        pytest.param({"models": []}, ["models: expected at least one entry"], id="no-models"),
        pytest.param({"tasks": "sst2"}, ["tasks: expected a list"], id="not-a-list"),
        pytest.param({"poison_ratios": [1.5]}, ["poison_ratios.0: expected a number of at most 1"], id="ratio"),
        pytest.param({"poison_ratios": [float("nan")]}, ["poison_ratios.0"], id="nan"),
        pytest.param({"seeds": [-1]}, ["seeds.0: expected a number of at least 0"], id="seed"),
        pytest.param({"seeds": [True]}, ["seeds.0: expected a whole number, found true"], id="bool-seed"),
        pytest.param({"workers": 0}, ["workers: expected a number of at least 1"], id="workers"),
        pytest.param({"engine": "slurm"}, ["engine: expected one of 'local' or 'ray'"], id="engine"),
        pytest.param({"preset": "large"}, ["preset: expected one of 'small' or 'paper'"], id="preset"),
        pytest.param(with_defense(label="a\nb"), ["defenses.0.label", "printable"], id="label"),
        pytest.param(with_defense(constraint={"tau": -1}), ["defenses.0.constraint", "tau >= 0"], id="tau"),
        pytest.param(
            with_defense(constraint={"taU": 1}), ["defenses.0.constraint.taU: unknown key"], id="constraint-key"
        ),
        pytest.param(with_defense(options={"rate": 7}), ["defenses.0.options", "rate"], id="rate"),
        pytest.param(with_defense(filter={}), ["defenses.0.filter: unknown key", "with the defense"], id="old"),
        pytest.param(with_defense(options={"rank": 1}), ["defenses.0.options.rank: unknown key"], id="option"),
        pytest.param(with_defense(train={"seed": 1}), ["defenses.0.train.seed", "is not set here"], id="train"),
        pytest.param(
            {"grids": [{"defenses": [{"name": "sft", "options": {"rate": 1.0}}]}]},
            ["grids.0.defenses.0.options.rate: unknown key"],
            id="rate-of-sft",
        ),
    ],
)
def test_a_mistake_is_named_by_its_key(change, words):
    with pytest.raises(ConfigError) as error:
        study_from_dict({**GOOD, **change}, where="study.yaml")
    text = str(error.value)
    assert text.startswith("study.yaml: ")
    assert [word for word in words if word not in text] == []


def test_several_mistakes_come_at_once():
    with pytest.raises(ConfigError, match="3 problems"):
        study_from_dict({**GOOD, "seeds": [], "workers": 0, "engin": "ray"})


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="output_dir: missing"):
        study_from_dict({key: value for key, value in GOOD.items() if key != "output_dir"})


def test_names_stand_for_blocks():
    study = study_from_dict({**GOOD, "grids": [{"models": ["a/b"], "defenses": ["holdfast"]}]})
    assert (study.models[0].ref, study.defenses[0].name, study.defenses[0].align) == ("embedded", "sft", "sft")
    assert study.grids[0].models[0].ref == "a/b"
    assert (study.poison_ratios, study.seeds, study.workers, study.preset) == ([0.5], [42], 1, "small")


def test_folders_are_relative_to_the_file_and_hub_names_stay(tmp_path):
    (tmp_path / "judge").mkdir()
    (tmp_path / "mine").mkdir()
    values = {
        **GOOD,
        "models": ["mine", "org/model", {"ref": "./other"}, "embedded"],
        "grids": [{"models": ["mine"]}],
        "protocol": {"evaluation": {"judge": "judge", "over_refusal": False}, "size": 100},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    study = load_study(tmp_path / "study.yaml", ["seeds=[1, 2]", "protocol.size=50"])
    here = str(tmp_path.resolve())
    assert [m.ref for m in study.models] == [f"{here}/mine", "org/model", f"{here}/other", "embedded"]
    assert study.grids[0].models[0].ref == f"{here}/mine"
    assert study.protocol == {"evaluation": {"judge": f"{here}/judge", "over_refusal": False}, "size": 50}
    assert study.seeds == [1, 2]


def test_the_small_study_is_two_defenses_and_two_references():
    cells = expand(load_study(STUDIES / "small.yaml"))
    assert [c.defense.name for c in cells] == ["base", "aligned", "sft", "holdfast"]
    assert {(c.model.ref, c.task, c.align) for c in cells[1:]} == {("embedded", "sst2", "sft")}


def test_the_paper_study_covers_every_table():
    """Counts from the paper: 3 models, 3 tasks, 9 rows, 3 seeds; sweep, sensitivity, primal-dual, Antibody."""
    cells = expand(load_study(STUDIES / "paper.yaml"))
    rows = [c for c in cells if c.kind == "defense"]
    main = [c for c in rows if c.poison_ratio == 0.5 and not c.defense.setting]
    qwen = [c for c in rows if c.model.name == "Qwen-3.5-4B"]
    assert len([c for c in main if c.defense.name not in ("primal_dual", "antibody") and c.align != "antibody"]) == 243
    assert len([c for c in rows if c.poison_ratio != 0.5]) == 9 * 3 * 3 * 3
    assert {c.model.name for c in rows if c.poison_ratio != 0.5} == {"Qwen-3.5-4B"}
    assert {c.poison_ratio for c in qwen} == {0.05, 0.1, 0.25, 0.5}
    settings = {c.defense.setting for c in rows if c.defense.setting}
    assert settings == {
        *(f"tau={t}" for t in ("0", "0.01", "0.05", "0.1", "0.2")),
        *(f"alpha={a}" for a in ("0.01", "0.05", "0.1", "0.2")),
        *("beta=1", "beta=10"),
    }
    assert len([c for c in rows if c.defense.name == "primal_dual"]) == 9
    assert len([c for c in rows if c.align == "antibody"]) == 2 * 27
    assert {c.seed for c in rows} == {42, 1337, 2024}
    assert len([c for c in cells if c.kind == "base"]) == 9
    alignments = [node for node in build_graph(cells) if node.is_alignment]
    assert len(alignments) == 3 * 4  # sft, vaccine, booster, antibody


def test_the_settings_of_the_sensitivity_grid_are_what_they_are_called():
    cells = expand(load_study(STUDIES / "paper.yaml"))
    canonical = {"tau": 0.1, "alpha": 0.05, "beta": 10.0}
    seen = {cell.defense.setting: cell for cell in cells if cell.defense.setting}
    for setting, cell in seen.items():
        name, _, value = setting.partition("=")
        given = {key: cell.defense.constraint.get(key, canonical[key]) for key in canonical}
        assert given == {**canonical, name: float(value)}, setting
        infeasible = max(1 - given["beta"] * given["tau"], 0) > given["alpha"]
        assert cell.defense.constraint.get("allow_infeasible_start", False) == infeasible, setting
    works = {cell.work_id for cell in seen.values() if cell.seed == 42}
    assert seen["tau=0.1"].work_id == seen["alpha=0.05"].work_id == seen["beta=10"].work_id
    assert len(works) <= 9  # eleven rows, of which three are one


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "vaccine"}, "vaccine acts in the alignment stage, but this row's model is aligned by sft"),
        ({"name": "vaccine", "align": "booster"}, "aligned by booster"),
        ({"name": "vaccine", "align": "vaccine", "options": {"rho": 3.0}}, "protocol.align.options"),
        ({"name": "sft", "align": "lisa"}, "lisa does not act in the alignment stage"),
    ],
    ids=["not aligned by it", "aligned by another", "options", "align by a fine-tuning defense"],
)
def test_an_alignment_stage_defense_is_named_as_what_aligns(entry, words):
    study = {"models": ["embedded"], "tasks": ["sst2"], "output_dir": "out", "defenses": [entry]}
    with pytest.raises(ConfigError, match=words):
        study_from_dict(study)


def test_options_may_stand_beside_the_name_as_in_a_run_file():
    study = {"models": ["embedded"], "tasks": ["sst2"], "output_dir": "out"}
    beside = study_from_dict({**study, "defenses": [{"name": "safegrad", "rho": 0.5, "label": "half"}]})
    under = study_from_dict({**study, "defenses": [{"name": "safegrad", "options": {"rho": 0.5}, "label": "half"}]})
    assert beside == under
    assert beside.defenses[0].options == {"rho": 0.5}
    grid = study_from_dict({**study, "defenses": ["sft"], "grids": [{"defenses": [{"name": "lisa", "guide": 5}]}]})
    assert grid.grids[0].defenses[0].options == {"guide": 5}
    with pytest.raises(ConfigError, match="rho"):
        study_from_dict({**study, "defenses": [{"name": "sft", "rho": 0.5}]})


def test_the_paper_study_runs_with_what_this_version_has():
    from holdfast_lab.study.cells import known_names

    defenses, tasks = known_names()
    cells = expand(load_study(STUDIES / "paper.yaml"))
    kept, left = split_known(cells, defenses=defenses, tasks=tasks)
    assert (len(kept), left) == (len(cells), [])


def test_a_worker_starts_without_settings_and_a_study_of_plain_names_without_torch():
    code = (
        "import sys, holdfast_lab.study.worker\nprint('pydantic' in sys.modules)\n"
        "from holdfast_lab.study.config import StudyConfig\n"
        f"StudyConfig.model_validate({GOOD!r})\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
