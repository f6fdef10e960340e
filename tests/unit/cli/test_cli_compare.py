"""`holdfast compare`: the same examples within one seed, seed-level differences over several, never pooled."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from holdfast.core.units import UNITS
from holdfast.records.audit_figures import figures
from holdfast.records.audit_folder import write_audit_folder
from holdfast.records.run_record import write_result

AUDIT = {
    "mode": "training",
    "behaviour": None,
    "truncated": 0,
    "unit": "nll_token",
    "tau": 0.1,
    "alpha": 0.05,
    "first_k": 8,
    "before": {"ref": "base", "sha256": "b" * 64},
    "data": {"source": "safety.jsonl", "sha256": "d" * 64},
}


@pytest.fixture
def write(tmp_path: Path):
    """Write an evidence folder with these outcomes, and five training examples that all violate; returns it."""

    def call(name: str, violated, *, role="monitor", ids=None, shuffle=None, **changes) -> Path:
        violated = list(violated)
        ids = ids or [f"x{i}" for i in range(len(violated))]
        rows = [(i, role, v) for i, v in zip(ids, violated, strict=True)]
        rows += [(f"c{i}", "constraint", True) for i in range(5)]
        if shuffle is not None:
            np.random.default_rng(shuffle).shuffle(rows)
        audit = {**copy.deepcopy(AUDIT), "after": {"ref": name, "sha256": name}, **changes}
        names, roles, outcomes = (np.array(column, dtype=object) for column in zip(*rows, strict=True))
        d = np.where(outcomes.astype(bool), audit["tau"] + 1, 0.0)
        ones, units = np.ones(len(rows)), dict.fromkeys(UNITS, d)  # one token each: every unit is the same
        columns = {
            "id": names.tolist(), "role": roles.tolist(), "tokens": ones, "first_tokens": ones, "truncated": ones > 1,
            "nll_before": 0 * d, "nll_after": d, "first_before": 0 * d, "first_after": d, **units, "violated": d > 0,
        }  # fmt: skip
        limit = {key: audit[key] for key in ("unit", "tau", "alpha")}
        by_role = {found: dict.fromkeys(UNITS, d[roles == found]) for found in dict.fromkeys(roles)}
        write_audit_folder(tmp_path / name, audit | figures(by_role, **limit), [columns])
        return tmp_path / name

    return call


@pytest.fixture
def write_run(tmp_path: Path, write):
    """Write a finished run whose safety sets have names, from the outcomes of each; returns its folder."""

    def call(name: str, **sets) -> Path:
        for one, violated in sets.items():
            write(f"{name}/{one}", violated)
        result: Any = {"safety": {key: {} for key in sets}}  # no more than compare reads
        write_result(tmp_path / name, result)
        return tmp_path / name

    return call


def first(bad: int, n: int = 100) -> list[bool]:
    return [i < bad for i in range(n)]


def last(bad: int, n: int = 100) -> list[bool]:
    return first(bad, n)[::-1]


def test_two_runs_in_words(holdfast, write):
    code, out, err = holdfast("compare", write("a", first(3)), write("b", last(12)))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "violated: nll_token above 0.1; monitor examples"
    assert "A " in lines[1]
    assert "3 % of 100" in lines[1]
    assert lines[1].endswith("12 %")
    assert lines[2].startswith("  A - B: -9 points, 95 % interval -")
    assert lines[3] == f"  only A violates 3, only B 12; exact McNemar test p = {stats.binomtest(3, 15).pvalue:.3g}"
    assert "not of the methods" in err


def test_two_runs_in_json(holdfast, write):
    code, out, _ = holdfast("compare", write("a", first(3)), write("b", first(12), shuffle=1), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["seeds"] is None
    pair = found["pairs"][0]
    assert (pair["both"], pair["only_a"], pair["only_b"], pair["neither"]) == (3, 0, 9, 88)  # matched by id, not by row
    assert pair["difference"] == pytest.approx(-0.09)
    assert pair["lower"] < -0.09 < pair["upper"] < 0
    assert (found["role"], found["unit"], found["tau"], found["alpha"]) == ("monitor", "nll_token", 0.1, 0.05)


def test_a_file_may_be_named_instead_of_its_folder(holdfast, write):
    a, b = write("a", first(1)), write("b", first(2))
    assert holdfast("compare", a / "audit.parquet", b / "audit.parquet", "--json")[0] == 0


def test_plain_audits_are_compared_on_their_audit_rows(holdfast, write):
    a, b = write("a", first(1), role="audit"), write("b", first(2), role="audit")
    assert json.loads(holdfast("compare", a, b, "--json")[1])["role"] == "audit"


def test_seeds_are_compared_by_seed_and_never_pooled(holdfast, write):
    a = [write(f"a{i}", first(bad)) for i, bad in enumerate((2, 4, 3))]
    b = [write(f"b{i}", first(bad)) for i, bad in enumerate((9, 6, 12))]
    options = [x for pair in zip(a, b, strict=True) for x in ("--a", pair[0], "--b", pair[1])]
    code, out, _ = holdfast("compare", *options, "--json")
    found = json.loads(out)
    assert code == 0
    assert [pair["n"] for pair in found["pairs"]] == [100, 100, 100]
    differences = [-0.07, -0.02, -0.09]
    assert found["seeds"]["differences"] == pytest.approx(differences)
    expected = stats.t.interval(0.95, 2, np.mean(differences), stats.sem(differences))
    assert (found["seeds"]["lower"], found["seeds"]["upper"]) == pytest.approx(expected)
    _, text, notes = holdfast("compare", *options)
    assert "over 3 seeds, A - B by seed: -7, -2, -9 points" in text
    assert "(t, 2 degrees of freedom)" in text
    assert "3 seeds are weak evidence" in notes


def test_each_seed_may_have_held_out_examples_of_its_own(holdfast, write):
    """The split follows the seed; the two runs of one seed share it, and every run the limit."""
    splits = [{"data": {"source": "safety.jsonl", "sha256": str(i) * 64}} for i in range(2)]
    a, b = ([write(f"{side}{i}", first(3 + i), **splits[i]) for i in range(2)] for side in "ab")
    assert holdfast("compare", "--a", a[0], "--a", a[1], "--b", b[0], "--b", b[1])[0] == 0
    code, _, err = holdfast("compare", "--a", a[0], "--a", a[1], "--b", b[1], "--b", b[0])
    assert code == 6
    assert "differ in safety data" in err
    other = [write(f"{side}2", first(3), tau=0.2, **splits[1]) for side in "cd"]
    code, _, err = holdfast("compare", "--a", a[0], "--a", other[0], "--b", b[0], "--b", other[1])
    assert code == 6
    assert "differ in tau" in err


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"unit": "nll_sum"}, "unit"),
        ({"tau": 0.2}, "tau"),
        ({"alpha": 0.1}, "alpha"),
        ({"before": {"ref": "base", "sha256": "e" * 64}}, "reference model"),
        ({"data": {"source": "safety.jsonl", "sha256": "e" * 64}}, "safety data"),
        ({"role": "audit"}, "role (monitor and audit)"),
    ],
)
def test_different_questions_are_refused_by_name(holdfast, write, changes, named):
    code, out, err = holdfast("compare", write("a", first(3)), write("b", first(3), **changes))
    assert (code, out) == (6, "")
    assert f"differ in {named}, expected the same in both" in err
    assert ("the same `conflicts`, `safety` and `seed`" in err) == (named == "safety data")


def test_first_k_matters_in_its_own_unit_only(holdfast, write):
    a, b = (write(name, first(3), first_k=k) for name, k in (("a", 8), ("b", 4)))
    assert holdfast("compare", a, b)[0] == 0
    a, b = (write(name, first(3), unit="kl_first", first_k=k) for name, k in (("c", 8), ("d", 4)))
    assert holdfast("compare", a, b)[0] == 6


def test_different_examples_are_refused_with_their_numbers(holdfast, write):
    a = write("a", first(3))
    b = write("b", first(3), ids=[f"x{i + 2}" for i in range(100)])
    code, _, err = holdfast("compare", a, b)
    assert code == 6
    assert "differ in their monitor examples: 2 only in the first, 2 only in the second" in err


def test_one_model_does_not_count_as_two_seeds(holdfast, write):
    a, b = write("a", first(3)), [write(f"b{i}", first(4)) for i in range(2)]
    twin = write("twin", first(3), after={"ref": "a", "sha256": "a"})
    for again in (a, twin):
        code, _, err = holdfast("compare", "--a", a, "--a", again, "--b", b[0], "--b", b[1])
        assert code == 3
        assert "are the same model, expected one run per seed" in err


def test_every_safety_set_of_two_runs_is_compared_by_its_name(holdfast, write_run):
    a, b = write_run("a", refusals=first(3), answers=first(1)), write_run("b", refusals=last(12), answers=first(2))
    code, out, err = holdfast("compare", a, b)
    assert code == 0
    titles = [line for line in out.splitlines() if line.startswith("safety set")]
    assert titles == [f"safety set {name}; violated: nll_token above 0.1; monitor examples" for name in
                      ("answers", "refusals")]  # fmt: skip
    assert "A - B: -9 points" in out
    assert "A - B: -1 points" in out
    assert "not compared" not in err
    found = json.loads(holdfast("compare", a, b, "--json")[1])
    assert [(one["set"], one["role"], one["pairs"][0]["only_b"]) for one in found["sets"]] == [
        ("answers", "monitor", 1),
        ("refusals", "monitor", 12),
    ]
    assert found["not_compared"] == {}


def test_sets_that_only_one_run_has_are_named(holdfast, write_run):
    a, b = write_run("a", refusals=first(3), answers=first(1)), write_run("b", extra=first(2), refusals=last(12))
    code, out, err = holdfast("compare", a, b)
    assert (code, out.count("safety set")) == (0, 1)
    assert f"not every run has it: answers of {a}" in err
    assert f"not every run has it: extra of {b}" in err
    found = json.loads(holdfast("compare", a, b, "--json")[1])
    assert found["not_compared"] == {str(a): ["answers"], str(b): ["extra"]}


def test_seeds_of_runs_with_several_sets_are_compared_by_set(holdfast, write_run):
    a = [write_run(f"a{i}", refusals=first(bad), answers=first(1)) for i, bad in enumerate((2, 4, 3))]
    b = [write_run(f"b{i}", refusals=first(bad), answers=first(2)) for i, bad in enumerate((9, 6, 12))]
    options = [x for pair in zip(a, b, strict=True) for x in ("--a", pair[0], "--b", pair[1])]
    found = json.loads(holdfast("compare", *options, "--json")[1])
    assert {one["set"]: one["seeds"]["differences"] for one in found["sets"]} == {
        "refusals": pytest.approx([-0.07, -0.02, -0.09]),
        "answers": pytest.approx([-0.01, -0.01, -0.01]),
    }


def test_runs_without_a_common_set_are_refused_with_their_sets(holdfast, write, write_run):
    a = write_run("a", refusals=first(3))
    for b, listed in ((write_run("b", extra=first(3)), "extra"), (write("single", first(3)), "one set")):
        code, out, err = holdfast("compare", a, b)
        assert (code, out) == (3, "")
        assert f"no safety set in common ({a}: refusals; {b}: {listed})" in err


def test_a_set_whose_audit_is_gone_is_refused(holdfast, write_run):
    a, b = write_run("a", refusals=first(3)), write_run("b", refusals=first(3))
    (b / "refusals" / "audit.parquet").unlink()
    assert holdfast("compare", a, b)[0] == 6


def test_wrong_numbers_of_runs_are_refused(holdfast, write):
    a, b, c = (write(name, first(1)) for name in "abc")
    for arguments in ([], [a], [a, b, c], ["--a", a], ["--a", a, "--a", b, "--b", c]):
        code, _, err = holdfast("compare", *arguments)
        assert (code, "expected as many of each" in err) == (2, True), arguments
    code, _, err = holdfast("compare", a, b, "--a", c)
    assert (code, "both A B and --a/--b are given" in err) == (2, True)


def test_a_folder_without_evidence_is_refused(holdfast, tmp_path, write):
    code, _, err = holdfast("compare", tmp_path, write("b", first(1)))
    assert code == 3
    assert "holds no audit.parquet" in err


def test_training_examples_alone_are_no_evidence(holdfast, write):
    code, _, err = holdfast("compare", write("a", [], role="monitor"), write("b", first(1)))
    assert code == 3
    assert "holds no held-out examples" in err


def test_damaged_tables_are_refused(holdfast, tmp_path, write):
    good = write("good", first(1))
    broken = write("broken", first(1)) / "audit.parquet"
    broken.write_bytes(broken.read_bytes()[:-20])
    foreign = write("foreign", first(1)) / "audit.parquet"
    pq.write_table(pa.table({"id": ["x"], "role": ["monitor"], "violated": [True]}), foreign)
    twice = write("twice", first(1, 2), ids=["x", "x"])
    for path, message in {
        broken: "audit.parquet was changed",
        foreign: "audit.parquet was changed",
        twice: "1 ids occur twice",
    }.items():
        code, out, err = holdfast("compare", good, path)
        assert (code, out) == (6, ""), path
        assert message in err
        assert len(err.splitlines()) == 2
