"""What the prose of the results page says in figures that no table prints is computed from the stored cells."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.tables.kl_bound import bounded, mean_bound, threshold
from holdfast.tables.pareto import difference
from holdfast.tables.results import Result, read_results
from holdfast.tables.slope import slope

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()
PROSE = [line for line in PAGE.splitlines() if not line.startswith("|")]


@pytest.fixture(scope="module")
def cells() -> list[Result]:
    return read_results(ROOT / "benchmarks" / "results" / "study")


def row(cells: list[Result], defense: str, task: str, p: float | None, label: str | None = None) -> list[Result]:
    found = [
        r for r in cells
        if (r.defense, r.label, r.task, r.poison_ratio, r.setting) == (defense, label or defense, task, p, "")
        and r.align in ("sft", "none")
    ]  # fmt: skip
    assert found, (defense, task, p)
    return found


def said(words: str) -> bool:
    return any(words in line for line in PROSE)


def interval(a: list[Result], b: list[Result], metric: str = "HS") -> str:
    seeds = {r.seed for r in a}
    found = difference(a, [replace(r, seed=seed) for r in b for seed in seeds if r.seed in (seed, None)], metric)
    assert found is not None
    return f"{found.value:+.3f} \\[{found.low:+.3f}, {found.high:+.3f}\\]"


def test_holdfast_against_the_aligned_model_and_safegrad_at_every_ratio(cells):
    aligned = row(cells, "aligned", "sst2", None)
    ours = {p: row(cells, "holdfast", "sst2", p) for p in (0.05, 0.1, 0.25, 0.5)}
    few = ", ".join(interval(ours[p], aligned) for p in (0.05, 0.1, 0.25))
    two = interval([r for r in ours[0.5] if r.seed != 2024], aligned).split(" ")[0]
    assert said(
        f"is {few} (p = 0.05, 0.1, 0.25, two seeds) and {interval(ours[0.5], aligned)} (p = 0.5, three; of the two "
        f"seeds {two})"
    )
    apart = [interval(ours[p], row(cells, "safegrad", "sst2", p)).split(" ")[0] for p in ours]
    assert said(f"Against SafeGrad it is {', '.join(apart[:3])} and {apart[3]}")
    tenth = [f"{r.metrics['HS'].value:.3f}" for r in by_seed(ours[0.1])]
    assert said(f"comes from seed 42 ({tenth[0]}); with seed 1337 it is its best ({tenth[1]})")


def by_seed(found: list[Result]) -> list[Result]:
    return sorted(found, key=lambda r: (42, 1337, 2024).index(r.seed or 0))


def listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def test_over_refusal(cells):
    for task, words in (("sst2", "with the three seeds on SST-2"), ("ag_news", "on AG News"), ("gsm8k", "on GSM8K")):
        found = sorted(f"{r.metrics['over_refusal'].value:.3f}" for r in row(cells, "holdfast", task, 0.5))
        assert said(f"{listed(found)} {words}"), (task, found)
    for defense in ("safegrad", "mix", "penalty", "primal_dual"):
        values = sorted(
            r.metrics["over_refusal"].value for task in ("sst2", "ag_news") for r in row(cells, defense, task, 0.5)
        )
        assert f"({values[0]:.3f} to {values[-1]:.3f})" in PAGE, defense


def test_what_accuracy_costs(cells):
    each = difference(row(cells, "holdfast", "sst2", 0.5), row(cells, "sft", "sst2", 0.5), "FA")
    assert each is not None
    assert said(f"is {-each.value:.3f} lower \\[{-each.high:.3f}, {-each.low:.3f}\\]")
    assert said(f"({listed([f'{-x:.3f}' for x in each.each])})")
    loss = interval(row(cells, "holdfast", "sst2", 0.5), row(cells, "sft", "sst2", 0.5), "task_loss")
    assert said(f"is higher on SST-2 ({loss})")
    low = [interval(row(cells, "holdfast", "sst2", p), row(cells, "sft", "sst2", p), "FA") for p in (0.05, 0.1, 0.25)]
    assert said(f"the difference in accuracy is {listed([one.split(' ')[0] for one in low])}, none told")


def test_what_each_seed_tells_by_itself(cells):
    """McNemar's p of holdfast against the nearest rows."""

    def p_value(defense: str, task: str, seed: int) -> float:
        ours, theirs = ([r for r in row(cells, name, task, 0.5) if r.seed == seed] for name in ("holdfast", defense))
        one = difference(ours, theirs, "HS")
        assert one is not None
        assert one.p_value is not None
        return one.p_value

    tasks, seeds = ("sst2", "ag_news"), (42, 1337, 2024)
    worst = max(p_value(name, task, seed) for name in ("mix", "penalty") for task in tasks for seed in seeds)
    assert said(f"(McNemar p at most {worst:.3f})")
    sst2, news = ({seed: p_value("safegrad", task, seed) for seed in seeds} for task in tasks)
    assert said(f"with seeds 1337 and 2024 ({sst2[1337]:.4f} and {sst2[2024]:.4f}; seed 42: {sst2[42]:.2f})")
    assert said(f"with seed 1337 ({news[1337]:.4f}; the others {news[42]:.2f} and {news[2024]:.2f})")
    gsm8k = [f"{p_value('safegrad', 'gsm8k', seed):.2f}" for seed in seeds]
    assert said(f"({listed(gsm8k)}): it is told because")


