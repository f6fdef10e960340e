"""What the prose of the results page says in figures that no table prints is computed from the stored cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.tables.pareto import difference
from holdfast.tables.results import Result, read_results

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


def test_holdfast_at_a_tenth_and_a_quarter_of_poison(cells):
    ours = {p: [r for r in row(cells, "holdfast", "sst2", p) if r.seed == 42] for p in (0.1, 0.25, 0.5)}
    aligned = row(cells, "aligned", "sst2", None)
    for words in (
        f"above the aligned model ({interval(ours[0.1], aligned)})",
        f"above SafeGrad at the same p ({interval(ours[0.1], row(cells, 'safegrad', 'sst2', 0.1))}",
        f"above itself at p = 0.5 ({interval(ours[0.1], ours[0.5])})",
        f"below its own p = 0.1 ({interval(ours[0.25], ours[0.1])})",
    ):
        assert said(words), words
    assert f"({interval(ours[0.25], aligned)})" in PAGE


def test_over_refusal(cells):
    shown = {
        r.task: sorted(
            f"{one.metrics['over_refusal'].value:.3f}" for one in row(cells, "holdfast", r.task, 0.5)
        )
        for r in row(cells, "holdfast", "sst2", 0.5) + row(cells, "holdfast", "ag_news", 0.5)
        + row(cells, "holdfast", "gsm8k", 0.5)
    }  # fmt: skip
    for task, words in (("sst2", "with the two seeds on SST-2"), ("ag_news", "on AG News"), ("gsm8k", "on GSM8K")):
        assert said(f"{' and '.join(shown[task])} {words}"), (task, shown[task])
    for defense in ("safegrad", "mix", "penalty", "primal_dual"):
        values = sorted(
            r.metrics["over_refusal"].value for task in ("sst2", "ag_news") for r in row(cells, defense, task, 0.5)
        )
        assert f"({values[0]:.3f} to {values[-1]:.3f})" in PAGE, defense


def test_what_accuracy_costs(cells):
    each = difference(row(cells, "holdfast", "sst2", 0.5), row(cells, "sft", "sst2", 0.5), "FA")
    assert each is not None
    assert said(f"is {-each.value:.3f} lower \\[{-each.high:.3f}, {-each.low:.3f}\\]")
    assert said(f"({-each.each[0]:.3f} and {-each.each[1]:.3f})")


def test_what_each_seed_tells_by_itself(cells):
    """McNemar's p of holdfast against the nearest rows."""

    def p_values(defense: str, seed: int) -> list[float]:
        found = []
        for task in ("sst2", "ag_news"):
            ours, theirs = (
                [r for r in row(cells, name, task, 0.5) if r.seed == seed] for name in ("holdfast", defense)
            )
            one = difference(ours, theirs, "HS")
            assert one is not None
            assert one.p_value is not None
            found.append(one.p_value)
        return found

    worst = max(p for name in ("mix", "penalty") for seed in (42, 1337) for p in p_values(name, seed))
    assert said(f"(McNemar p at most {worst:.3f})")
    told, untold = p_values("safegrad", 1337), p_values("safegrad", 42)
    assert said(
        f"with seed 1337 ({told[0]:.4f} and {told[1]:.4f}) and not with seed 42 ({untold[0]:.2f} and {untold[1]:.2f})"
    )


def test_the_papers_constants_of_two_seeds(cells):
    seeds = {r.seed: r.metrics for r in row(cells, "holdfast", "sst2", 0.5, "holdfast (paper)")}
    assert said(
        f"seed 42 gave {seeds[42]['HS'].value:.3f} and {seeds[42]['FA'].value:.3f}, "
        f"seed 1337 {seeds[1337]['HS'].value:.3f} and {seeds[1337]['FA'].value:.3f}"
    )


def test_how_many_cells_there_are(cells):
    assert said(f"There are {len(cells)} cells")
