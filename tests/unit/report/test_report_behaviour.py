"""Behaviour on the page and in the card: before everything else, in words and as a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.report.synthetic import Words, certificate, write_run

from holdfast.certification.kept import Kept
from holdfast.core.errors import CheckpointError
from holdfast.records.run_record import read_result, write_result
from holdfast.reporting.behaviour import behaviour_view, kept_chart, kept_figures
from holdfast.reporting.card import card_text
from holdfast.reporting.page import write_report
from holdfast.reporting.read import read_evidence
from holdfast.reporting.training import course
from holdfast.reporting.verdict import Standing, headline, verdict

KEPT = {"refusals_kept": Kept(197, 200, 0.05), "answers_kept": Kept(198, 200, 0.1, 2), "coverage": Kept(183, 190, 0.1)}
LOST = {**KEPT, "coverage": Kept(61, 190, 0.1)}


def watched(folder: Path, figures: dict[str, Kept], **more) -> Path:
    """A finished run whose behaviour was watched."""
    run = write_run(folder / "run", certified=certificate(Words()))
    values = {key: value for key, value in read_result(run).items() if key != "sha256"}
    changed: Any = {**values, "behaviour": {name: one.to_json() for name, one in figures.items()}, **more}
    write_result(run, changed)
    return run


def page(run: Path) -> str:
    write_report([read_evidence(run)], run / "report.html")
    return (run / "report.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")


def test_it_is_the_first_figure_with_its_text(tmp_path):
    html = page(watched(tmp_path, KEPT))
    first = re.search(r"<svg.*?</svg>", html, re.DOTALL)
    assert first is not None
    assert "<title>Behaviour kept: before and after training</title>" in first[0]
    # In its <desc>:
    assert f"{KEPT['refusals_kept'].line('refusals_kept')}." in first[0]
    for name, one in KEPT.items():
        assert f"<li>{one.line(name)}</li>" in html
    assert html.index("Behaviour before and after") < html.index("The figures that matter")


def test_marks_stand_where_the_figures_are():
    chart = kept_chart(LOST, 704, "wide")
    low = min(one.low for one in LOST.values()) - 0.05

    def x(share: float) -> float:
        return 92 + (share - low) / (1 - low) * (704 - 30 - 92)

    dots = [float(v) for v in re.findall(r'class="dot(?: lost| open)?" cx="([\d.]+)"', chart)]
    assert dots == pytest.approx([x(197 / 200), x(198 / 200), x(61 / 190)], abs=0.01)
    rings = [float(v) for v in re.findall(r'class="before" cx="([\d.]+)"', chart)]
    assert rings == pytest.approx([x(1.0)] * 3, abs=0.01)
    limits = [float(v) for v in re.findall(r'class="limit" x1="([\d.]+)"', chart)]
    assert limits == pytest.approx([x(0.95), x(0.9), x(0.9)], abs=0.01)
    bounds = [float(v) for v in re.findall(r'class="whisker lost" x1="([\d.]+)" y1="[\d.]+" x2="[\d.]+"', chart)]
    assert bounds[0] == pytest.approx(x(LOST["coverage"].low), abs=0.01)
    assert [chart.count(word) for word in (", lost", ", within the limit", ", not shown")] == [1, 2, 0]


def test_lost_behaviour_is_the_verdict_even_beside_a_certificate(tmp_path):
    kept = read_evidence(watched(tmp_path / "kept", KEPT))
    assert verdict(kept).standing is Standing.CERTIFIED
    run = watched(tmp_path / "lost", LOST)
    found = verdict(read_evidence(run))
    assert (found.standing, found.title) == (Standing.OVER, "Behaviour lost")
    assert found.reason.startswith("Coverage: refusals kept 32.1 % (61 of 190 groups")
    html = page(run)
    assert "<code>safety: {refusals: {prompts: [task, probes], keep: refusals}}</code>" in html
    assert "Behaviour lost" in html


def test_the_card_has_the_same_lines(tmp_path):
    run = watched(tmp_path, LOST, rolled_back_to=30)
    text = card_text(read_evidence(run)).replace("\\", "")
    for name, one in LOST.items():
        assert f"- {one.line(name)}" in text
    assert "- rolled back to step 30, the last checkpoint whose behaviour was not over its limits" in text
    assert text.index("## Behaviour") < text.index("## Figures")


def test_a_rollback_that_found_nothing_is_said(tmp_path):
    view = behaviour_view(read_evidence(watched(tmp_path, LOST, rolled_back_to=None)))
    assert view is not None
    assert view.way_back == "no checkpoint kept its behaviour: these are the weights of the last step"


def test_too_few_groups_show_nothing(tmp_path):
    html = page(watched(tmp_path, {"refusals_kept": Kept(12, 12, 0.05), "coverage": Kept(0, 0, 0.1)}))
    assert "100 % of 12 groups, not shown" in html
    assert ">no prompts</text>" in html
    assert "not shown: 12 groups are too few" in html


STATES = {"refusals_kept": Kept(7, 7, 0.05), "answers_kept": Kept(198, 200, 0.1), "coverage": Kept(61, 190, 0.1)}


def test_lost_within_and_not_shown_are_three_words_and_three_colours(tmp_path):
    """No loss among 7 groups shows nothing: it is not within the limit, and not green, anywhere."""
    run = watched(tmp_path, STATES)
    html, chart = page(run), kept_chart(STATES, 704, "wide")
    found = re.findall(r'<td class="fit (\w+)"><span class="label">result</span> ([\w ]+)</td>', html)
    assert found == [("warn", "not shown"), ("good", "within"), ("bad", "lost")]
    assert re.findall(r'class="(dot[ \w]*)"', chart) == ["dot open", "dot", "dot lost"]
    assert "100 % of 7 groups, not shown" in chart
    card = card_text(read_evidence(run))
    assert "not shown: 7 groups are too few, 59 may show it" in card.replace("\\", "")
    write_report([read_evidence(run)] * 2, run / "both.html")
    both = (run / "both.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert '<td class="fit warn">100 % of 7<br>not shown</td><td class="fit good">99 % of 200<br>within</td>' in both


def test_what_happened_is_read_before_verdict_and_limit(tmp_path):
    run = watched(tmp_path, STATES)
    html, card = page(run), card_text(read_evidence(run)).replace("\\", "")
    (heading,) = re.findall("<h1.*?>(.*?)</h1>", html)
    assert heading == (
        "Still refused: 7 of 7 (65.1 % to 100 %). Still answered: 198 of 200 (96.8 % to 99.9 %). "
        "Other harm, still refused: 61 of 190 (26.5 % to 38.2 %)."
    )
    for text in (html, card):
        assert text.index("7 of 7 (65.1") < text.index("Behaviour lost") < text.index("With 95 % confidence, at most")


def test_a_run_that_was_not_watched_shows_nothing_new(tmp_path):
    run = write_run(tmp_path / "run")
    evidence = read_evidence(run)
    assert kept_figures(evidence) == {}
    assert headline(evidence) == "By the judge, 3 of 220 replies were safe before and are unsafe now."
    assert headline(read_evidence(write_run(tmp_path / "unjudged", judged=False))).endswith("was not measured.")
    html = page(run)
    assert "Behaviour before and after" not in html
    assert 'class="before"' not in html
    assert "## Behaviour" not in card_text(evidence)


KINDS = (("animal_cruelty", 40, 40), ("privacy", 3, 50), ("<b>weapons</b>\u202e", 18, 100))


def test_kinds_are_a_table_of_their_own_the_smallest_share_first(tmp_path):
    html = page(watched(tmp_path, {**LOST, "coverage": Kept(61, 190, 0.1, 0, KINDS)}))
    table = re.search(r'<table class="numbers kinds">.*?</table>', html, re.DOTALL)
    assert table is not None
    assert re.findall('<th scope="col">(.*?)</th>', table[0]) == ["kind of prompt", "kept", "share", "95 % bounds"]
    assert re.findall('<th scope="rowgroup" colspan="4">(.*?)</th>', table[0]) == ["other harm, still refused"]
    rows = re.findall('<th scope="row"><bdi>(.*?)</bdi></th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>', table[0])
    assert rows == [
        ("privacy", "3 of 50", "6 %", Kept(3, 50, 0.1).bounds),
        ("&lt;b&gt;weapons&lt;/b&gt;⟨U+202E⟩", "18 of 100", "18 %", Kept(18, 100, 0.1).bounds),
        ("animal_cruelty", "40 of 40", "100 %", Kept(40, 40, 0.1).bounds),
    ]
    assert html.index("Behaviour before and after") < html.index("By kind of prompt") < html.index("The figures that")


def test_a_run_of_before_kinds_were_counted_has_no_table_of_them(tmp_path):
    run = watched(tmp_path, KEPT)
    assert not any("kinds" in one for one in read_result(run)["behaviour"].values())
    html = page(run)
    assert "Behaviour before and after" in html
    assert "By kind of prompt" not in html


@pytest.mark.parametrize("kinds", [[], {"privacy": 3}, {"privacy": {"kept": 3}}, {"privacy": {"kept": 3, "of": 2}}])
def test_damaged_kinds_are_named_and_never_drawn(tmp_path, kinds):
    run = watched(tmp_path, KEPT)
    values = {key: value for key, value in read_result(run).items() if key != "sha256"}
    values["behaviour"]["coverage"]["kinds"] = kinds
    write_result(run, values)
    with pytest.raises(CheckpointError, match="coverage"):
        page(run)


def test_rows_of_the_monitor_are_no_steps(tmp_path):
    run = watched(tmp_path, KEPT)
    events = run / "events.jsonl"
    before = read_evidence(run).events
    row = {"step": 40, "behaviour": {name: one.to_json() for name, one in KEPT.items()}, "prompts_sha256": "x"}
    events.write_text(events.read_text() + json.dumps(row) + "\n")
    after = read_evidence(run).events
    assert len(after) == len(before) + 1
    plain, watched_too = course(before, "safety"), course(after, "safety")
    assert watched_too.steps.tolist() == plain.steps.tolist()
    assert watched_too.counts == plain.counts


@pytest.mark.parametrize(
    "damage", [{"kept": 201}, {"limit": 1.0}, {"limit": None}, {"of": "many"}, {"kept": -1}, {"unsorted": 0.5}]
)
def test_damaged_figures_are_named_and_never_drawn(tmp_path, damage):
    run = watched(tmp_path, KEPT)
    values = {key: value for key, value in read_result(run).items() if key != "sha256"}
    values["behaviour"]["refusals_kept"] |= damage
    write_result(run, values)
    with pytest.raises(CheckpointError, match="refusals_kept"):
        page(run)
