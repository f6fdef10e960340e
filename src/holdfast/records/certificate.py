"""A certificate as a file: what is claimed, what was counted, and the hashes of everything it rests on.

The file is canonical JSON with the sha256 of its own content, so that any changed byte is noticed. That is no
signature: who can rewrite the file can rewrite its hash. Keep the sha256 that `holdfast certify` prints elsewhere and
hand it to `verify --expect`, or sign the file (`certify --sign`, `verify --key`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from holdfast.certification.blocks import (
    Assessment,
    Behaviour,
    Bound,
    CategoryFigures,
    Counts,
    Judge,
    LeakSearch,
    Measured,
    Openings,
    Places,
    ProcessState,
    Screened,
    Settings,
    Sides,
    Strength,
)  # fmt: skip
from holdfast.core.errors import CheckpointError
from holdfast.core.files import json_text, write_bytes
from holdfast.core.sealed_json import sealed
from holdfast.core.units import KL_UNITS

VERSION = 2
FILE_NAME = "certificate.json"
TABLE_NAME = "certificate.parquet"
KINDS = ("fixed", "finite_pool", "sequential", "per_category", "strength")
# What is compared: the classes of replies, a judge's scores of replies, divergences, likelihoods, or two logs' scores.
WAYS = ("behaviour", "harm", "kl", "likelihood", "log")
UNITS = {
    "behaviour": ("refusals",), "harm": ("on_policy",), "kl": KL_UNITS,
    "likelihood": ("nll_token", "nll_sum", "nll_first"), "log": ("passes",),
}  # fmt: skip
_RESTORE = "restore the file from where it was issued, or certify again"

_SETTING = {"harm": "judge", "behaviour": "replies", "log": "log"}  # there exactly when `by` is so
# What each block must hold. More is refused, so that nothing rides along unverified.
_TYPED: dict[str, type] = {
    "openings": Openings, "bound": Bound, "places": Places, "models": Sides, "screening": Screened, "rows": Counts,
    "groups": Counts, "behaviour": Behaviour, "leakage": LeakSearch, "strength": Strength, "settings": Settings,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CertificateRecord:
    """The content of `certificate.json`.

    Attributes:
        by: what was compared, one of `WAYS`; `kind`: of the test, one of `KINDS`.
        certified: the verdict, over `also` too: the second claim of a behaviour certificate (answers), or null.
        statement: the models, the claim and the verdict in one sentence.
        level: the part of 1 - confidence that this opening may spend.
        n, regressions: units of the sentence (groups of near-duplicate prompts, or prompts that were drawn one by one)
            and those with a degradation above tau; of a strength search, at the last strength tested.
        examples: prompts counted: all that were measured, by behaviour those that the model before refused.
        drawn, max_weight: as in `certify`; `groups`, `rows`: counts and test over groups and over prompts.
        upper_bound: of the regressing share, at `level`; `p_value` is null for sequential, which has an e-value.
        certified_tau: the smallest tau that the same test certifies; null where it is not defined.
        sequential: the state of the e-process; null for other kinds.
        behaviour: of replies: prompts asked, counted, lost, unclear and flipped, classes, rules and engine; null else.
        models: the names of both models as they were given; `places`: where they and the other parts were.
        openings: the ledger's entry; `bound`: sha256 of data, split, table, replies, models, tokenizer and template.
        screening: of a run that asked its model before training: what screening found, the sets whose certify prompts
            were opened, and how many of these prompts are public; null of any other certificate.
    """

    by: str
    certified: bool
    statement: str
    also: Assessment | None
    kind: str
    alpha: float
    tau: float
    unit: str
    first_k: int
    confidence: float
    level: float
    n: int
    examples: int
    regressions: int
    upper_bound: float
    p_value: float | None
    e_value: float | None
    certified_tau: float | None
    pool: int | None
    drawn: str
    max_weight: int | None
    groups: Counts | None
    rows: Counts | None
    categories: dict[str, CategoryFigures] | None
    strength: Strength | None
    sequential: ProcessState | None
    behaviour: Behaviour | None
    models: Sides
    openings: Openings
    bound: Bound
    places: Places
    leakage: LeakSearch
    settings: Settings
    noise_floor: float
    assumptions: list[str]
    versions: dict[str, str]
    commit: str | None
    hardware: str
    made: str
    screening: Screened | None = None

    @property
    def trained_sha256(self) -> str:
        """Of the model after as trained; of a strength search, of the adapter that was scaled."""
        return str(self.bound["after_sha256"] if self.strength is None else self.strength["original_sha256"])

    @property
    def sha256(self) -> str:
        return str(self.to_json()["sha256"])

    def to_json(self) -> dict[str, object]:
        return sealed({"version": VERSION} | {field.name: getattr(self, field.name) for field in fields(self)})

    def to_bytes(self) -> bytes:
        """Returns the one serialisation that `load_certificate` accepts."""
        return json_text(self.to_json()).encode("ascii")

    def save(self, folder: Path) -> Path:
        """Write `certificate.json`, atomically."""
        path = folder / FILE_NAME
        path.with_name(f"{FILE_NAME}.sig").unlink(missing_ok=True)  # a signature of what was there before
        write_bytes(path, self.to_bytes())
        return path

    @classmethod
    def from_json(cls, value: object) -> CertificateRecord:
        """The inverse of `to_json`; another version, keys, types or hash are refused."""
        if not isinstance(value, dict) or value.get("version") != VERSION:
            found = value.get("version") if isinstance(value, dict) else type(value).__name__
            remedy = "use the holdfast version that wrote it"
            raise CheckpointError(f"the certificate has version {found!r}, expected {VERSION}", remedy=remedy)
        names = {field.name for field in fields(cls)}
        wrong = sorted({*names, "version", "sha256"} ^ set(value)) or _misfits(value)
        if wrong:
            what = f"the certificate's content is not as expected, at: {', '.join(wrong[:20])}"
            raise CheckpointError(what, remedy=_RESTORE)
        record = cls(**{name: value[name] for name in names})
        if record.sha256 != value["sha256"]:
            what = f"the certificate was changed: its content has sha256 {record.sha256}, it says {value['sha256']}"
            raise CheckpointError(what, remedy=_RESTORE)
        return record


def load_certificate(path: Path) -> CertificateRecord:
    """Read a certificate whose bytes are exactly what `CertificateRecord.to_bytes` writes; any other is refused."""
    try:
        data = path.read_bytes()
        record = CertificateRecord.from_json(json.loads(data))
        same = record.to_bytes() == data
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.what}", remedy=error.remedy) from error
    except FileNotFoundError as error:
        remedy = "the same `holdfast certify` again goes on, or says why there is none; or name a certificate's folder"
        raise CheckpointError(f"there is no certificate at {path}", remedy=remedy) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a certificate: {error}", remedy=_RESTORE) from error
    if not same:
        raise CheckpointError(f"{path} was changed: its bytes are not those of its content", remedy=_RESTORE)
    return record


_LARGEST = 10**15  # beyond it, no count is one
_KIND_OF = {bool: "flag", str: "text", float: "number", int: "whole", list[str]: "texts", Judge: "judge"}


def _kinds_of(cls: type) -> dict[str, str]:
    """The kind of each key or field, by its type; `?` for "or null"."""
    return {name: _kind(hint) for name, hint in get_type_hints(cls).items()}


def _kind(hint: Any) -> str:
    others = [one for one in get_args(hint) if one is not NoneType]
    if NoneType in get_args(hint):
        return f"{_kind(others[0])}?"
    return _KIND_OF.get(hint) or ("list" if get_origin(hint) is list else "object")


_JUDGE = _kinds_of(Judge)
_FURTHER = _kinds_of(Measured)
_BLOCKS = {name: _kinds_of(cls) for name, cls in _TYPED.items()}
_BLOCKS["settings"] = {name: kind for name, kind in _BLOCKS["settings"].items() if name not in _FURTHER}
_TYPES = {"sha256": "text"} | _kinds_of(CertificateRecord)


def _fits(kind: str, value: object) -> bool:
    """Whether a value of the file is of a kind; true and false are no numbers."""
    if value is None or isinstance(value, bool):
        return kind.endswith("?") if value is None else kind == "flag"
    match kind.removesuffix("?"):
        case "number":
            return isinstance(value, int | float) and abs(value) <= sys.float_info.max and math.isfinite(value)
        case "whole":
            return isinstance(value, int) and 0 <= value <= _LARGEST
        case "texts":
            return isinstance(value, list) and all(isinstance(one, str) for one in value)
        case "judge":
            return isinstance(value, dict) and value.keys() == _JUDGE.keys() and not _unfit(_JUDGE, value)
    kinds: dict[str, type] = {"text": str, "object": dict, "list": list}
    return isinstance(value, kinds.get(kind.removesuffix("?"), bool))


def _unfit(kinds: Mapping[str, str], values: Mapping[str, object]) -> list[str]:
    return sorted(name for name in kinds.keys() & values.keys() if not _fits(kinds[name], values[name]))


def _misfits(value: Mapping[str, Any]) -> list[str]:
    """Names whose value has another type than the record's field, or whose block holds other keys."""
    wrong = _unfit(_TYPES, value)
    chosen = {"by": WAYS, "kind": KINDS, "drawn": ("groups", "rows")}
    wrong += [name for name, known in chosen.items() if name not in wrong and value[name] not in known]
    for name, keys in _BLOCKS.items():
        if isinstance(block := value[name], dict):
            known = keys | (_FURTHER if name == "settings" else {})
            others = sorted((keys.keys() - block.keys()) | (block.keys() - known.keys()))
            wrong += [f"{name}.{key}" for key in [*others, *_unfit(known, block)]]
    if wrong:
        return wrong
    by, settings, replied = value["by"], value["settings"], value["by"] in ("behaviour", "harm")
    wrong = [f"settings.{name}" for way, name in _SETTING.items() if (name in settings) != (by == way)]
    wrong += [] if value["unit"] in UNITS[by] else ["unit"]
    wrong += [] if isinstance(value["bound"]["replies_sha256"], dict) == replied else ["bound.replies_sha256"]
    return wrong + ([] if (value["behaviour"] is None) == (by != "behaviour") else ["behaviour"])
