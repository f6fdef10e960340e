"""A table of reference losses that runs share: whoever can write it decides what counts as a degradation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.core.errors import CheckpointError
from holdfast.scoring.reference import ReferenceTable
from tests.unit.trainers.building import build, safety

FIRST_IDS = 8  # the rows that the first release measured again: those with the smallest ids
NLL = hf.ChanceConstraint(tau=0.1, beta=10.0, unit="nll_token")


def test_a_shared_table_with_forged_monitor_rows(tmp_path):
    """A9: eight ids and the constraint rows were checked, so a monitor rate of 97.5 % could be made 7.5 %."""
    shared = tmp_path / "shared"
    given = {"safety_dataset": safety(60), "constraint": NLL}
    first = build(tmp_path / "first", given=given, reference_cache=str(shared))
    known = first.safety["safety"]
    checked = sorted(known.reference.ids)[:FIRST_IDS]
    monitor = {example.id for example in known.monitor_set} - set(checked)
    assert len(monitor) >= 0.6 * len(known.monitor_set)
    forged = known.reference.losses.total.clone()
    for at, name in enumerate(known.reference.ids):
        forged[at] += 5.0 if name in monitor else 0.0  # nats: what used to be likely need no longer be
    losses = replace(known.reference.losses, total=forged)
    (record,) = (shared / "reference").glob("*.json")
    ReferenceTable(known.reference.ids, losses, known.reference.provenance).save(record.with_suffix(""))
    with pytest.raises(CheckpointError):
        build(Path(tmp_path / "second"), given=given, reference_cache=str(shared))
