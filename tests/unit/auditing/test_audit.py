"""The whole audit on tiny models: figures, files, resumption, tokenizers, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import forkserver, tiny
from tests.unit.auditing.making import CHECKED, dying_audit, encodings, literal, plain, write_rows

from holdfast.auditing import measure as measuring
from holdfast.auditing import windows as windowing
from holdfast.auditing.audit import audit
from holdfast.auditing.results import FOLDER, PartialResults
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError, ResourceError, UnsupportedError
from holdfast.judging.judge import FunctionJudge
from holdfast.records.audit import Audit
from holdfast.records.audit_figures import LEVELS

LIMIT = ChanceConstraint(tau=0.05, alpha=0.3, first_k=2, unit="nll_token")
N = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "safety.jsonl", N)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(windowing, "WINDOW", 8)


def run(before, after, data, **options):
    return audit(before, after, data, options.pop("constraint", LIMIT), device="cpu", **options)


def columns(table) -> dict[str, list]:
    return {name: table.column(name).to_pylist() for name in table.column_names}


def test_every_unit_equals_the_literal_computation(base, adapter, data):
    found = run(base, adapter, data)
    expected = [literal(plain(base), plain(adapter, base), row, 2) for row in encodings(N)]
    for unit in CHECKED:
        wanted = np.array([row[unit] for row in expected])
        assert found.degradations(unit) == pytest.approx(wanted, abs=2e-5), unit
        quantiles = torch.quantile(torch.tensor(wanted), torch.tensor([0.5, 0.75, 0.9, 0.95, 0.99, 1.0]).double())
        stated = [found.units[unit]["quantiles"][name] for name in LEVELS]
        assert stated == pytest.approx(quantiles.tolist(), abs=2e-5)
    wanted = torch.tensor([row["nll_token"] for row in expected])  # type: ignore[assignment]
    assert found.violation_rate == LIMIT.violation_rate(wanted)
    assert 0.1 < found.violation_rate < 0.9
    assert found.cvar == pytest.approx(LIMIT.cvar(wanted), abs=2e-5)
    assert found.within == (found.violation_rate <= 0.3)
    assert (found.n, found.unit, found.mode, found.role, found.dtype) == (N, "nll_token", "adapter", "audit", "float32")
    assert 0 <= found.noise_floor < 1e-4
    assert found.table.column("violated").to_pylist() == [bool(d > 0.05) for d in found.degradations()]
    assert found.table.column("id").to_pylist() == [row.id for row in encodings(N)]


def test_files_hold_the_same_audit_and_no_text(base, adapter, data, tmp_path):
    out = tmp_path / "out"
    found = run(base, adapter, data, output=out)
    assert sorted(p.name for p in out.iterdir()) == ["audit.json", "audit.parquet"]
    stored = json.loads((out / "audit.json").read_text())
    assert stored == found.to_json() == Audit.load(out).to_json()
    assert Audit.load(out) == found
    assert b"w1 w" not in (out / "audit.parquet").read_bytes()
    assert stored["before"]["ref"] == str(base)
    assert len(stored["before"]["sha256"]) == 64
    memory = run(base, adapter, data)
    assert columns(memory.table) == columns(found.table)


def test_a_model_against_itself_is_zero(base, data):
    found = run(base, base, data)
    assert found.mode == "one model"
    assert found.violations == 0
    assert found.within
    assert not any(found.degradations(unit).any() for unit in CHECKED)


def test_two_models_one_after_the_other_agree_with_both_at_once(base, other, data):
    apart, held = run(base, other, data), run(base, other, data, kl=True)
    assert apart.mode == held.mode == "two models"
    for unit in CHECKED[:3]:
        assert np.array_equal(apart.degradations(unit), held.degradations(unit))
    assert apart.units["kl_token"] is None
    with pytest.raises(ConfigError, match="'kl_token' was not measured"):
        apart.degradations("kl_token")
    by_unit = run(base, other, data, constraint=ChanceConstraint(unit="kl_token", tau=0.1))
    assert np.array_equal(by_unit.degradations(), held.degradations("kl_token"))


def test_halving_the_batch_budget_changes_nothing(base, adapter, data):
    large, small = run(base, adapter, data, batch_tokens=400), run(base, adapter, data, batch_tokens=50)
    same_within_rounding(large, small)


def same_within_rounding(found, expected):
    """1e-6 a token, the rounding of a float32 loss."""
    tokens = np.array(found.table.column("tokens").to_pylist())
    for unit in CHECKED:
        scale = tokens if unit == "nll_sum" else 1
        assert found.degradations(unit) / scale == pytest.approx(expected.degradations(unit) / scale, abs=1e-6), unit


def test_out_of_memory_halves_the_batches(base, adapter, data, monkeypatch):
    expected = run(base, adapter, data)
    sizes, states = [], measuring.States.of  # type: ignore[attr-defined]

    def limited(model, batch):
        sizes.append(batch.inputs["input_ids"].numel())
        if sizes[-1] > 60:
            raise torch.OutOfMemoryError("pretended")
        return states(model, batch)

    monkeypatch.setattr(measuring.States, "of", limited)  # type: ignore[attr-defined]
    found = run(base, adapter, data, batch_tokens=400)
    assert max(sizes) > 60
    same_within_rounding(found, expected)
    monkeypatch.setattr(measuring.States, "of", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))  # type: ignore[attr-defined]
    with pytest.raises(ResourceError, match="single example"):
        run(base, adapter, data, batch_tokens=400)


def test_duplicates_and_categories(base, adapter, tmp_path):
    rows = tiny.rows(3, seed=0)
    path = write_rows(
        tmp_path / "a.jsonl", 3, extra=[rows[1], {"prompt": "w9 w9", "completion": "w1", "category": "c"}]
    )
    found = run(base, adapter, path)
    assert (found.n, found.duplicates_dropped) == (4, 1)
    assert found.table.column("category").to_pylist() == [None, None, None, "c"]


def test_examples_that_are_cut_are_counted(base, adapter, data):
    found = run(base, adapter, data, max_length=12)
    assert found.truncated == sum(found.table.column("truncated").to_pylist()) > 0
    with pytest.raises(DataError, match="no completion token to score") as refused:
        run(base, adapter, data, max_length=3)
    assert "train." not in refused.value.remedy


@pytest.mark.parametrize("second", ["adapter", "other"])
def test_a_killed_audit_continues_and_ends_the_same(base, request, data, tmp_path, monkeypatch, second):
    after = request.getfixturevalue(second)
    expected = run(base, after, data, output=tmp_path / "whole")
    out, write = tmp_path / "out", PartialResults.write
    for kill in range(4):
        written = []

        def dying(self, *args, written=written, limit=1 + kill % 2):
            if len(written) == limit:
                raise KeyboardInterrupt
            written.append(args[1])
            write(self, *args)

        monkeypatch.setattr(PartialResults, "write", dying)
        try:
            found = run(base, after, data, output=out)
            break
        except KeyboardInterrupt:
            assert (out / FOLDER / "manifest.json").exists()
            assert not (out / "audit.json").exists()
    else:
        monkeypatch.setattr(PartialResults, "write", write)
        found = run(base, after, data, output=out)
    assert columns(found.table) == columns(expected.table)
    assert found.noise_floor == expected.noise_floor
    assert not (out / FOLDER).exists()


def test_other_settings_start_anew(base, adapter, data, tmp_path, monkeypatch, caplog):
    def die(*_):
        raise KeyboardInterrupt

    write = PartialResults.write
    monkeypatch.setattr(PartialResults, "write", lambda self, *a: write(self, *a) if a[1] == 0 else die())
    with pytest.raises(KeyboardInterrupt):
        run(base, adapter, data, output=tmp_path / "out")
    monkeypatch.undo()
    with caplog.at_level("WARNING"):
        found = run(base, adapter, data, output=tmp_path / "out", max_length=12)
    assert "starting anew" in caplog.text
    assert found.truncated > 0


def test_a_finished_audit_is_returned_and_never_overwritten(base, adapter, data, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = run(base, adapter, data, output=out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    monkeypatch.setattr(windowing.Measurer, "launch", lambda *_: pytest.fail("measured again"))  # type: ignore[attr-defined]
    assert run(base, adapter, data, output=out) == first
    with pytest.raises(ConfigError, match="holds the audit of other") as refused:
        run(base, adapter, data, output=out, constraint=ChanceConstraint(tau=0.2, unit="nll_token"))
    assert refused.value.exit_code == 2
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_sigkill(base, adapter, data, tmp_path):
    """The process is killed while it writes; a second one finishes from what the first left."""
    out, log = tmp_path / "out", tmp_path / "log"
    process = forkserver.started(dying_audit, *map(str, (base, adapter, data, out)), log=log)
    assert forkserver.finished(process) == -signal.SIGKILL, log.read_text()[-500:]
    assert len(list((out / FOLDER).glob("both-*.part"))) == 2
    assert columns(run(base, adapter, data, output=out).table) == columns(run(base, adapter, data).table)


def test_own_tokenizers_leave_only_the_sum(base, other, data, tmp_path):
    changed = shutil.copytree(other, tmp_path / "changed")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tiny.CHAT_TEMPLATE.replace("{{ message['content'] }} <|end|>", "{{ message['content'] }}")
    tokenizer.save_pretrained(changed)
    with pytest.raises(UnsupportedError, match="'nll_token' is not defined across tokenizers"):
        run(base, changed, data, tokenizer="own")
    limit = ChanceConstraint(unit="nll_sum", tau=1.0)
    with pytest.raises(UnsupportedError, match="KL is not defined across tokenizers"):
        run(base, changed, data, tokenizer="own", constraint=limit, kl=True)
    found = run(base, changed, data, tokenizer="own", constraint=limit)
    assert found.table.column("nll_token").null_count == found.table.column("first_before").null_count == N
    assert found.units["nll_token"] is None
    same = run(base, changed, data, tokenizer="before", constraint=limit)
    assert np.array_equal(found.table.column("nll_before").to_numpy(), same.table.column("nll_before").to_numpy())
    assert not np.allclose(found.degradations(), same.degradations())
    assert (found.tokenizer, same.tokenizer) == ("own", "before")


def test_a_nan_counts_as_a_violation(base, data, tmp_path):
    broken = tiny.model()
    with torch.no_grad():
        broken.model.embed_tokens.weight[tiny.tokenizer().convert_tokens_to_ids("w7")] = float("nan")
    folder = tmp_path / "broken"
    broken.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    found = run(base, folder, data)
    lost = np.isnan(found.degradations())
    assert 0 < lost.sum() < N
    assert found.violations == lost.sum()
    assert found.quantiles["max"] is None
    assert found.table.column("violated").to_pylist() == lost.tolist()


def test_faulty_data_is_refused_before_a_model_is_looked_at(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 2, extra=[{"prompt": "w1", "completion": ""}])
    with pytest.raises(DataError, match="1 bad row"):
        run(tmp_path / "no model", tmp_path / "no model", path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refusals_leave_no_folder(base, adapter, data, tmp_path):
    with pytest.raises(ConfigError):
        run(base, tmp_path / "nothing", data, output=tmp_path / "out")
    with pytest.raises(UnsupportedError):
        run(base, adapter, data, output=tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_tau_inside_the_noise_is_warned_about(base, adapter, data, caplog, monkeypatch):
    monkeypatch.setattr(windowing, "floor_between", lambda *_: 0.02)
    with caplog.at_level("WARNING"):
        found = run(base, adapter, data)
    assert "tau = 0.05 is inside the numerical noise: the unchanged model moves by 0.02" in caplog.text
    assert found.noise_floor == 0.02


def test_progress_counts_every_example_once_a_model(base, other, adapter, data):
    for after in (adapter, other):
        seen: list[tuple[int, int]] = []
        run(base, after, data, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[-1] == (2 * N, 2 * N)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_data_frame_has_a_row_an_example(base, adapter, other, data, tmp_path):
    found = run(base, adapter, data)
    frame = found.to_pandas()
    assert list(frame.columns) == ["id", "role", *CHECKED, "violated"]
    assert frame["id"].tolist() == [row.id for row in encodings(N)]
    assert np.array_equal(frame[found.unit], found.degradations())
    assert frame["violated"].tolist() == (frame[found.unit] > LIMIT.tau).tolist()
    assert (frame["violated"].sum(), set(frame["role"])) == (found.violations, {"audit"})
    labelled = write_rows(tmp_path / "a.jsonl", 2, extra=[{"prompt": "w9", "completion": "w1", "category": "c"}])
    apart = run(base, other, labelled).to_pandas()
    assert list(apart.columns) == ["id", "role", "category", *CHECKED[:3], "violated"], "kl_token was not measured"
    assert apart["category"].isna().tolist() == [True, True, False]


def test_peak_memory_does_not_grow_with_the_data(base, adapter, tmp_path):
    """Ten times the examples in one process: the peak grows by a third of what their text alone would need."""
    code = (
        "import resource, sys\nfrom holdfast.auditing import windows\nfrom holdfast.auditing.audit import audit\n"
        "windows.WINDOW = 16\n"
        "for data in sys.argv[3:]:\n"
        "    audit(*sys.argv[1:3], data, device='cpu', output=data + '.out')\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    paths = []
    for n in (20, 20, 200):  # the first one warms up
        paths.append(tmp_path / f"{len(paths)}.jsonl")
        with paths[-1].open("w") as handle:
            for i in range(n):
                words = " ".join(tiny.WORDS[(i // 57**j) % 57] for j in range(3))
                handle.write(json.dumps({"prompt": f"{words} " * 30 + "x" * 60_000, "completion": "w1 w2"}) + "\n")
    arguments = [sys.executable, "-c", code, *map(str, [base, adapter, *paths])]
    done = subprocess.run(
        arguments, capture_output=True, check=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    _, small, large = map(int, done.stdout.split())
    assert large - small <= 4 * 2**20, (small, large)


@pytest.mark.parametrize("second", ["adapter", "other"])
def test_a_judge_adds_the_behaviour_view(base, request, data, tmp_path, second):
    after = request.getfixturevalue(second)
    judge, seen = FunctionJudge(lambda prompt, reply: "safe", revision="1"), []
    arguments = {"max_new_tokens": 4, "output": tmp_path / "out"}
    found = run(base, after, data, judge=judge, progress=lambda *counts: seen.append(counts), **arguments)
    assert seen.count((2 * N, 2 * N)) == 2, "once for the losses, once for the replies"
    assert found.behaviour["n"] == N
    assert found.behaviour["flips"] == 0
    table = found.table
    assert len(table.column("verdict_before").to_pylist()) == len(table.column("verdict_after").to_pylist()) == N
    plain_audit = run(base, after, data)
    assert np.array_equal(found.degradations(), plain_audit.degradations())
    assert "verdict_before" not in plain_audit.table.column_names
    with pytest.raises(ConfigError, match="other models, data or settings"):
        run(base, after, data, judge=replace(judge, revision="2"), **arguments)
    with pytest.raises(ConfigError, match="refusl"):
        run(base, after, data, judge="refusl", output=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_paths_may_be_paths_and_the_repr_fits_a_screen(base, adapter, data):
    assert isinstance(data, Path)
    found = run(str(base), adapter, str(data))
    assert found.n == N
    assert repr(found) == f"<Audit: {found.describe()}>"


def test_a_judge_without_a_revision_never_answers_for_an_earlier_one(base, adapter, data, tmp_path):
    """Its code may have changed, so what it said before is not what it says now."""
    arguments = {"max_new_tokens": 4, "output": tmp_path / "out"}
    run(base, adapter, data, judge=lambda prompt, reply: "safe", **arguments)
    with pytest.raises(ConfigError, match="holds the audit of other"):
        run(base, adapter, data, judge=lambda prompt, reply: "unsafe", **arguments)


@pytest.mark.parametrize("given", [{"tau": 0.1}, {}, 0.1, "tau=0.1"])
def test_a_constraint_that_is_none_is_refused(base, adapter, data, given):
    with pytest.raises(ConfigError, match="expected a ChanceConstraint") as caught:
        run(base, adapter, data, constraint=given)
    assert f"constraint is a {type(given).__name__}" in caught.value.what


def test_a_tokenizer_object_is_no_choice(base, adapter, data):
    given = tiny.tokenizer()
    with pytest.raises(ConfigError, match="processing_class=") as caught:
        run(base, adapter, data, tokenizer=given)
    assert caught.value.what == f"tokenizer is a {type(given).__name__}, expected one of same, before, after, own"
