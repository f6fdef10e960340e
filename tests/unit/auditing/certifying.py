"""A tiny model, an adapter on it, and a safety file: enough to open a certify split in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tests import tiny
from tests.unit.auditing.making import write_adapter

from holdfast.auditing.opening import open_certify
from holdfast.constraint.chance import ChanceConstraint
from holdfast.records.certificate import CertificateRecord

WEAK, STRONG = 0.01, 0.5  # sizes of an adapter's change: hardly any degradation, and one for most prompts
CONSTRAINT = ChanceConstraint(tau=0.05, alpha=0.2, unit="nll_token")


class Scene(NamedTuple):
    base: Path
    adapter: Path
    safety: Path
    output: Path

    def certify(self, **options: Any) -> CertificateRecord:
        limit = options.pop("constraint", CONSTRAINT)
        given = {"output": self.output, "safety": str(self.safety), "after": self.adapter} | options
        return open_certify(self.base, given.pop("after"), given.pop("safety"), limit, **given)


def write_safety(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def scene(folder: Path, *, n: int = 20, size: float = WEAK) -> Scene:
    base = tiny.saved(folder / "base")
    adapter = write_adapter(folder / "adapter", base, size=size)
    return Scene(base, adapter, write_safety(folder / "safety.jsonl", tiny.rows(n, seed=3)), folder / "out")
