"""Records of the behaviour gate's experiment: what they keep of a certificate, and the table made of them."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from scipy.stats import binom

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "behaviour_gate"
PLACE = "/somewhere/prompts.jsonl"


def script(name):
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


certify, data, table = script("certify"), script("data"), script("table")


def certificate(groups, rows, *, declared=12):
    counted = [dict(zip(("regressions", "n"), one, strict=True)) for one in (groups, rows)]
    return {
        "by": "behaviour", "alpha": 0.05, "confidence": 0.95, "statement": f"models at {PLACE}", "sha256": "ab",
        "openings": {"this": 3, "declared": declared, "ledger": PLACE, "claim": "x"}, "leakage": {"checked": True},
        "bound": {"before_sha256": "cd"}, "places": {"prompts": PLACE}, "groups": counted[0], "rows": counted[1],
        "behaviour": {"prompts": 700, "unclear": 4},
    }  # fmt: skip


def record(run, seed, by, figures, code):
    return {
        "kind": "certificate", "run": run, "seed": seed, "by": by, "exit_code": code, "figures": figures,
        "message": "", "command": f"holdfast certify {run}", "seconds": 2.0,
        "model": {"name": "M", "gguf_sha256": "0123456789abcdef"},
        "provenance": {"commit": "c", "hardware": "H", "versions": {"torch": "2", "transformers": "5"}},
    }  # fmt: skip


def test_a_record_keeps_figures_and_hashes_but_no_place_and_no_sentence():
    kept = certify.figures_of(certificate((3, 400), (4, 430)))
    assert PLACE not in json.dumps(kept)
    assert kept["groups"] == {"regressions": 3, "n": 400}
    assert kept["openings"] == {"this": 3, "declared": 12}
    assert kept["bound"]["before_sha256"] == "cd"


@pytest.mark.parametrize(("groups", "rows"), [((3, 400), (4, 430)), ((0, 59), (9, 120)), ((30, 400), (30, 430))])
def test_bounds_are_the_larger_of_both_tests_at_a_twelfth_and_at_the_whole_error(groups, rows):
    figures = certify.figures_of(certificate(groups, rows))
    for found, level in ((table.bound(figures), 0.05 / 12), (table.opened_once(figures), 0.05)):
        tails = [binom.cdf(k, n, found) for k, n in (groups, rows)]
        assert max(tails) == pytest.approx(level, rel=1e-6)


def test_the_table_has_a_row_a_run_with_sft_first(tmp_path):
    figures = certify.figures_of(certificate((3, 400), (4, 430)))
    for one in (
        record("holdfast", 1, "behaviour", figures, 0),
        record("holdfast", 1, "likelihood", figures, 0),
        record("sft", 1, "behaviour", certify.figures_of(certificate((390, 400), (420, 430))), 4),
        record("sft", 1, "likelihood", None, 4),
    ):
        (tmp_path / f"{one['run']}.{one['by']}.json").write_text(json.dumps(one))
    (tmp_path / "other.json").write_text("{}")
    lines = table.table(table.read_records(tmp_path))[2:]
    sft, holdfast = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert sft[:6] == ["sft", "1", "700", "400", "390", "4"]
    assert sft[8:] == ["4", "-", "-", "-", "-", "4"]
    assert holdfast[:6] == ["holdfast", "1", "700", "400", "3", "4"]
    assert holdfast[8:11] == ["0", "400", "3"]
    assert all(len(line.split("|")) == len(table.HEAD[0].split("|")) for line in lines)


def test_a_page_is_written_between_its_markers_only():
    text = f"before\n{table.START}\nold\n{table.END}\nafter <!-- end -->"
    assert table.rewritten(text, "new") == f"before\n{table.START}\nnew\n{table.END}\nafter <!-- end -->"
    with pytest.raises(SystemExit, match="behaviour gate"):
        table.rewritten("no markers", "new")


def test_prompts_are_spread_evenly_over_their_kinds():
    rows = [{"kind": "a", "n": i} for i in range(40)] + [{"kind": "b", "n": i} for i in range(5)]
    picked = data.spread(rows, 20, "kind", "x")
    assert Counter(row["kind"] for row in picked) == {"a": 15, "b": 5}
    assert len({(row["kind"], row["n"]) for row in picked}) == 20
    assert picked == data.spread(rows, 20, "kind", "x")
