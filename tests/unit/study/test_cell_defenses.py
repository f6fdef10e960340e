"""Cells of every defense, tiny: after an alignment-stage one fine-tuning is plain, and holdfast composes with any."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import tiny
from tests.protocol_data import make_data_folder
from tests.unit.study.test_cell import TINY

from holdfast.core.event_log import read
from holdfast_lab.study.cell import run_alignment, run_cell
from holdfast_lab.study.cells import Cell, Defense, Model
from holdfast_lab.study.protocol import load_protocol

SETTINGS = {**TINY, "align": {**TINY["align"], "per_defense": {}, "options": {"booster": {"lam": 2.0}}}}
ALIGNED = ("sft", "vaccine", "booster", "antibody")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data, and the tiny model aligned in every way there is."""
    root = tmp_path_factory.mktemp("defenses")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_DATA", str(make_data_folder(root / "data")))
        patch.setenv("HOLDFAST_CACHE", str(root / "cache"))
        model = Model("tiny", str(tiny.saved(root / "model", layers=1)))
        protocol = load_protocol("small", SETTINGS)
        for align in ALIGNED:
            node: dict[str, Any] = {"protocol": protocol.model_dump(), "model": vars(model), "align": align}
            assert run_alignment(node, root / align)["steps"] == 4
        yield root, model, protocol


def run_of(world, name: str, align: str, **settings: Any) -> tuple[dict[str, Any], Path]:
    root, model, protocol = world
    cell = Cell("defense", model, "sst2", Defense(name, name, **settings), align, 0.5, 42)
    folder = root / f"{name}-{align}"
    node = {"protocol": protocol.model_dump(), "cell": asdict(cell), "aligned": str(root / align), "shared": ""}
    return run_cell(node, folder), folder / "run"


def settings_of(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def test_alignment_runs_have_their_defense_and_its_options(world):
    root, *_ = world
    found = {align: settings_of(root / align / "run")["defense"] for align in ALIGNED}
    assert {align: block["name"] for align, block in found.items()} == {align: align for align in ALIGNED}
    assert found["booster"]["lam"] == 2.0
    rows = read(root / "booster" / "run" / "events.jsonl")
    assert all(row["harmful_loss"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["vaccine", "booster"])
def test_after_an_alignment_stage_defense_fine_tuning_is_plain(world, name):
    result, run = run_of(world, name, name)
    assert (result["defense"], result["align"]) == (name, name)
    assert settings_of(run)["defense"] == {"name": "sft"}


def test_antibody_acts_in_both_stages(world):
    _, run = run_of(world, "antibody", "antibody")
    assert settings_of(run)["defense"]["name"] == "antibody"


def test_holdfast_composes_with_any_alignment(world):
    """The reference is the model as it enters fine-tuning, whoever aligned it."""
    result, run = run_of(world, "holdfast", "antibody")
    assert (result["defense"], result["align"]) == ("holdfast", "antibody")
    assert settings_of(run)["model"].endswith("antibody/run/adapter")
    assert "leave that one out without an error" in (run / "adapter" / "README.md").read_text()
    assert {"HS", "FA", "violation_rate"} <= result["metrics"].keys()


@pytest.mark.parametrize("name", ["asft", "safelora", "salora"])
def test_defenses_on_the_alignment_adapter_find_it_by_themselves(world, name):
    options = {"safety_rank": 2, "task_rank": 2, "calibration": 8} if name == "salora" else {}
    result, run = run_of(world, name, "sft", options=options)
    assert settings_of(run)["unaligned"] is None
    assert 0 <= result["metrics"]["HS"]["value"] <= 1
