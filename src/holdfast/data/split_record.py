"""What a split was: enough to prove that a later run uses the same one, without any text."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from holdfast.core.errors import CheckpointError
from holdfast.core.hashing import sha256_lines
from holdfast.core.sealed_json import read_sealed, write_sealed

VERSION = 2
RECORD_NAME = "splits.json"
SEAL = "record_sha256"  # the key of the file's checksum; `sha256` has the hashes of the roles
ROLES = ("constraint", "monitor", "certify")


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """Sizes, hashes and ids of the three roles."""

    version: int  # of this layout
    seed: int | None  # of the draw; None for a split made by the user
    fractions: tuple[float, float, float] | None  # asked for, per role; None for a split made by the user
    rule: str  # when two prompts count as near-duplicates
    counts: dict[str, int]  # examples per role
    # groups of near-duplicate prompts among those of each role: the independent units of a certificate
    clusters: dict[str, int]
    n_clusters: int  # their sum
    duplicates_dropped: int  # rows with the prompt and completion of an earlier row
    contradictory_prompts: int  # prompts (normalised) that occur with different completions
    moved_from_certify: int  # examples moved to the constraint because the task data holds their prompt
    sha256: dict[str, str]  # per role, of its sorted ids
    ids: dict[str, tuple[str, ...]]  # per role, sorted

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]  # tuples become lists

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        if set(value) != set(_FITS) or not all(fits(value[name]) for name, fits in _FITS.items()):
            raise CheckpointError(
                f"the split record has version {value.get('version')}; expected version {VERSION}, every key and "
                f"values of its types; keys that do not fit: {sorted(set(value) ^ set(_FITS))}",
                remedy="use the holdfast version that wrote it, or a new output_dir",
            )
        ids = {role: tuple(value["ids"][role]) for role in ROLES}
        if (fault := _contradiction(value, ids)) is not None:
            what = f"the split record's {fault}"
            raise CheckpointError(what, remedy="restore splits.json from a backup, or use a new output_dir")
        fractions = value["fractions"]
        return cls(**{**value, "ids": ids, "fractions": None if fractions is None else tuple(fractions)})

    def with_roles(self, ids: Mapping[str, Iterable[str]], clusters: Mapping[str, int]) -> Self:
        """The same record for other members: ids, hashes and counts follow them."""
        ordered = {role: tuple(sorted(ids[role])) for role in ROLES}
        groups = {role: clusters[role] for role in ROLES}
        counts = {role: len(ordered[role]) for role in ROLES}
        n_clusters, hashes = sum(groups.values()), id_hashes(ordered)
        return replace(self, ids=ordered, sha256=hashes, counts=counts, clusters=groups, n_clusters=n_clusters)


def _whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _per_role(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and set(value) == set(ROLES) and all(map(fits, value.values()))


# Whether a value has its field's type; a damaged file must end in a sentence, whatever it holds.
_FITS: dict[str, Callable[[Any], bool]] = {
    "version": lambda value: value == VERSION,
    "seed": lambda value: value is None or _whole(value),
    "fractions": lambda value: (
        value is None
        or (isinstance(value, list) and len(value) == len(ROLES) and all(type(x) in (int, float) for x in value))
    ),
    "rule": lambda value: isinstance(value, str),
    **dict.fromkeys(("counts", "clusters"), _per_role(_whole)),
    **dict.fromkeys(("n_clusters", "duplicates_dropped", "contradictory_prompts", "moved_from_certify"), _whole),
    "sha256": _per_role(lambda value: isinstance(value, str)),
    "ids": _per_role(lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value)),
}


def _contradiction(value: Mapping[str, Any], ids: Mapping[str, tuple[str, ...]]) -> str | None:
    counts, clusters = {role: len(ids[role]) for role in ROLES}, value["clusters"]
    fitting = all(clusters[role] <= counts[role] and bool(clusters[role]) == bool(counts[role]) for role in ROLES)
    faults = {
        "ids do not match their sha256": dict(value["sha256"]) != id_hashes(ids),
        "counts are not those of its ids": value["counts"] != counts,
        "ids are not sorted, or occur twice": any(list(ids[role]) != sorted(set(ids[role])) for role in ROLES),
        "roles share an id": len(set().union(*ids.values())) != sum(counts.values()),
        "clusters do not fit its ids": not fitting or value["n_clusters"] != sum(clusters.values()),
    }
    return next((fault for fault, found in faults.items() if found), None)


def id_hashes(ids: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """sha256 of the sorted ids of each role."""
    return {role: sha256_lines(sorted(ids[role])) for role in ROLES}


def save_record(record: SplitRecord, folder: Path) -> Path:
    """Write `splits.json` into the run folder, atomically."""
    write_sealed(folder / RECORD_NAME, record.to_json(), key=SEAL)
    return folder / RECORD_NAME


def load_record(folder: Path) -> SplitRecord:
    """Read `splits.json` of a run folder; a damaged one is a `CheckpointError`."""
    value = read_sealed(folder / RECORD_NAME, key=SEAL, remedy="restore it from a backup, or use a new output_dir")
    del value[SEAL]
    return SplitRecord.from_json(value)


def require_same(record: SplitRecord, folder: Path) -> None:
    """Refuse to continue in a run folder whose split differs; a folder without one passes.

    A record made under an earlier rule for near-duplicates passes where the roles are the same, prompt by prompt.
    """
    if not (path := folder / RECORD_NAME).exists():
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
        remedy = "use the same safety data, fractions and seed as before, or a new output_dir"
        raise CheckpointError(f"{path} records another split; differing: {', '.join(differing)}", remedy=remedy)
