"""Evidence that is read again: an audit, a run's settings, a certificate in a run folder, names that are paths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from holdfast.core.errors import CheckpointError
from holdfast.records.audit import Audit
from tests.attacks.forging import edit, rebind_config, rebind_table
from tests.attacks.runs import audited, certified, other_run, pair, run, tiny_model, trained

__all__ = ["audited", "certified", "other_run", "pair", "run", "tiny_model", "trained"]

REFUSED, OVER = 6, 4


def no_violations(values: dict[str, Any]) -> None:
    """All examples within the limit, in every place that says so."""
    clean = {"violations": 0, "violation_rate": 0.0, "violation_upper": 0.01}
    for entry in (values, *values["roles"].values()):
        entry.update(clean)
    values["within"] = True


def verdict_of(command, folder: Path) -> str:
    """What the report says of a folder: `certified`, `measured`, ..., or `refused`."""
    outcome = command("report", folder, "--json")
    return "refused" if outcome.code == REFUSED else json.loads(outcome.out)["runs"][0]["verdict"]


@pytest.mark.parametrize("reseal", [False, True])
def test_an_audit_whose_violations_were_set_to_zero(audited, reseal):
    """A7: `audit` reused a finished folder and said "within the limit", while its table said otherwise."""
    outcome, folder = audited()
    assert outcome.code == OVER
    edit(folder / "audit.json", no_violations, reseal=reseal)
    with pytest.raises(CheckpointError):
        Audit.load(folder)
    outcome, _ = audited()
    assert outcome.code == REFUSED, outcome.out
    assert "within the limit" not in outcome.out


@pytest.mark.parametrize("reseal", [False, True])
def test_a_table_whose_violations_were_cleared(audited, command, reseal):
    """A7: `compare` believed the column `violated` beside degradations that contradict it."""
    _, folder = audited()
    honest = Path(shutil.copytree(folder, folder.parent / "honest"))
    table = pq.read_table(folder / "audit.parquet")
    at = table.column_names.index("violated")
    cleared = table.set_column(at, table.field(at), pa.array([False] * len(table)))
    pq.write_table(cleared, folder / "audit.parquet")
    if reseal:
        rebind_table(folder)
    assert command("compare", folder, honest).code == REFUSED


@pytest.mark.parametrize("way", ["audit", "certify", "report"])
def test_settings_edited_after_the_run(run, tmp_path, command, way):
    """A7: `task.data` of a finished run could be exchanged, and the certificate said that leakage was checked."""
    config = run / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    rows = [json.dumps({"prompt": f"another prompt {i}", "completion": "yes"}) for i in range(9)]
    (tmp_path / "other.jsonl").write_text("\n".join(rows) + "\n")
    settings["task"]["data"] = str(tmp_path / "other.jsonl")
    config.write_text(yaml.safe_dump(settings, sort_keys=False, width=110))
    arguments = {"audit": ["--device", "cpu"], "certify": ["--by", "likelihood", "--device", "cpu"], "report": []}
    assert command(way, run, *arguments[way]).code == REFUSED


def test_a_certificate_copied_into_another_runs_folder(certified, other_run, command):
    """A4: `report` said "Certified" of a run whose adapter nobody certified."""
    for file in certified.output.iterdir():
        shutil.copy(file, other_run)
    assert verdict_of(command, other_run) not in ("certified", "refused")
    assert "Certified" not in (other_run / "README.md").read_text()


def test_a_certificate_whose_weights_were_swapped(certified, command):
    """A4: the report never looked at the weights that the certificate is bound to."""
    assert verdict_of(command, certified.output) in ("certified", "steering")
    weights = certified.adapter / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x40
    weights.write_bytes(data)
    assert verdict_of(command, certified.output) == "not_certified"


def test_a_certificate_whose_model_is_not_at_hand(certified, command):
    """A4: without the weights nobody can say that the certificate speaks of them."""
    shutil.rmtree(certified.adapter)
    outcome = command("report", certified.output)
    assert "Certified." not in outcome.out
    assert "not at hand" in outcome.out


def test_a_strength_certificate_copied_into_another_runs_folder(certified, run, command):
    """A4: a `--strength` certificate replayed even beside the audit of another adapter."""

    def scaled(values: dict[str, Any]) -> None:
        after, digest = values["places"]["after"], values["bound"]["after_sha256"]
        values["kind"] = "strength"
        values["strength"] = {"chosen": 1.0, "tested": [], "adapter": after, "original": after}
        values["strength"]["original_sha256"] = digest

    shutil.copy(certified.output / "certificate.json", run)
    edit(run / "certificate.json", scaled)
    assert verdict_of(command, run) not in ("certified", "steering")


def test_a_certificate_that_compares_a_model_with_itself(certified, command):
    """A4: before = after regresses nowhere, whatever the model does."""

    def bind(values: dict[str, Any]) -> None:
        values["bound"]["before_sha256"] = values["bound"]["after_sha256"]
        values["bound"]["reference_sha256"] = values["bound"]["after_sha256"]
        values["places"]["before"] = values["places"]["after"]

    edit(certified.output / "certificate.json", bind)
    assert verdict_of(command, certified.output) != "certified"


def test_verify_looks_at_the_folder_that_holds_the_certificate(certified, other_run, command):
    """A4: `verify OTHER` went back to the models that the certificate names, and exited 0."""
    for file in certified.output.iterdir():
        shutil.copy(file, other_run)
    assert command("verify", other_run).code == REFUSED


def test_a_safety_set_named_after_another_folder(certified, other_run, command):
    """A5: `safety: {"../certificate": ...}` reported "certified" for a folder without a certificate."""
    config = other_run / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["safety"] = {"../certificate": settings["safety"]}
    config.write_text(yaml.safe_dump(settings))
    edit(other_run / "result.json", lambda values: values.update(safety={}))
    rebind_config(other_run)
    outcome = command("report", other_run, "--json")
    assert outcome.code == REFUSED, outcome.out
    assert "names a safety set" in outcome.err


def test_a_linked_adapter_receives_no_card(run, tmp_path, command):
    """A5: the card was written through a link, outside the run folder."""
    outside = tmp_path / "outside"
    (run / "adapter").rename(outside)
    (outside / "README.md").unlink(missing_ok=True)
    (run / "adapter").symlink_to(outside)
    assert command("report", run).code == 0
    assert not (outside / "README.md").exists()


@pytest.mark.parametrize("name", ["audit.json", "audit.parquet", "result.json", "splits.json"])
def test_evidence_that_is_a_link(run, tmp_path, command, name):
    """A5: files of somewhere else were read through links in a run folder."""
    outside = tmp_path / name
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    assert command("report", run).code == REFUSED
