"""What a split was: enough to prove that a later run uses the same one, without any text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError
from holdfast.core.files import read_json, write_json
from holdfast.core.hashing import sha256_lines

VERSION = 1
RECORD_NAME = "splits.json"
ROLES = ("constraint", "monitor", "certify")


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """Sizes, hashes and ids of the three roles.

    Attributes:
        version: of this layout.
        seed: of the draw; None for a split made by the user.
        fractions: asked for, per role; None for a split made by the user.
        rule: when two prompts count as near-duplicates.
        counts: examples per role.
        clusters: groups of near-duplicate prompts among those of each role: the independent units of a certificate.
        n_clusters: their sum.
        duplicates_dropped: rows with the prompt and completion of an earlier row.
        contradictory_prompts: prompts (normalised) that occur with different completions.
        moved_from_certify: examples moved to the constraint because the task data holds their prompt.
        sha256: per role, of its sorted ids.
        ids: per role, sorted.
    """

    version: int
    seed: int | None
    fractions: tuple[float, float, float] | None
    rule: str
    counts: dict[str, int]
    clusters: dict[str, int]
    n_clusters: int
    duplicates_dropped: int
    contradictory_prompts: int
    moved_from_certify: int
    sha256: dict[str, str]
    ids: dict[str, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `json` can write."""
        value = asdict(self)
        value["fractions"] = None if self.fractions is None else list(self.fractions)
        value["ids"] = {role: list(ids) for role, ids in self.ids.items()}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SplitRecord:
        """The inverse of `to_json`.

        Raises:
            CheckpointError: keys are missing or unknown, or a hash does not match its ids.
        """
        names = {field.name for field in fields(cls)}
        if set(value) != names or value["version"] != VERSION:
            raise CheckpointError(
                f"the split record has version {value.get('version')}; expected version {VERSION}; keys that "
                f"do not fit: {sorted(set(value) ^ names)}",
                remedy="use the holdfast version that wrote it, or a new output_dir",
            )
        ids = {role: tuple(value["ids"][role]) for role in ROLES}
        if dict(value["sha256"]) != id_hashes(ids):
            raise CheckpointError(
                "the split record's ids do not match their sha256",
                remedy="restore splits.json from a backup, or use a new output_dir",
            )
        fractions = value["fractions"]
        return cls(**{**value, "ids": ids, "fractions": None if fractions is None else tuple(fractions)})

    def with_roles(self, ids: Mapping[str, Iterable[str]], clusters: Mapping[str, int]) -> SplitRecord:
        """The same record for other members: ids, hashes and counts follow them."""
        ordered = {role: tuple(sorted(ids[role])) for role in ROLES}
        return replace(
            self,
            ids=ordered,
            sha256=id_hashes(ordered),
            counts={role: len(ordered[role]) for role in ROLES},
            clusters={role: clusters[role] for role in ROLES},
            n_clusters=sum(clusters[role] for role in ROLES),
        )


def id_hashes(ids: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """sha256 of the sorted ids of each role."""
    return {role: sha256_lines(sorted(ids[role])) for role in ROLES}


def save_record(record: SplitRecord, folder: Path) -> Path:
    """Write `splits.json` into the run folder, atomically."""
    path = folder / RECORD_NAME
    write_json(path, record.to_json())
    return path


def load_record(folder: Path) -> SplitRecord:
    """Read `splits.json` of a run folder; a damaged one is a `CheckpointError`."""
    value = read_json(folder / RECORD_NAME)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{folder / RECORD_NAME} does not hold an object", remedy="restore it, or use a new output_dir"
        )
    return SplitRecord.from_json(value)


def require_same(record: SplitRecord, folder: Path) -> None:
    """Refuse to continue in a run folder whose split differs; a folder without one passes.

    A record made under an earlier rule for near-duplicates passes where the roles are the same, prompt by prompt.

    Raises:
        CheckpointError: listing the differing keys, or naming both rules.
    """
    path = folder / RECORD_NAME
    if not path.exists():
        return
    old, new = load_record(folder).to_json(), record.to_json()
    differing = sorted(key for key in new if old[key] != new[key])
    if "rule" in differing:
        differing = [key for key in differing if key not in ("rule", "clusters", "n_clusters")]
        if differing and old["seed"] == new["seed"] and old["fractions"] == new["fractions"]:
            raise CheckpointError(
                f"{path} was split under an earlier rule for near-duplicates ({old['rule']}); under this version's "
                f"({new['rule']}) prompts get other roles; differing: {', '.join(differing)}",
                remedy="use the holdfast version that wrote it, or train again in a new output_dir",
            )
    if differing:
        raise CheckpointError(
            f"{path} records another split; differing: {', '.join(differing)}",
            remedy="use the same safety data, fractions and seed as before, or a new output_dir",
        )