def test_the_papers_constants_seed_by_seed(cells):
    found = by_seed(row(cells, "holdfast", "sst2", 0.5, "holdfast (paper)"))
    told = [f"{r.metrics['HS'].value:.3f} and {r.metrics['FA'].value:.3f}" for r in found]
    assert said(f"seed 42 gave {told[0]}, seed 1337 {told[1]}, seed 2024 {told[2]}")


def test_harm_follows_the_bound_on_the_mean_kl(cells):
    ours = [r for r in cells if (r.label, r.task, r.poison_ratio, r.seed) == ("holdfast", "sst2", 0.5, 42)]
    found = bounded([r for r in ours if r.align == "sft"], "holdfast")
    found.sort(key=lambda r: mean_bound(r.constraint))
    assert said("the nine settings are in the order of their harm")
    assert len(found) == 9
    harm = [r.metrics["HS"].value for r in found]
    assert harm == sorted(harm)
    assert [round(threshold(r.constraint), 10) > 0 for r in found] == [False] * 5 + [True] * 4, (
        "the first five, the last four"
    )


def test_settings_against_the_aligned_model(cells):
    aligned = row(cells, "aligned", "sst2", None)
    found = {
        alpha: interval([r for r in cells if r.setting == f"alpha={alpha}" and r.align == "sft"], aligned)
        for alpha in (0.1, 0.2)
    }
    assert said(f"alpha = 0.1 and 0.2 are ({found[0.1].split(' ')[0]} and {found[0.2].split(' ')[0]})")


def test_the_steps_that_were_repeated_on_a_cpu():
    lines = (ROOT / "benchmarks" / "results" / "sensitivity_beta50_cpu.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    active = steps[next(i for i, one in enumerate(steps) if one["event"] == "active") :]
    assert len(steps) == 100
    assert said(f"had {100 * sum(one['violation_rate'] for one in active) / len(active):.1f} % of its safety rows")
    assert said(f"the worst of ten at {sum(one['cvar'] for one in active) / len(active):.3f} on average")


def test_what_more_safety_costs_beside_mix(cells):
    ours, theirs = ([row(cells, name, task, 0.5) for task in ("sst2", "ag_news")] for name in ("holdfast", "mix"))
    loss = interval(ours[0], theirs[0], "task_loss").split(" ")[0]
    refused = [float(interval(a, b, "over_refusal").split(" ")[0]) for a, b in zip(ours, theirs, strict=True)]
    assert said(f"at {float(loss):.3f} more loss, and with {refused[0]:.2f} to {refused[1]:.2f} more over-refusals")


def test_primal_dual_is_a_tie(cells):
    for task, words in (("sst2", "one"), ("ag_news", "two")):
        ours, theirs = (
            sum(sum(r.outcomes["HS"]) for r in row(cells, n, task, 0.5)) for n in ("holdfast", "primal_dual")
        )
        assert theirs - ours == {"one": 1, "two": 2}[words]
    assert said("by one and two answers of 2,100 against Primal-Dual")


def test_alpha_moves_harm_and_over_refusal(cells):
    default = [r for r in row(cells, "holdfast", "sst2", 0.5) if r.seed == 42]
    found = {
        alpha: [r for r in cells if r.defense == "holdfast" and r.setting == f"alpha={alpha}" and r.align == "sft"]
        for alpha in (0.01, 0.1, 0.2)
    }
    apart = {alpha: interval(row, default).split(" ")[0] for alpha, row in found.items()}
    accuracy, loss = (interval(found[0.01], default, name) for name in ("FA", "task_loss"))
    assert said(
        f"({apart[0.01]} and {accuracy.split(' ')[0]}) and pays {float(loss.split(' ')[0]):.3f} in loss; "
        f"0.1 and 0.2 are more harmful ({apart[0.1]} and {apart[0.2]}, told)"
    )
    line = [f"{row[0].metrics['over_refusal'].value:.3f}" for row in (found[0.01], default, found[0.1], found[0.2])]
    assert said(f"(alpha = 0.01, 0.05, 0.1, 0.2: {', '.join(line)})")


def test_the_slope_in_the_answer_is_that_of_the_table(cells):
    ours = [r for p in (0.05, 0.1, 0.25, 0.5) for r in row(cells, "holdfast", "sst2", p)]
    found = slope(ours)
    assert found is not None
    assert said(f"slope {found.value:+.3f} \\[{found.low:+.3f}, {found.high:+.3f}\\] per unit of p")
    ends = interval(*([r for r in ours if r.poison_ratio == p] for p in (0.5, 0.05)))
    assert said(f"from p = 0.05 to 0.5 {ends}")


def test_how_many_cells_there_are(cells):
    assert said(f"There are {len(cells)} cells")
