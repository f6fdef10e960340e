"""A study file stands for a set of cells: the union of its grids, each cell once, each with an id that stays."""

from __future__ import annotations

import pytest

from holdfast.core.errors import ConfigError
from holdfast_lab.study.cells import expand, split_known
from holdfast_lab.study.config import StudyConfig

TWO = {"models": ["embedded", "a/other"], "tasks": ["sst2", "ag_news"], "defenses": ["sft", "holdfast"]}


def cells(**values):
    return expand(StudyConfig.model_validate({"output_dir": "out", "references": False, **TWO, **values}))


def defense(**values):
    return {"name": "holdfast", **values}


def test_the_product_is_complete_and_ordered_by_seed_within_a_model():
    found = cells(poison_ratios=[0.1, 0.5], seeds=[7, 8, 9])
    assert len(found) == len({c.id for c in found}) == 2 * 2 * 2 * 2 * 3
    assert [c.model.name for c in found] == ["SmolLM2-135M-Instruct"] * 24 + ["other"] * 24
    assert [c.seed for c in found[:24]] == [7] * 8 + [8] * 8 + [9] * 8
    assert [(c.task, c.poison_ratio, c.defense.name) for c in found[:5]] == [
        ("sst2", 0.1, "sft"), ("sst2", 0.1, "holdfast"), ("sst2", 0.5, "sft"), ("sst2", 0.5, "holdfast"),
        ("ag_news", 0.1, "sft"),
    ]  # fmt: skip


IDS = [
    "smollm2-135m-instruct.sst2.base-a14e53b0",
    "smollm2-135m-instruct.sst2.aligned-ea7021c0",
    "smollm2-135m-instruct.sst2.sft.p0.5.s42-0877866f",
    "smollm2-135m-instruct.sst2.holdfast.p0.5.s42.holdfast-paper-66ddf3c0",
    "smollm2-135m-instruct.sst2.holdfast.p0.5.s42.tau-0.05-26bb95dd",
]


def test_ids_are_readable_and_do_not_change_between_versions():
    """A changed id would run finished cells again: this list changes only on purpose."""
    study = {"models": ["embedded"], "tasks": ["sst2"], "references": True}
    entries = ["sft", defense(label="holdfast (paper)", preset="paper"), defense(setting="tau=0.05")]
    assert [c.id for c in cells(**study, defenses=entries)] == IDS


def test_a_grid_takes_what_it_leaves_out_from_the_top_and_equal_cells_come_once():
    further = [{"poison_ratios": [0.1, 0.5], "tasks": ["sst2"]}, {"seeds": [42, 43], "models": ["embedded"]}]
    found = cells(grids=further)
    top = cells()
    assert found[: len(top)] == top
    assert len(found) == 8 + 4 + 4
    assert {(c.poison_ratio, c.seed) for c in found} == {(0.5, 42), (0.1, 42), (0.5, 43)}


def test_references_are_the_base_and_every_alignment_in_use():
    found = cells(references=True, models=["embedded"], defenses=["sft", {"name": "antibody", "align": "antibody"}])
    references = [(c.kind, c.align, c.task, c.defense.label, c.seed, c.poison_ratio) for c in found if c.seed is None]
    assert references == [
        (kind, align, task, kind, None, None)
        for kind, align in (("base", "none"), ("aligned", "sft"), ("aligned", "antibody"))
        for task in ("sst2", "ag_news")
    ]
    assert [c.align for c in found if c.kind == "defense"] == ["sft", "antibody"] * 2


def test_a_label_renames_a_cell_but_not_its_work():
    plain, named, other = (
        cells(models=["embedded"], tasks=["sst2"], defenses=[entry])[0]
        for entry in (defense(), defense(label="mine"), defense(constraint={"tau": 0.2}))
    )
    assert plain.id != named.id
    assert plain.work_id == named.work_id
    assert plain.work_id != other.work_id
    assert named.names() == {"cell": named.id, "label": "mine", "setting": ""}


def test_ten_and_ten_point_zero_are_one_setting():
    a, b = (cells(defenses=[defense(constraint={"beta": beta})])[0] for beta in (10, 10.0))
    assert a.id == b.id


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"models": [{"ref": "embedded", "revision": "x"}]}, id="revision"),
        pytest.param({"tasks": ["gsm8k"]}, id="task"),
        pytest.param({"defenses": ["sft"]}, id="defense"),
        pytest.param({"defenses": [defense(preset="paper")]}, id="preset"),
        pytest.param({"defenses": [defense(options={"decay": 0.5})]}, id="options"),
        pytest.param({"defenses": [defense(constraint={"tau": 0.5})]}, id="constraint"),
        pytest.param({"defenses": [defense(train={"max_steps": 5})]}, id="train"),
        pytest.param({"defenses": [defense(align="antibody")]}, id="align"),
        pytest.param({"poison_ratios": [0.25]}, id="ratio"),
        pytest.param({"seeds": [1]}, id="seed"),
    ],
)
def test_everything_that_changes_a_number_changes_the_work(change):
    base = {"models": ["embedded"], "tasks": ["sst2"], "defenses": [defense()]}
    assert cells(**base)[0].work_id != cells(**{**base, **change})[0].work_id


def test_rows_that_tables_could_not_tell_apart_are_refused():
    with pytest.raises(ConfigError, match=r"differ, but not in label \('holdfast'\)"):
        cells(defenses=[defense(), defense(constraint={"tau": 0.2})])
    assert cells(defenses=[defense(), defense(constraint={"tau": 0.2}, setting="tau=0.2")])


def test_two_models_with_one_name_are_refused():
    with pytest.raises(ConfigError, match="two models are called 'x'"):
        cells(models=["a/x", "b/x"])


def test_every_unknown_name_is_listed_with_the_nearest():
    found = cells(tasks=["sst2", "ag_new"], defenses=["sft", "lissa", {"name": "holdfast", "align": "boster"}])
    with pytest.raises(ConfigError) as error:
        split_known(found, defenses=["sft", "holdfast", "lisa"], tasks=["sst2", "ag_news"])
    assert error.value.what.startswith("3 unknown names in 10 of 12 cells")
    for line in ("task 'ag_new': did you mean 'ag_news'?", "defense 'lissa': did you mean 'lisa'?", "defense 'boster'"):
        assert line in error.value.what
    assert "--skip-unknown" in error.value.remedy


def test_skipping_unknown_names_keeps_the_rest_and_says_what_is_left_out():
    found = cells(models=["embedded"], tasks=["sst2"], defenses=["sft", "lisa", "vaccine"])
    kept, left = split_known(found, defenses=["sft"], tasks=["sst2"], skip_unknown=True)
    assert [c.defense.name for c in kept] == ["sft"]
    assert [entry.unknown for entry in left] == [("defense 'lisa'",), ("defense 'vaccine'",)]
    with pytest.raises(ConfigError, match="none of the 3 cells"):
        split_known(found, defenses=["holdfast"], tasks=["sst2"], skip_unknown=True)
