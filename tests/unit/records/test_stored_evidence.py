"""A table of attacks on stored evidence: every one is refused, with the checksums computed again by the forger."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.attacks.forging import edit, rebind_table
from tests.unit.report.synthetic import AFTER, BASE, BEFORE, SHA, Words, certificate, write_run

from holdfast.core.errors import CheckpointError
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.records.run_record import read_result, set_folder
from holdfast.records.stored_evidence import (
    Binding,
    ModelPlace,
    believed_audit,
    believed_certificate,
    believed_result,
    believed_run_audit,
    bound,
)

SIZES = {"constraint": 20, "monitor": 20, "certify": 5}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("made") / "run", worse=0.2, sizes=SIZES, certified=certificate(Words()))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def trained(run: Path) -> Any:
    return believed_run_audit(run, "safety", believed_result(run))


def column(run: Path, name: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change a column of the table and compute the table's checksum again."""
    table = pq.read_table(run / "audit.parquet")
    at = table.column_names.index(name)
    changed = pa.array(change(table.column(name).to_pylist()), table.schema.field(name).type)
    pq.write_table(table.set_column(at, table.field(at), changed), run / "audit.parquet")
    rebind_table(run)
    follow(run)


def rows(run: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    table = pq.read_table(run / "audit.parquet")
    kept = [keep(row) for row in table.to_pylist()]
    pq.write_table(table.filter(pa.array(kept)), run / "audit.parquet")
    rebind_table(run)
    follow(run)


def figures(run: Path, **changes: Any) -> None:
    edit(run / "audit.json", lambda values: values.update(changes))
    follow(run)


def follow(run: Path) -> None:
    """Make result.json name the audit beside it."""
    digest = json.loads((run / "audit.json").read_text())["sha256"]
    edit(run / "result.json", lambda values: values["audit_sha256"].update(safety=digest))


def clean(run: Path) -> None:
    values = json.loads((run / "audit.json").read_text())
    roles = {role: entry | {"violations": 0, "violation_rate": 0.0} for role, entry in values["roles"].items()}
    figures(run, roles=roles, violations=0, violation_rate=0.0, within=True)


def replaced(run: Path) -> None:
    """Another run's audit, whole and in order."""
    other = write_run(run.parent / "other", sizes=SIZES)
    for name in ("audit.json", "audit.parquet"):
        shutil.copy(other / name, run / name)


def result_figures(run: Path) -> None:
    def lie(values: dict[str, Any]) -> None:
        values["safety"]["safety"]["monitor"]["violation_rate"] = 0.0

    edit(run / "result.json", lie)


def behaviour(run: Path, **changes: Any) -> None:
    values = json.loads((run / "audit.json").read_text())["behaviour"]
    figures(run, behaviour=values | changes)


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "violations set to 0": (clean, "do not follow"),
    "within the limit": (lambda run: figures(run, within=True), "within do not follow"),
    "a larger tau": (lambda run: figures(run, tau=9.0), "not those of tau"),
    "a larger alpha": (lambda run: figures(run, alpha=0.9), "do not follow"),
    "another unit": (lambda run: figures(run, unit="nll_sum"), "not those of tau"),
    "a smaller upper bound": (lambda run: figures(run, violation_upper=0.01), "violation_upper"),
    "no quantiles": (lambda run: figures(run, quantiles={}), "quantiles"),
    "flips set to 0": (lambda run: behaviour(run, flips=0), r"behaviour\.flips"),
    "no behaviour": (lambda run: figures(run, behaviour=None), "behaviour"),
    "a probability that nobody gave": (lambda run: behaviour(run, on_policy={"tau": 0.1}), "on_policy"),
    "violated cleared": (lambda run: column(run, "violated", lambda cells: [False] * len(cells)), "not those of tau"),
    "a smaller loss": (lambda run: column(run, "nll_after", lambda cells: [0.0] * len(cells)), "difference of the"),
    "smaller degradations": (
        lambda run: column(run, "nll_token", lambda cells: [0.0] * len(cells)), "contradicts itself",
    ),
    "verdicts exchanged": (
        lambda run: column(run, "verdict_after", lambda cells: ["safe"] * len(cells)), r"behaviour\.safe_after",
    ),
    "roles exchanged": (
        lambda run: column(run, "role", lambda cells: ["constraint" if c == "monitor" else "monitor" for c in cells]),
        "not follow|not those",
    ),
    "the worst rows left out": (lambda run: rows(run, lambda row: not row["violated"]), "do not follow"),
    "no rows": (lambda run: rows(run, lambda row: False), "no rows"),
    "one id for two prompts": (lambda run: column(run, "id", lambda cells: [*cells[:-1], cells[0]]), "occur twice"),
    "ids of other prompts": (
        lambda run: column(run, "id", lambda cells: [f"{cell}x" for cell in cells]), r"not those of splits\.json",
    ),
    "another run's audit": (replaced, r"not the audit that result\.json names"),
    "figures of result.json": (result_figures, r"not those of result\.json"),
    "a table that is gone": (lambda run: (run / "audit.parquet").unlink(), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_on_an_audit_is_refused(run, name):
    assert trained(run) is not None
    attack, fault = ATTACKS[name]
    attack(run)
    with pytest.raises(CheckpointError, match=fault) as refused:
        trained(run)
    assert (refused.value.exit_code, bool(refused.value.remedy)) == (6, True)


NAMES = ["../good", "a/b", "/tmp", "..", ".", "", "good\n", "adapter", "certify", "x" * 101, "ü", 3, None]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_a_path_is_no_safety_set(run, name):
    with pytest.raises(CheckpointError, match="names a safety set"):
        set_folder(run, name, named=True)


def test_a_folder_that_is_a_link_holds_no_safety_set(run, tmp_path):
    (run / "good").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="symbolic link"):
        set_folder(run, "good", named=True)
    (run / "audit").symlink_to(run)
    with pytest.raises(CheckpointError, match="symbolic link"):
        believed_audit(run / "audit")


@pytest.mark.parametrize("kind", ["folder", "pipe", "gone", "not UTF-8", "deep", "empty", "unreadable"])
def test_files_that_cannot_be_read(run, kind, monkeypatch):
    path = run / "result.json"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "unreadable":
        path.write_text("{}")

        def broken(*_: object, **__: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("holdfast.core.files.open", broken, raising=False)
    elif kind != "gone":
        path.write_bytes({"not UTF-8": b'{"a": "\xff"}', "deep": b"[" * 100_000, "empty": b""}[kind])
    with pytest.raises(CheckpointError, match=r"result\.json"):
        read_result(run)


def test_a_seal_is_of_the_bytes_too(tmp_path):
    path = tmp_path / "sealed.json"
    write_sealed(path, {"a": 1e5, "b": [True, None]})
    assert read_sealed(path)["a"] == 1e5
    for same in (path.read_bytes().replace(b"100000.0", b"1e5"), path.read_bytes()[:-1], path.read_bytes() + b" "):
        assert json.loads(same)["a"] == 1e5
        path.write_bytes(same)
        with pytest.raises(CheckpointError, match="was changed"):
            read_sealed(path)


def test_figures_agree_up_to_the_last_digits_only(run):
    """Sums differ between releases of numpy; a figure that was moved does not pass for one that was rounded."""
    values = json.loads((run / "audit.json").read_text())
    figures(run, mean=float(np.nextafter(values["mean"], 1)))
    assert trained(run) is not None
    figures(run, mean=values["mean"] * (1 + 1e-7))
    with pytest.raises(CheckpointError, match="mean"):
        trained(run)


def places(run: Path) -> dict[str, ModelPlace]:
    return {"before": ModelPlace(str(BASE)), "after": ModelPlace(run / "adapter")}


def test_a_certificate_is_bound_to_the_weights_in_front_of_it(run):
    record = believed_certificate(run)
    assert bound(record, run, places(run)).binding is Binding.SAME
    weights = run / "adapter" / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + b"\x01")
    found = bound(record, run, places(run))
    assert found.binding is Binding.OTHER
    assert AFTER[:12] in found.why
    weights.write_bytes(data)
    other = certificate(Words(), bound={"before_sha256": SHA}).record
    assert bound(other, run, places(run)).binding is Binding.OTHER
    itself = certificate(Words(), bound={"before_sha256": AFTER}).record
    assert bound(itself, run, places(run)).binding is Binding.ITSELF


def test_a_strength_certificate_is_bound_to_the_adapter_that_was_scaled(run):
    def record(original: str, chosen: float | None = 1.0) -> Any:
        made = certificate(Words(), by="likelihood", kind="strength", chosen=chosen).record
        return replace(made, strength=made.strength | {"original": "x", "original_sha256": original})

    assert bound(record(AFTER), run, places(run)).binding is Binding.SAME
    assert bound(record(BEFORE), run, places(run)).binding is Binding.OTHER
    elsewhere = record(AFTER)
    elsewhere.places["after"] = str(run / "adapter-strength-0.7")
    assert bound(elsewhere, run, places(run)).binding is Binding.NOT_AT_HAND


@pytest.mark.parametrize("model", ["models/not-downloaded", "no such folder", "", "../x\x00y"])
def test_a_model_that_is_not_at_hand_is_said_with_a_remedy(run, model):
    found = bound(believed_certificate(run), run, places(run) | {"before": ModelPlace(model)})
    assert found.binding is Binding.NOT_AT_HAND
    assert "What to do: " in found.why


def test_an_adapter_whose_base_is_gone_or_itself_is_not_at_hand(run):
    config = run / "adapter" / "adapter_config.json"
    for base in (str(run / "gone"), str(run / "adapter"), "models/not-downloaded"):
        config.write_text(json.dumps({"base_model_name_or_path": base}))
        assert bound(believed_certificate(run), run, places(run)).binding is Binding.NOT_AT_HAND
    shutil.move(run / "adapter", run / "moved")
    (run / "adapter").symlink_to(run / "moved")
    assert "symbolic link" in bound(believed_certificate(run), run, places(run)).why
