"""The figures of an audit against torch's and the constraint's own, and the table that carries them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.auditing.making import examples

from holdfast.auditing.results import MeasuredRole, write_run_audit
from holdfast.cli.audit import figures_table
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.core.hashing import sha256_file
from holdfast.core.sealed_json import write_sealed
from holdfast.core.units import UNITS
from holdfast.records.audit import Audit
from holdfast.records.audit_figures import LEVELS, cvar, distribution, figures, quantile, role_figures
from holdfast.records.audit_folder import SUMMARY_NAME, TABLE_NAME, parse_table, write_table
from holdfast.scoring.completion import CompletionLosses

VALUES = st.lists(st.floats(-5, 5), min_size=1, max_size=60).map(np.array)


@given(VALUES, st.floats(0.01, 0.99))
def test_quantiles_and_cvar_equal_torch_and_the_constraint(values, alpha):
    tensor = torch.tensor(values)
    for level in LEVELS.values():
        assert quantile(np.sort(values), level) == pytest.approx(float(torch.quantile(tensor, level)), abs=1e-12)
    assert cvar(values, alpha) == pytest.approx(ChanceConstraint(alpha=alpha, unit="nll_token").cvar(tensor), abs=1e-12)


@given(VALUES, st.floats(0, 2))
def test_the_violation_rate_equals_the_constraints(values, tau):
    found = role_figures(values, tau, 0.05)
    assert found["violation_rate"] == ChanceConstraint(tau=tau, unit="nll_token").violation_rate(torch.tensor(values))
    assert found["violations"] == (values > tau).sum()
    assert found["violation_upper"] > found["violation_rate"] or found["violation_rate"] == 1.0


def test_a_nan_is_the_worst_value():
    values = np.array([0.0, 0.1, np.nan, 0.2])
    found = role_figures(values, 0.15, 0.5)
    assert found["violations"] == 2
    assert found["quantiles"]["q50"] == pytest.approx(0.15)
    assert found["quantiles"]["max"] is None
    assert found["mean"] is None
    assert distribution(np.full(4, np.nan), 0.5)["quantiles"]["q75"] is None


def test_the_monitor_speaks_for_the_audit_and_every_role_must_be_within():
    rows = dict.fromkeys(UNITS)
    roles = {"constraint": {**rows, "nll_sum": np.ones(4)}, "monitor": {**rows, "nll_sum": np.zeros(4)}}
    found = figures(roles, unit="nll_sum", tau=0.5, alpha=0.1)
    assert (found["role"], found["violation_rate"], found["within"]) == ("monitor", 0.0, False)
    assert found["units"]["kl_token"] is None
    assert found["roles"]["constraint"]["violation_rate"] == 1.0


def losses(n: int, seed: int) -> CompletionLosses:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.full((n,), 10.0)
    total = torch.rand(n, generator=draw, dtype=torch.float64) * 10
    return CompletionLosses(total, tokens, total / 3, torch.full((n,), 8.0))


def run_audit(folder, *, kl=None) -> Audit:
    roles = {}
    for role, n, seed in (("constraint", 6, 0), ("monitor", 3, 5), ("certify", 0, 9)):
        ids = [example.id for example in examples(n, seed=seed)]
        roles[role] = MeasuredRole(ids, [None] * n, [False] * n, losses(n, seed), losses(n, seed + 1), kl)
    return write_run_audit(
        folder, roles, ChanceConstraint(tau=0.1, unit="nll_token"), before={"ref": "b", "sha256": "1"},
        after={"ref": "a", "sha256": "2"},
        data={"source": "s", "sha256": "3"}, tokenizer_sha256="4", template_sha256="5", dtype="float32", device="cpu",
        noise_floor=1e-6, duplicates_dropped=0, seconds=1.0,
    )  # fmt: skip


def test_a_training_run_writes_the_same_files(tmp_path):
    found = run_audit(tmp_path)
    assert (found.mode, found.role, found.n) == ("training", "monitor", 3)
    expected = (losses(3, 6).total - losses(3, 5).total) / 10
    assert found.degradations(role="monitor") == pytest.approx(expected.numpy())
    assert found.degradations("nll_first", role="constraint") == pytest.approx(
        ((losses(6, 1).first - losses(6, 0).first) / 8).numpy()
    )
    assert len(found.degradations()) == 9
    assert found.table.column("violated").to_pylist() == [bool(d > 0.1) for d in found.degradations()]
    assert found.units["kl_token"] is None
    assert Audit.load(tmp_path) == found
    assert "monitor examples" in found.describe()


def test_an_audit_without_kl_first_is_read(tmp_path):
    """Written before there was that unit: no such column, and no figures of it."""
    import pyarrow.parquet as pq

    values = run_audit(tmp_path).to_json()
    table = pq.read_table(tmp_path / TABLE_NAME).drop_columns("kl_first")
    pq.write_table(table, tmp_path / TABLE_NAME)
    units = {name: value for name, value in values["units"].items() if name != "kl_first"}
    earlier = {name: value for name, value in values.items() if name != "sha256"}
    digest = sha256_file(tmp_path / TABLE_NAME)
    write_sealed(tmp_path / SUMMARY_NAME, {**earlier, "units": units, "table_sha256": digest})
    found = Audit.load(tmp_path)
    assert found.units == units
    assert "kl_first" not in found.to_pandas().columns
    assert "kl_first" not in figures_table(found)
    with pytest.raises(ConfigError, match="'kl_first' was not measured"):
        found.degradations("kl_first")
    write_sealed(tmp_path / SUMMARY_NAME, {**earlier, "units": units, "table_sha256": digest, "unit": "kl_first"})
    with pytest.raises(CheckpointError, match="kl_first has empty cells"):
        Audit.load(tmp_path)


def test_a_damaged_or_foreign_table_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        Audit.load(tmp_path)
    run_audit(tmp_path)
    table = tmp_path / TABLE_NAME
    whole = table.read_bytes()
    table.write_bytes(whole[:-20])
    with pytest.raises(CheckpointError, match=r"audit\.parquet was changed"):
        Audit.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read as an audit's table"):
        parse_table(whole[:-20], table)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": ["a"]}), table)
    with pytest.raises(CheckpointError, match="other columns than an audit's table"):
        parse_table(table.read_bytes(), table)


def test_an_audit_of_the_first_release_is_refused_with_a_sentence(tmp_path):
    run_audit(tmp_path)
    (tmp_path / SUMMARY_NAME).write_text('{"version": 1}')
    with pytest.raises(CheckpointError, match="carries no checksum") as refused:
        Audit.load(tmp_path)
    assert "run holdfast audit again" in refused.value.remedy
    write_sealed(tmp_path / SUMMARY_NAME, {"version": 1})
    with pytest.raises(CheckpointError, match="has version 1, expected an audit of version 2"):
        Audit.load(tmp_path)


def test_an_unknown_unit_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="unknown unit 'nll_tokn'") as refused:
        run_audit(tmp_path).degradations("nll_tokn")
    assert refused.value.remedy == "did you mean 'nll_token'?"


def test_a_table_that_fails_midway_leaves_nothing(tmp_path):
    def broken():
        yield {"id": ["a"], "role": ["audit"]}
        raise OSError("full")

    with pytest.raises(ResourceError, match="full") as refused:
        write_table(tmp_path / TABLE_NAME, broken())
    assert refused.value.exit_code == 7
    assert list(tmp_path.iterdir()) == []


def test_reading_an_audit_needs_no_torch(tmp_path):
    run_audit(tmp_path)
    code = (
        "import sys, holdfast\nfound = holdfast.Audit.load(sys.argv[1])\n"
        "assert len(found.degradations()) == 9\nprint('torch' in sys.modules, 'scipy.stats' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_reading_an_audit_starts_no_thread(tmp_path):
    """A process that ended while pyarrow's threads were starting was aborted, with its work done."""
    run_audit(tmp_path)
    code = (
        "import os, sys, holdfast, numpy, scipy.stats, pyarrow.parquet\nbefore = os.listdir('/proc/self/task')\n"
        "holdfast.Audit.load(sys.argv[1])\nassert os.listdir('/proc/self/task') == before"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
