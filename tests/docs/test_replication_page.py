"""The replication's page is what its cells give, in tables and in prose."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from scipy.stats import spearmanr
from typer.testing import CliRunner

from holdfast.cli.main import app
from holdfast.study.expand import expand
from holdfast.study.load import load_study
from holdfast.study.protocol import load_protocol, protocol_sha256
from holdfast.tables.pareto import difference, dominators
from holdfast.tables.results import Result, read_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STUDY = ROOT / "studies" / "replication.yaml"
PAGE, RESULTS_PAGE, README = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("docs/replication.md", "docs/results.md", "README.md")
)


@pytest.fixture(scope="module")
def first() -> list[Result]:
    return read_results(RESULTS / "study")


@pytest.fixture(scope="module")
def again() -> list[Result]:
    return read_results(RESULTS / "replication")


REPORTED = "HOLDFAST_REPORTED"
TASKS = ("sst2", "ag_news", "gsm8k")


def rows(cells: list[Result], task: str = "sst2", align: str = "sft") -> dict[str, list[Result]]:
    """Rows of a task at p = 0.5 by their label, the aligned model among them; without other settings."""
    found: dict[str, list[Result]] = {}
    for r in cells:
        if (r.task, r.setting, r.align) == (task, "", align) and r.poison_ratio in (0.5, None):
            found.setdefault(r.label, []).append(r)
    return found


def mean(found: list[Result], metric: str = "HS") -> float:
    return statistics.mean(r.metrics[metric].value for r in found)


def signed(a: list[Result], b: list[Result], metric: str = "HS") -> str:
    found = difference(a, b, metric)
    return f"{found.value + 0.0:+.3f} \\[{found.low:+.3f}, {found.high:+.3f}\\]"


def started(ours: list[Result], aligned: list[Result]) -> list[Result]:
    """The aligned model, once for every seed that started from it."""
    return [replace(aligned[0], seed=one.seed) for one in ours]


def below(cells: list[Result], name: str, task: str) -> list[float]:
    """How far holdfast lies below a row, by seed."""
    here = rows(cells, task)
    ours, theirs = ({r.seed: r.metrics["HS"].value for r in here[row]} for row in ("holdfast", name))
    return [theirs[seed] - ours[seed] for seed in sorted(ours.keys() & theirs.keys())]


def write(tmp_path: Path, *options: str) -> str:
    """The page as the stored cells give it."""
    shutil.copytree(ROOT / "studies", tmp_path / "studies")
    shutil.copytree(RESULTS / "study", tmp_path / "benchmarks" / "results" / "study")
    (tmp_path / "docs").mkdir()
    page = Path(shutil.copy(ROOT / "docs" / "replication.md", tmp_path / "docs"))
    done = CliRunner().invoke(app, ["report", str(RESULTS / "replication"), "--tables", "--page", str(page), *options])
    assert done.exit_code == 0, done.output
    return page.read_text(encoding="utf-8")


def test_the_page_and_its_pictures_are_written_from_the_stored_cells(tmp_path, monkeypatch):
    monkeypatch.delenv(REPORTED, raising=False)
    assert write(tmp_path) == PAGE
    drawn = sorted((tmp_path / "docs" / "replication").iterdir())
    assert [path.name for path in drawn] == sorted(path.name for path in (ROOT / "docs" / "replication").iterdir())
    for path in drawn:
        ours, stored_one = (imread(folder / path.name) for folder in (path.parent, ROOT / "docs" / "replication"))
        assert np.array_equal(ours, stored_one), path.name


@pytest.mark.skipif(REPORTED not in os.environ, reason=f"{REPORTED} is not set")
def test_the_orders_beside_the_papers_are_those_of_its_figures(tmp_path):
    assert write(tmp_path, "--reported", os.environ[REPORTED], "--reported-model", "Qwen-3.5-4B") == PAGE


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
    commits = Counter(one["provenance"]["commit"] for one in cells)
    assert (
        f"{len(cells)} of {len(expand(study))} cells ({commits['4014fe6']} by the tree of commit 4014fe6, "
        f"{commits['1be62f9']} by that of 1be62f9)"
    ) in PAGE
    assert sum(commits.values()) == commits["4014fe6"] + commits["1be62f9"]
    assert f"({len(expand(study))} cells, of which {len(cells)} are there)" in RESULTS_PAGE


def stored(name: str, pattern: str = "*.json") -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (RESULTS / name).glob(pattern)]


def test_what_is_the_same_in_both_studies_and_what_is_not():
    ours, theirs = stored("replication"), stored("study")
    for one in (*ours, *theirs):
        one["protocol"]["evaluation"].pop("judge")
    assert all(one["protocol"] == ours[0]["protocol"] for one in (*ours, *theirs))
    (kept,) = {one["provenance"]["kept_sha256"] for one in ours if one["align"] == "sft"} - {None}
    assert kept not in {one["provenance"]["kept_sha256"] for one in theirs}
    assert f"`{kept[:8]}`" in PAGE
    assert {one["seed"] for one in ours} == {7, 11, None}
    assert {one["provenance"]["versions"]["peft"] for one in ours} == {"0.21.0"}
    assert {one["provenance"]["versions"]["peft"] for one in theirs} == {"0.21.2"}


def test_which_rows_ran_in_two_passes():
    def two_pass(name: str) -> set[tuple[str, str, int]]:
        cells = [one for one in stored(name) if one["poison_ratio"] == 0.5]
        return {(one["task"], one["label"], one["seed"]) for one in cells if one["provenance"]["step"] == "two_pass"}

    here = {"holdfast", "holdfast (paper)", "primal_dual", "mean_constraint"}
    assert two_pass("replication") == {("sst2", label, 7) for label in here} | {(t, "antibody", 7) for t in TASKS}
    assert two_pass("study") == {(task, "primal_dual", 42) for task in TASKS} | {("sst2", "vaccine", 42)}


def test_how_many_seeds_each_task_has(again):
    def seeds(task: str) -> Counter[int]:
        return Counter(len(found) for label, found in rows(again, task).items() if label not in ("aligned", "base"))

    assert seeds("sst2") == {2: 14}
    assert seeds("ag_news") == {2: 12, 1: 2}
    assert seeds("gsm8k") == {1: 14}
    assert "Fourteen rows have two seeds on SST-2, twelve of them on AG News, all have one on GSM8K;" in PAGE


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


def test_the_order_of_the_rows_and_their_largest_move(first, again):
    orders, moves = {}, []
    for task in TASKS:
        here, there = rows(again, task), rows(first, task)
        names = [name for name in here if name in there and name not in ("aligned", "base")]
        assert len(names) == 14
        pairs = [(mean(here[name]), mean(there[name])) for name in names]
        orders[task] = spearmanr(*zip(*pairs, strict=True)).statistic
        moves += [abs(a - b) for a, b in pairs]
    words = [f"{value:+.2f} on {name}" for value, name in zip(orders.values(), NAMES, strict=True)]
    low = sorted((one for one in rows(again, "gsm8k").items() if one[0] not in ("aligned", "base")), key=harm_of)[:8]
    rest = spearmanr([mean(found) for _, found in low], [mean(rows(first, "gsm8k")[name]) for name, _ in low]).statistic
    assert f"(Spearman {', '.join(words)}, where eight rows lie within 0.04 and {rest:+.2f} is left among them)" in PAGE
    assert f"(Spearman {', '.join(words)})" in RESULTS_PAGE
    assert f"no row's mean moves by more than {max(moves):.3f}" in PAGE
    assert f"no mean moves by more than {max(moves):.3f}" in RESULTS_PAGE
    harm = sorted(mean(found) for name, found in rows(again, "gsm8k").items() if name not in ("aligned", "base"))
    assert harm[7] - harm[0] < 0.04 < harm[8] - harm[0]


NAMES = ("SST-2", "AG News", "GSM8K")


def harm_of(one: tuple[str, list[Result]]) -> float:
    return mean(one[1])


def test_the_front(again):
    front = []
    for task in TASKS:
        here = {name: found for name, found in rows(again, task).items() if name not in ("aligned", "base")}
        utility = "task_loss" if task == "gsm8k" else "FA"
        assert dominators(here, "holdfast", utility) == ([], [])
        assert {"safegrad", "primal_dual", "mix"} <= set(dominators(here, "holdfast (paper)", utility)[0])
        here["antibody"] = rows(again, task, "antibody")["antibody"]
        front.append(sum(not dominators(here, name, utility)[0] for name in here))
        assert len(here) == 15
    assert f"(with {front[0]}, {front[1]} and {front[2]} of the 15 rows" in PAGE
    here = rows(again)
    apart = round(1400 * (mean(here["primal_dual"]) - mean(here["holdfast"])))
    assert (apart, "by two answers of 1,400 against Primal-Dual, which is the more accurate" in PAGE) == (2, True)
    assert mean(here["primal_dual"], "FA") > mean(here["holdfast"], "FA")
    for task in TASKS:
        found = difference(rows(again, task)["holdfast"], rows(again, task)["primal_dual"], "HS")
        assert not found.is_lower
        assert not found.is_higher


def test_below_which_rows_holdfast_lies_in_how_many_comparisons(first, again):
    each = {
        (name, task): below(first, name, task) + below(again, name, task)
        for name in ("safegrad", "mix", "penalty")
        for task in TASKS
    }
    safegrad = [x for task in TASKS for x in each["safegrad", task]]
    assert (len(safegrad), min(safegrad) > 0) == (14, True)
    said = (
        f"all 14 comparisons of both studies (three tasks, their seeds), by {min(safegrad):.3f} to {max(safegrad):.3f}"
    )
    assert said in PAGE
    assert f"all 14 comparisons of both studies, by {min(safegrad):.3f} to {max(safegrad):.3f}" in README
    others = [x for name in ("mix", "penalty") for task in TASKS[:2] for x in each[name, task]]
    assert (len(others), min(others) > 0) == (20, True)
    assert f"in all 10 each on SST-2 and AG News, by {min(others):.3f} to {max(others):.3f}" in PAGE
    counts = [f"{sum(x > 0 for x in each[name, 'gsm8k'])} of {len(each[name, 'gsm8k'])}" for name in ("mix", "penalty")]
    assert f"not on GSM8K (mix {counts[0]}, penalty {counts[1]})" in PAGE
    told = [difference(rows(again, t)["holdfast"], rows(again, t)["safegrad"], "HS").is_lower for t in TASKS]
    assert told == [False, True, False]


def test_what_safegrad_has_on_its_side(first, again):
    def higher(metric: str) -> int:
        pairs = [
            (a.metrics[metric].value, b.metrics[metric].value)
            for cells in (first, again)
            for task in TASKS
            for a in rows(cells, task)["holdfast"]
            for b in rows(cells, task)["safegrad"]
            if a.seed == b.seed
        ]
        assert len(pairs) == 14
        return sum(a > b for a, b in pairs)

    loss = difference(rows(again)["holdfast"], rows(again)["safegrad"], "task_loss")
    assert loss.is_higher
    said = f"a lower loss in {higher('task_loss')} of the 14 (told on SST-2, {loss.value:.3f} nats)"
    assert f"{said} and fewer over-refusals in {higher('over_refusal')}" in PAGE
    assert f"above it in loss in {higher('task_loss')}" in README
    assert f"at a higher loss in {higher('task_loss')} of them" in RESULTS_PAGE


def test_holdfast_against_the_aligned_model(first, again):
    found = []
    for task, name in zip(TASKS, NAMES, strict=True):
        here = rows(again, task)
        found.append(f"{signed(here['holdfast'], started(here['holdfast'], here['aligned']))} on {name}")
    assert f"**Against its own aligned model**: {', '.join(found)}: not told" in PAGE
    each = [
        round(r.metrics["HS"].value - rows(cells, task)["aligned"][0].metrics["HS"].value, 9)
        for cells in (first, again)
        for task in TASKS
        for r in rows(cells, task)["holdfast"]
    ]
    assert (sum(x > 0 for x in each), len(each), sum(x == 0 for x in each)) == (8, 14, 1)
    by_seed = {r.seed: difference([r], started([r], rows(again)["aligned"]), "HS") for r in rows(again)["holdfast"]}
    assert by_seed[7].is_higher
    assert f"told above it ({by_seed[7].value:+.3f}); seed 11 lies at {by_seed[11].value:+.3f}" in PAGE


def test_what_holdfast_pays(first, again):
    here = rows(again)
    price = difference(here["sft"], here["holdfast"], "FA")
    loss = difference(here["holdfast"], here["sft"], "task_loss")
    assert price.is_higher
    assert loss.is_higher
    said = f"{price.value:.3f} of accuracy against plain SFT \\[{price.low:+.3f}, {price.high:+.3f}\\], told"
    assert said in PAGE
    assert f"and {loss.value:.3f} nats of loss, told" in PAGE
    assert f"on SST-2 it paid {price.value:.3f} of accuracy" in README
    above = {
        task: [
            a.metrics["task_loss"].value - b.metrics["task_loss"].value
            for cells in (first, again)
            for a in rows(cells, task)["holdfast"]
            for b in rows(cells, task)["sft"]
            if a.seed == b.seed
        ]
        for task in TASKS
    }
    assert (sum(map(len, above.values())), min(min(each) for each in above.values()) > 0) == (14, True)
    ends = [f"{name} {min(above[t]):.3f} to {max(above[t]):.3f}" for t, name in zip(TASKS[1:], NAMES[1:], strict=True)]
    assert f"in all 14 comparisons of both studies ({', '.join(ends)})" in PAGE
    for task in TASKS[1:]:
        for metric in ("FA", "task_loss"):
            found = difference(rows(again, task)["holdfast"], rows(again, task)["sft"], metric)
            assert not found.is_lower
        assert not found.is_higher
    over = {
        name: [mean(rows(again, task)[name], "over_refusal") for task in TASKS[:2]]
        for name in ("holdfast", "safegrad", "mix")
    }
    assert f"({mean(here['aligned'], 'over_refusal'):.3f} of the harmless borderline prompts refused)" in PAGE
    assert f"at {over['holdfast'][0]:.3f} on SST-2 and {over['holdfast'][1]:.3f} on AG News" in PAGE
    assert f"SafeGrad is at {over['safegrad'][0]:.3f} and {over['safegrad'][1]:.3f}" in PAGE
    assert f"mix at {over['mix'][0]:.3f} and {over['mix'][1]:.3f}" in PAGE


def test_the_papers_setting_by_seed(first, again):
    there, here = (
        {r.seed: f"{r.metrics['HS'].value:.3f}" for r in rows(cells)["holdfast (paper)"]} for cells in (first, again)
    )
    assert f"({there[42]}, {there[1337]} and {there[2024]}); here it is at {here[7]} and {here[11]}" in PAGE


def test_antibody_and_holdfast_on_top_of_it(again):
    plain, kept = rows(again, align="sft"), [rows(again, task, "antibody") for task in TASKS]
    start = mean(kept[0]["aligned"])
    assert f"at {start:.3f} where plain SFT on the same safe pairs reaches {mean(plain['aligned']):.3f}" in PAGE
    attacked = [f"{mean(one['antibody']):.3f}" for one in kept]
    assert f"it is at {attacked[0]}, {attacked[1]} and {attacked[2]} on the three tasks" in PAGE
    accuracy = [f"{mean(one['antibody'], 'FA'):.3f}" for one in kept]
    assert f"({accuracy[0]} and {accuracy[1]}), told above plain SFT on both" in PAGE
    seven = [[r for r in rows(again, task)["sft"] if r.seed == 7] for task in TASKS]
    assert all(difference(one["antibody"], sft, "HS").is_lower for one, sft in zip(kept, seven, strict=True))
    plainly = [f"{mean(sft):.3f}" for sft in seven]
    assert f"told below plain SFT's {plainly[0]}, {plainly[1]} and {plainly[2]} of the same seed" in PAGE
    for task, one in zip(TASKS[:2], kept, strict=False):
        assert difference(one["antibody"], rows(again, task)["sft"], "FA").is_higher
        assert max(mean(found, "FA") for found in rows(again, task).values()) < mean(one["antibody"], "FA")
    ours = [f"{mean(one['holdfast']):.3f}" for one in kept]
    moved = [signed(one["holdfast"], started(one["holdfast"], one["aligned"])) for one in kept]
    said = f"{ours[0]}, {ours[1]} and {ours[2]}, that is {moved[0]}, {moved[1]} and {moved[2]} against its start"
    assert said in PAGE
    lost = [f"{mean(one['antibody']) - mean(one['aligned']):.3f}" for one in kept]
    assert f"fine-tuning adds {lost[0]}, {lost[1]} and {lost[2]}" in PAGE
    apart = [
        difference(one["holdfast"], rows(again, task)["holdfast"], "HS") for task, one in zip(TASKS, kept, strict=True)
    ]
    assert all(one.is_higher for one in apart)
    for task, one in zip(TASKS, kept, strict=True):
        loss = difference(one["holdfast"], rows(again, task)["holdfast"], "task_loss")
        assert not loss.is_lower
        assert not loss.is_higher
    verdicts = [one[0].outcomes["HS"] for one in (kept[0]["holdfast"], kept[0]["aligned"])]
    flips = [a - b for a, b in zip(*verdicts, strict=True) if a != b]
    assert (len(flips), sum(flips), "24 of the 700 verdicts change, twelve each way" in PAGE) == (24, 0, True)
    values = sorted(one.value for one in apart)
    assert f"{values[0]:.3f} to {values[-1]:.3f} more harmful than from the plain alignment" in PAGE


def test_a_tau_chosen_anew_on_antibodys_model(again):
    default = rows(again, align="antibody")["holdfast"]
    settings = {r.setting: [r] for r in again if r.align == "antibody" and r.setting}
    harm = {name: difference(found, default, "HS") for name, found in settings.items()}
    paid = {name: difference(default, found, "FA") for name, found in settings.items()}
    half, quarter = "tau=0.05, beta=20", "tau=0.025, beta=40"
    assert f"({harm[half].value:+.3f} and {harm[quarter].value:+.3f})" in PAGE
    said = f"pay {paid[half].value:.3f} and {paid[quarter].value:.3f} of accuracy by value"
    assert f"{said} (p = {paid[half].p_value:.3f} and {paid[quarter].p_value:.3f})" in PAGE
    assert f"twice the default adds {harm['tau=0.2'].value:.3f} of harm, five times {harm['tau=0.5'].value:.3f}" in PAGE
    assert harm["tau=0.2"].is_higher


def test_each_constraint_held_by_its_own_measure(again):
    def violated(r: Result) -> tuple[int, int]:
        own = r.metrics["own_violation_rate"]
        assert own.value <= r.constraint["alpha"]
        return round(own.value * own.n), own.n

    own = [r for r in again if "own_violation_rate" in r.metrics]
    plain = [r for r in own if r.label in ("holdfast", "primal_dual") and not r.setting]
    assert {violated(r)[0] for r in plain} == {0}
    assert f"none under the defaults and Primal-Dual ({len(plain)} cells)" in PAGE
    paper = [violated(r) for r in own if r.label == "holdfast (paper)"]
    assert (min(paper), max(paper)) == ((0, 273), (6, 273))
    assert f"none to six of 273 under the paper's setting (at most {100 * 6 / 273:.1f} %)" in PAGE
    by_setting = {r.setting: violated(r) for r in own if r.setting}
    assert by_setting["tau=0.05, beta=20"][0] == by_setting["tau=0.025, beta=40"][0] == 0
    (five, n), (ten, _) = by_setting["tau=0.2"], by_setting["tau=0.5"]
    assert f"{five} and {ten} of {n} at 0.2 and 0.5 ({100 * five / n:.1f} and {100 * ten / n:.1f} %)" in PAGE
    loose_cells = [next(r for r in own if r.setting == f"tau={x}") for x in (0.2, 0.5)]
    high = [100 * r.metrics["own_violation_rate"].high for r in loose_cells]
    assert f"the intervals of the last two reach {high[0]:.1f} and {high[1]:.1f} %" in PAGE
    loose = loose_cells[1].metrics["HS"].value
    setting = mean(rows(again)["holdfast (paper)"])
    assert f"holds by value with a model at {loose:.3f}, at the paper's setting with one at {setting:.3f}" in PAGE
