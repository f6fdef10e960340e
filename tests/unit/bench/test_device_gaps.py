"""Gaps of a device from made-up kernels and host sections, and the option of the benchmark that reports them."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import tiny
from tests.unit.auditing.making import write_adapter, write_rows

from holdfast.auditing import windows as windowing
from holdfast.auditing.audit import AuditOptions, audit_roles
from holdfast.auditing.pair import open_pair
from holdfast.constraint.chance import ChanceConstraint
from holdfast.data.stream import open_stream

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda at: (at[0], at[0] + at[1])))


def script(name):
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


module = script("device_gaps")


@given(INTERVALS)
def test_union_and_gaps_share_every_moment_out(intervals):
    busy = module.union(intervals)
    idle = module.gaps(busy, 5, 30)
    for moment in range(5, 30):  # the second that begins then
        in_kernel = any(a <= moment < b for a, b in intervals)
        assert sum(a <= moment < b for a, b in busy) == in_kernel
        assert sum(a <= moment < b for a, b in idle) == (not in_kernel)
    assert all(first[1] < second[0] for first, second in pairwise(busy))
    assert all(5 <= a < b <= 30 for a, b in idle)


def test_a_gap_is_shared_out_among_the_sections():
    calls = module.timeline({"forward": [(0, 2), (6, 7)], "encoding": [(3, 5), (20, 30)]})
    assert module.shares((1, 10), calls) == {"forward": 2, "encoding": 2, "other": 5}
    assert module.shares((2, 3), calls) == {"other": 1}
    assert module.shares((3.5, 4.5), calls) == {"encoding": 1, "other": 0}


def test_the_report_names_the_longest_gaps_and_their_cause():
    kernels = [(1, 2), (9, 11), (12, 14), (13, 15), (19, 20), (23, 40), (50, 51)]
    sections = {"forward": [(10.5, 12)], "encoding": [(15, 18)], "storing": [(20, 21)]}
    found = module.report(kernels, (10, 30), sections, longest=3)
    assert found["seconds"] == 20
    assert found["device_busy_seconds"] == 1 + 3 + 1 + 7
    assert found["idle_seconds_by_section"] == {"forward": 1, "encoding": 3, "storing": 1, "other": 3}
    assert found["longest_gaps"] == [
        {"seconds": 4, "at_seconds": 5, "section": "encoding"},
        {"seconds": 3, "at_seconds": 10, "section": "other"},
        {"seconds": 1, "at_seconds": 1, "section": "forward"},
    ]


def test_what_comes_before_the_first_kernel_and_after_the_last_is_idle():
    found = module.report([(2, 3)], (0, 7), {"waiting": [(3, 7)]})
    assert [gap["at_seconds"] for gap in found["longest_gaps"]] == [3, 0]
    assert [gap["section"] for gap in found["longest_gaps"]] == ["waiting", "other"]


def test_kernels_are_moved_to_the_hosts_clock_by_the_marked_one():
    assert module.on_host_clock([(105, 106), (101, 102), (100, 101)], 1, 7.0) == [(6, 7), (7, 8), (11, 12)]
    with pytest.raises(RuntimeError, match="recorded no kernels"):
        module.on_host_clock([(1, 2)], 1, 0.0)


@pytest.mark.parametrize(("there", "options"), [(False, []), (True, ["--device", "cpu"]), (True, ["--memory"])])
def test_gaps_are_refused_without_a_gpu(there, options, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(sys, "argv", ["audit_overhead.py", "--gaps", *options])
    with pytest.raises(SystemExit):
        script("audit_overhead").main()
    assert "needs a GPU" in capsys.readouterr().err


def test_the_sections_of_an_audit_are_watched_and_none_is_inside_another(tmp_path, monkeypatch):
    """`shares` takes every moment for one section's."""
    monkeypatch.setattr(windowing, "WINDOW", 8)
    benchmark = script("audit_overhead")
    base = tiny.saved(tmp_path / "base")
    stream = open_stream(write_rows(tmp_path / "a.jsonl", 20))
    with open_pair(base, write_adapter(tmp_path / "adapter", base), device="cpu") as pair:

        def run():
            audit_roles(pair, {"audit": stream}, ChanceConstraint(unit="nll_token"), AuditOptions(batch_tokens=600))

        found = benchmark.sections(run, pair, 0.0)
        with benchmark.watched(pair) as watches:
            run()
    calls = module.timeline({name: watch.calls for name, watch in watches.items()})
    assert {name for _, _, name in calls} == {"forward", "encoding", "collating", "waiting", "storing"}
    assert all(first[1] <= second[0] for first, second in pairwise(calls))
    assert len(watches["storing"].calls) == 3  # windows
    parts = ("in_forwards", "encoding", "collating", "storing", "waiting_for_results")
    assert all(found[name] > 0 for name in parts)
    assert sum(found[name] for name in parts) <= found["exposed"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_profiled_run_finds_its_kernels_inside_it():
    device = torch.device("cuda")
    x = torch.ones(512, 512, device=device)
    kernels, (start, end) = module.profiled(lambda: [x @ x for _ in range(20)], device)
    inside = [kernel for kernel in kernels if start <= kernel[0] <= kernel[1] <= end + 1e-3]
    assert len(inside) >= 20
