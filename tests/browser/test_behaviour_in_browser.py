"""The behaviour figures in a real browser: the first picture, whole on a desk and on a phone."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.certification.kept import Kept
from holdfast.records.run_record import read_result, write_result
from holdfast.reporting.page import write_report
from holdfast.reporting.read import read_evidence
from tests.unit.report.synthetic import write_run

FIGURES = {
    "refusals_kept": Kept(12, 12, 0.05),  # has the longest label
    "answers_kept": Kept(198, 200, 0.1, 2),
    "coverage": Kept(61, 190, 0.1, 0, (("financial_crime", 9, 90), ("privacy", 52, 100))),
}
PLACES = """() => {
  const svg = [...document.querySelectorAll('svg.chart')].find(s => s.getBoundingClientRect().width > 0);
  const frame = svg.getBoundingClientRect();
  const box = e => e.getBoundingClientRect();
  return {title: svg.querySelector('title').textContent,
          outside: [...svg.querySelectorAll('text, circle, rect')].filter(e => box(e).left < frame.left - 0.5 ||
            box(e).right > frame.right + 0.5 || box(e).top < frame.top - 0.5 || box(e).bottom > frame.bottom + 0.5)
            .map(e => e.textContent || e.tagName),
          texts: [...svg.querySelectorAll('text')].map(e => e.textContent)};
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("behaviour")
    run = write_run(folder / "run")
    values = {key: value for key, value in read_result(run).items() if key != "sha256"}
    changed: Any = {**values, "behaviour": {name: one.to_json() for name, one in FIGURES.items()}}
    write_result(run, changed)
    write_report([read_evidence(run)], folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize(("width", "scheme"), [(900, "light"), (360, "dark")])
def test_the_first_picture_is_behaviour_and_nothing_of_it_is_cut(open_page, report, width, scheme):
    opened = open_page(report, width=width, scheme=scheme)
    found = opened.page.evaluate(PLACES)
    assert opened.messages == []
    assert found["title"] == "Behaviour kept: before and after training"
    assert found["outside"] == []
    assert "100 % of 12 groups, not shown" in found["texts"]
    assert "32.1 % of 190 groups, lost" in found["texts"]


def test_runs_side_by_side_begin_with_their_behaviour(open_page, report, tmp_path):
    """A run may lose its refusals while every held reply moved less than its limit: the table must not hide that."""
    runs = [report.parent / "run", write_run(tmp_path / "unwatched")]
    write_report([read_evidence(run) for run in runs], tmp_path / "both.html")
    opened = open_page(tmp_path / "both.html")
    first, second = opened.page.locator("table").first.locator("tbody tr").all()
    shown = [words.replace("\N{NO-BREAK SPACE}", " ") for words in first.locator("td").all_inner_texts()]
    assert shown[1:] == ["100 % of 12\nnot shown", "99 % of 200\nwithin", "32.1 % of 190\nlost"]
    assert first.locator("td").last.get_attribute("class") == "fit bad"
    assert second.locator("td").all_inner_texts()[1:] == ["\N{EN DASH}"] * 3
    regions = opened.page.locator('[role="region"]').evaluate_all("all => all.map(e => e.ariaLabel)")
    assert len(set(regions)) == len(regions)  # axe: landmark-unique
