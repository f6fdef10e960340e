"""The replication's page is what its cells give, in tables and in prose."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.study.expand import expand
from holdfast.study.load import load_study
from holdfast.study.protocol import load_protocol, protocol_sha256
from holdfast.tables.pareto import difference
from holdfast.tables.results import Result, read_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STUDY = ROOT / "studies" / "replication.yaml"
PAGE = (ROOT / "docs" / "replication.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def first() -> list[Result]:
    return read_results(RESULTS / "study")


@pytest.fixture(scope="module")
def again() -> list[Result]:
    return read_results(RESULTS / "replication")


def rows(cells: list[Result]) -> dict[str, list[Result]]:
    """Rows of SST-2 at p = 0.5 by their label."""
    found: dict[str, list[Result]] = {}
    for r in cells:
        if (r.task, r.poison_ratio, r.setting, r.align) == ("sst2", 0.5, "", "sft"):
            found.setdefault(r.label, []).append(r)
    return found


def mean(found: list[Result], metric: str = "HS") -> float:
    return statistics.mean(r.metrics[metric].value for r in found)


def test_the_page_is_written_from_the_stored_cells(tmp_path, monkeypatch):
    monkeypatch.delenv("HOLDFAST_REPORTED", raising=False)
    shutil.copytree(ROOT / "studies", tmp_path / "studies")
    (tmp_path / "docs").mkdir()
    page = Path(shutil.copy(ROOT / "docs" / "replication.md", tmp_path / "docs"))
    done = CliRunner().invoke(app, ["report", str(RESULTS / "replication"), "--tables", "--page", str(page)])
    assert done.exit_code == 0, done.output
    assert page.read_text(encoding="utf-8") == PAGE


def test_the_study_has_the_protocol_of_its_cells_and_counts_them():
    cells, study = stored("replication"), load_study(STUDY)
    assert {one["cell"] for one in cells} <= {cell.id for cell in expand(study)}
    (hashed,) = {one["protocol_sha256"] for one in cells}
    protocol = load_protocol(study.preset, study.protocol)
    record = protocol.record(judge=cells[0]["protocol"]["evaluation"]["judge"], roles=cells[0]["protocol"]["data"])
    assert protocol_sha256(record) == hashed
    said = re.search(r"^# (\d+) cells", STUDY.read_text(), re.M)
    assert said is not None
    assert int(said.group(1)) == len(expand(study))


def stored(name: str, pattern: str = "*.json") -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (RESULTS / name).glob(pattern)]


def test_what_is_the_same_in_both_studies_and_what_is_not():
    ours, theirs = stored("replication"), stored("study")
    for one in (*ours, *theirs):
        one["protocol"]["evaluation"].pop("judge")
    assert all(one["protocol"] == ours[0]["protocol"] for one in (*ours, *theirs))
    (kept,) = {one["provenance"]["kept_sha256"] for one in ours} - {None}
    assert kept not in {one["provenance"]["kept_sha256"] for one in theirs}
    assert f"`{kept[:8]}`" in PAGE
    assert {one["seed"] for one in ours} == {7, None}
    assert {one["provenance"]["versions"]["peft"] for one in ours} == {"0.21.0"}
    assert {one["provenance"]["versions"]["peft"] for one in theirs} == {"0.21.2"}


def test_which_rows_ran_in_two_passes():
    def two_pass(name: str) -> set[tuple[str, int]]:
        cells = [one for one in stored(name, "*.sst2.*") if one["align"] == "sft" and one["poison_ratio"] == 0.5]
        return {(one["label"], one["seed"]) for one in cells if one["provenance"]["step"] == "two_pass"}

    here = {"holdfast", "holdfast (paper)", "primal_dual", "mean_constraint"}
    assert two_pass("replication") == {(label, 7) for label in here}
    assert two_pass("study") == {("primal_dual", 42)}


def test_how_alike_the_aligned_models_and_the_judges_are(first, again):
    def outcomes(name: str, kind: str) -> str:
        return str(stored(name, f"*.gsm8k.{kind}-*")[0]["outcomes"]["HS"])

    aligned = [a == b for a, b in zip(outcomes("study", "aligned"), outcomes("replication", "aligned"), strict=True)]
    assert f"the same verdict on {100 * statistics.mean(aligned):.0f} %" in PAGE
    bases = [stored(name, "*.gsm8k.base-*")[0] for name in ("study", "replication")]
    harm = [base["provenance"]["replies_sha256"]["harm"] for base in bases]
    assert harm[0] == harm[1]
    differ = [a != b for a, b in zip(*(base["outcomes"]["HS"] for base in bases), strict=True)]
    values = [f"{base['metrics']['HS']['value']:.3f}" for base in bases]
    assert f"The judges differ on {100 * statistics.mean(differ):.0f} % of the base model's replies" in PAGE
    assert f"(HS {values[0]} and {values[1]})" in PAGE


def test_what_holdfast_pays(again):
    here = rows(again)
    (aligned,) = (r for r in again if (r.defense, r.task) == ("aligned", "gsm8k"))
    loss = {name: mean(here[name], "task_loss") for name in ("holdfast", "sft", "safegrad", "mix")}
    over = {name: mean(here[name], "over_refusal") for name in ("holdfast", "safegrad", "mix")}
    assert (
        f"{loss['holdfast'] - loss['sft']:.3f} nats above SFT ({loss['holdfast']:.3f} against {loss['sft']:.3f}; "
        f"SafeGrad {loss['safegrad']:.3f}, mix {loss['mix']:.3f})"
    ) in PAGE
    assert (
        f"{over['holdfast']:.3f} of the harmless borderline prompts, SafeGrad {over['safegrad']:.3f}, mix "
        f"{over['mix']:.3f}, the aligned model {aligned.metrics['over_refusal'].value:.3f}"
    ) in PAGE


def test_the_order_of_the_rows_and_their_largest_move(first, again):
    here, there = rows(again), rows(first)
    assert f"{len(here)} rows of SST-2 among them" in PAGE
    orders = {
        metric: spearmanr([mean(here[k], metric) for k in here], [mean(there[k], metric) for k in here]).statistic
        for metric in ("HS", "FA")
    }
    assert f"(Spearman {orders['HS']:+.2f}; accuracy {orders['FA']:+.2f})" in PAGE
    moved = max(abs(mean(here[k]) - mean(there[k])) for k in here)
    assert f"moves by more than {moved:.3f}" in PAGE
    names = {"kl": "kl", "safelora": "SafeLoRA", "asft": "AsFT", "lisa": "Lisa", "mean_constraint": "mean_constraint",
             "salora_gradproj": "salora_gradproj"}  # fmt: skip
    assert {k for k in here if len(there[k]) == 1} == set(names)
    for k, name in names.items():
        between = " there" if k == "kl" else ""
        assert f"{name} {mean(here[k]):.3f} ({mean(there[k]):.3f}{between})" in PAGE


def test_what_holds_in_both_and_what_does_not(first, again):
    here, there = rows(again), rows(first)

    def each(name: str) -> list[float]:
        return [
            difference(
                [r for r in there["holdfast"] if r.seed == seed], [r for r in there[name] if r.seed == seed], "HS"
            ).value
            for seed in (42, 1337, 2024)
        ]

    for name, words in (("mix", "mix by"), ("penalty", "the penalty by"), ("safegrad", "")):
        found = difference(here["holdfast"], here[name], "HS")
        a, b, c = (f"{-x:.3f}" for x in each(name))
        if words:
            assert found.high < 0
            assert re.search(rf"{words} {-found.value:.3f} \({a}, {b} and {c}[ )]", PAGE)
        else:
            assert (
                f"(by {a}, {b} and {c}), here by {-found.value:.3f} \\[{-found.high:+.3f}, {-found.low:+.3f}\\]" in PAGE
            )
    two = [f"{mean(here[name]):.3f} and {mean(here[name], 'FA'):.3f}" for name in ("primal_dual", "holdfast")]
    assert f"({two[0]} against {two[1]})" in PAGE


def test_holdfast_against_the_aligned_model(first, again):
    here = rows(again)
    (aligned,) = (r for r in again if (r.defense, r.task) == ("aligned", "gsm8k"))
    assert f"its aligned model at {aligned.metrics['HS'].value:.3f}" in PAGE

    def against(name: str) -> str:
        found = difference(here[name], [replace(aligned, seed=7)], "HS")
        return f"{found.value:+.3f} \\[{found.low:+.3f}, {found.high:+.3f}\\]"

    assert f"started from: {against('holdfast')} on the same prompts" in PAGE
    assert f"(Primal-Dual {against('primal_dual')}, SafeGrad {against('safegrad')})" in PAGE


def test_each_constraint_held_by_its_own_measure(again):
    here = rows(again)
    for label in ("holdfast", "primal_dual"):
        own = here[label][0].metrics["own_violation_rate"]
        assert (own.value, own.n) == (0.0, 273)
    own = here["holdfast (paper)"][0].metrics["own_violation_rate"]
    assert own.value * own.n == pytest.approx(1)
    assert f"({100 * own.value:.1f} %), where alpha allows 5 %" in PAGE
    harm = [f"{mean(here[label]):.3f}" for label in ("holdfast", "primal_dual", "holdfast (paper)")]
    assert f"at {harm[0]}, {harm[1]} and {harm[2]}: **that a constraint holds" in PAGE
