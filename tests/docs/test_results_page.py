"""The results page is what the stored results give, and the studies go on from them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from tools.study_page.__main__ import main

from holdfast.core.hashing import sha256_json
from holdfast_lab.study.cells import expand
from holdfast_lab.study.config import load_study
from holdfast_lab.study.protocol import load_protocol
from holdfast_lab.study.schedule import make_plan
from tests.docs.pictures import plotted_data, with_their_data_alone, without_vectors

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "study"
PAGES = ("docs/results.md",)
STUDIES = ("main", "poison", "sensitivity", "composition")
REPORTED = "HOLDFAST_REPORTED"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The pages, studies and results in a folder of their own, and the pages written again from there."""
    given = os.environ.get(REPORTED)
    monkeypatch.delenv(REPORTED, raising=False)
    shutil.copytree(RESULTS, tmp_path / "results")
    shutil.copytree(ROOT / "studies", tmp_path / "studies")
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        shutil.copy(ROOT / page, tmp_path / page)

    def write(*options: str) -> dict[str, str]:
        pages = [part for page in PAGES for part in ("--page", str(tmp_path / page))]
        assert main([str(tmp_path / "results"), *pages, *options]) == 0
        return {page: (tmp_path / page).read_text(encoding="utf-8") for page in PAGES}

    return tmp_path, write, given


def committed() -> dict[str, str]:
    return {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def test_the_pages_and_pictures_are_written_from_the_stored_results(copied, monkeypatch):
    folder, write, _ = copied
    without_vectors(monkeypatch)
    assert write() == committed()
    drawn = sorted((folder / "docs" / "results").iterdir())
    assert [path.name for path in drawn] == sorted(path.name for path in (ROOT / "docs" / "results").iterdir())
    for path in drawn:
        assert plotted_data(path) == plotted_data(ROOT / "docs" / "results" / path.name), path.name


def test_another_figure_changes_pages_and_picture_and_a_result_that_is_gone_is_said_to_be_missing(copied, monkeypatch):
    folder, write, _ = copied
    with_their_data_alone(monkeypatch)
    (gone,) = (folder / "results").glob("*.sst2.mix.p0.5.s42-*.json")
    gone.unlink()
    (file,) = (folder / "results").glob("*.sst2.holdfast.p0.5.s42-*.json")
    value = json.loads(file.read_text())
    value["metrics"]["HS"]["value"] += 0.01
    file.write_text(json.dumps(value))
    found = write()
    assert re.search(r"Missing: .*seed 42: mix / ", " ".join(found["docs/results.md"].split()))
    assert all(found[page] != text for page, text in committed().items())
    (picture,) = (folder / "docs" / "results").glob("harm_utility-*.png")
    assert plotted_data(picture) != plotted_data(ROOT / "docs" / "results" / picture.name)


def test_the_orders_beside_the_paper_are_those_of_its_figures(copied):
    _, write, given = copied
    if given is None:
        pytest.skip(f"{REPORTED} is not set")
    assert write("--reported", given, "--reported-model", "Qwen-3.5-4B") == committed()


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_shares_the_protocol_of_the_stored_cells_and_counts_its_own(name):
    file = ROOT / "studies" / f"{name}.yaml"
    study = load_study(file)
    stored = json.loads(next(RESULTS.glob("*.json")).read_text())
    protocol = load_protocol(study.preset, study.protocol)
    record = protocol.record(judge=stored["protocol"]["evaluation"]["judge"], roles=stored["protocol"]["data"])
    assert sha256_json(record) == stored["protocol_sha256"]
    said = re.search(r"^# (\d+) cells", file.read_text(), re.M)
    assert said is not None
    assert int(said.group(1)) == len(expand(study))


def test_stored_results_in_the_folder_of_a_study_count_as_done(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "out" / "results")
    plan = make_plan(load_study(ROOT / "studies" / "main.yaml", [f"output_dir={tmp_path / 'out'}"]))
    states = plan.states()
    done = {cell.id for node in plan.nodes for cell in node.cells if states[node.id] == "done"}
    stored = {path.stem for path in RESULTS.glob("*.json")}
    assert done == stored & {cell.id for cell in plan.cells}
    assert len(done) >= 48
