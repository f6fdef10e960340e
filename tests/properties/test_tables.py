"""Tables over all inputs: mean and deviation are numpy's, ranks are scipy's, marks follow their definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from holdfast_lab.tables.formats import LATEX_ESCAPES as ESCAPES
from holdfast_lab.tables.formats import escape_latex as escape
from holdfast_lab.tables.formats import escape_markdown as markdown_escape
from holdfast_lab.tables.reported import spearman
from holdfast_lab.tables.results import Measured, Result
from holdfast_lab.tables.table import Cell, Column, Row, marked, pooled

shares = st.floats(0, 1, allow_subnormal=False)
# Few distinct values, so that ties are common.
coarse = st.integers(0, 6).map(lambda k: k / 7)


def result(seed: int, value: float) -> Result:
    return Result(
        cell=str(seed), model="m", task="t", defense="sft", label="sft", setting="", align="sft", poison_ratio=0.5,
        seed=seed, protocol_sha256="0", protocol={}, metrics={"HS": Measured(value)}, constraint={}, path=Path("x"),
    )  # fmt: skip


@given(st.lists(shares, min_size=2, max_size=6))
def test_mean_and_deviation_are_numpys(values):
    cell = pooled([result(seed, value) for seed, value in enumerate(values)], "HS", "t", 0.5)
    assert cell.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert cell.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    assert cell.seeds == len(values)
    assert min(values) <= cell.mean <= max(values)


@given(shares, st.integers(2, 6))
def test_equal_seeds_have_their_value_and_no_spread(value, n):
    cell = pooled([result(seed, value) for seed in range(n)], "HS", "t", 0.5)
    assert (cell.mean, cell.std) == (value, 0.0)


@given(st.lists(st.tuples(coarse, coarse), min_size=3, max_size=12))
def test_rank_correlation_is_scipys(pairs):
    one, other = ([pair[i] for pair in pairs] for i in (0, 1))
    ours = spearman(one, other)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert ours is None
    else:
        assert ours == pytest.approx(scipy.stats.spearmanr(one, other).statistic, abs=1e-12)


figures = st.lists(
    st.tuples(st.booleans(), st.one_of(st.none(), st.floats(0, 0.02))),
    min_size=1,
    max_size=9,
)


@given(figures, st.sampled_from(["HS", "FA"]), st.booleans())
def test_marks_follow_their_definition(rows, metric, second):
    """Against a count: a figure is best when no taking part prints better, second when only best ones do."""
    made = [
        Row(str(i), "base" if reference else "lisa", "sft", "", reference, (Cell(metric, "t", None, value),))
        for i, (reference, value) in enumerate(rows)
    ]
    found = [row.cells[0].mark for row in marked(made, [Column("", metric)], second=second, without=frozenset())]
    sign = 1 if metric == "HS" else -1
    printed = [sign * int(f"{value:.3f}".replace(".", "")) if value is not None else None for _, value in rows]
    part = [p for p, (reference, _) in zip(printed, rows, strict=True) if p is not None and not reference]
    for mark, own, (reference, _) in zip(found, printed, rows, strict=True):
        expected = None
        if own is not None and not reference and any(other != own for other in part):
            better = {other for other in part if other < own}
            if not better:
                expected = "best"
            elif second and len(better) == 1:
                expected = "second"
        assert mark == expected


@given(st.text())
def test_latex_text_means_itself(text):
    """Undoing the escapes gives the printable text back, and no special character is left bare."""
    escaped = escape(text)
    undone, rest = "", escaped
    by_length = sorted(ESCAPES.items(), key=lambda item: -len(item[1]))
    while rest:
        raw, used = next(((raw, made) for raw, made in by_length if rest.startswith(made)), (rest[0], rest[0]))
        assert raw in ESCAPES or raw not in "\\{}$&#%_^~"
        undone, rest = undone + raw, rest[len(used) :]
    assert undone == " ".join("".join(c if c.isprintable() else " " for c in text).split())


@given(st.text())
def test_markdown_text_stays_in_its_cell(text):
    escaped = markdown_escape(text)
    bare = escaped.replace("\\\\", "").replace("\\|", "")
    assert "|" not in bare
    assert "\n" not in escaped
