"""A certificate as a file: what is claimed, what was counted, and the hashes of everything it rests on.

The file is canonical JSON and carries the sha256 of its own content, so that any changed byte is noticed. That binds
the parts to one another; it is not a signature. Who can rewrite the whole file can also rewrite its hash: keep the
sha256 that `holdfast certify` prints somewhere else and hand it to `verify --expect`, or sign the file
(`certify --sign`) and check it with `verify --key`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

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
_COUNTED = "n regressions p_value upper_bound"
# What each block must hold; more is refused, so that nothing rides along unverified.
_BLOCKS: dict[str, frozenset[str]] = {
    name: frozenset(keys.split())
    for name, keys in {
        "openings": "declared this ledger claim",
        "bound": "data_sha256 split_sha256 table_sha256 before_sha256 after_sha256 reference_sha256 tokenizer_sha256 "
        "template_sha256 splits_sha256 replies_sha256",
        "places": "before after prompts table splits",
        "models": "before after",
        "screening": "rows asked_rows conflicts dropped rule sets public prompts task_sha256",
        "rows": _COUNTED,
        "groups": _COUNTED,
        "behaviour": "prompts counted lost unclear flips asked_twice classes rules engine dtype max_new_tokens longest",
        "leakage": "checked against prompts",
        "strength": "chosen tested adapter original original_sha256",
        "settings": "before_revision after_revision reading template tokenizer max_length dtype trust_remote_code",
    }.items()
}


@dataclass(frozen=True, slots=True)
class CertificateRecord:
    """The content of `certificate.json`.

    Attributes:
        by, kind: what was compared, one of `WAYS`, and the test, one of `KINDS`.
        certified: the verdict, over `also` too: the second claim of a behaviour certificate (answers), or null.
        level: the part of 1 - confidence that this opening may spend.
        n, regressions: units of the sentence (groups of near-duplicate prompts, or prompts that were drawn one by one)
            and those with a degradation above tau; of a strength search, at the last strength tested.
        examples: prompts counted: all that were measured, by behaviour those that the model before refused.
        groups, rows: counts and test over groups and over prompts.
        upper_bound: of the regressing share, at `level`; `p_value` is null for sequential, which has an e-value.
        certified_tau: the smallest tau that the same test certifies; null where it is not defined.
        behaviour: of replies: prompts asked, counted, lost, unclear and flipped, classes, rules and engine; null else.
        models, places: the names of both models as they were given, and where they and the other parts were.
        openings, bound: the ledger's entry, and the sha256 of data, split, table, replies, models, tokenizer, template.
        screening: of a run that asked its model before training: what screening found, the sets whose certify prompts
            were opened, and how many of these prompts are public; null of any other certificate.
    """

    by: str
    certified: bool
    statement: str
    also: dict[str, Any] | None
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
    groups: dict[str, Any] | None
    rows: dict[str, Any] | None
    categories: dict[str, Any] | None
    strength: dict[str, Any] | None
    sequential: dict[str, Any] | None
    behaviour: dict[str, Any] | None
    models: dict[str, Any]
    openings: dict[str, Any]
    bound: dict[str, Any]
    places: dict[str, Any]
    leakage: dict[str, Any]
    settings: dict[str, Any]
    noise_floor: float
    assumptions: list[str]
    versions: dict[str, str]
    commit: str | None
    hardware: str
    made: str
    screening: dict[str, Any] | None = None

    @property
    def trained_sha256(self) -> str:
        """Of the model after as trained; of a strength search, of the adapter that was scaled."""
        return str(self.bound["after_sha256"] if self.strength is None else self.strength["original_sha256"])

    @property
    def sha256(self) -> str:
        return str(self.to_json()["sha256"])

    def to_json(self) -> dict[str, Any]:
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
    def from_json(cls, value: Any) -> CertificateRecord:
        """The inverse of `to_json`; another version, keys, types or hash are refused."""
        if not isinstance(value, dict) or value.get("version") != VERSION:
            found = value.get("version") if isinstance(value, dict) else type(value).__name__
            remedy = "use the holdfast version that wrote it"
            raise CheckpointError(f"the certificate has version {found!r}, expected {VERSION}", remedy=remedy)
        names = {field.name for field in fields(cls)}
        wrong = sorted({*names, "version", "sha256"} ^ set(value)) or _misfits(value)
        if wrong:
            raise CheckpointError(
                f"the certificate's content is not as expected, at: {', '.join(wrong[:20])}", remedy=_RESTORE
            )
        record = cls(**{name: value[name] for name in names})
        if record.sha256 != value["sha256"]:
            raise CheckpointError(
                f"the certificate was changed: its content has sha256 {record.sha256}, it says {value['sha256']}",
                remedy=_RESTORE,
            )
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


def _misfits(value: Mapping[str, Any]) -> list[str]:
    """Names whose value has another type than the record's field, or whose block holds other keys."""
    wrong = [name for name, fits in _TYPES.items() if not fits(value[name])]
    for name, keys in _BLOCKS.items():
        block = value[name]
        if isinstance(block, dict):
            known = keys | set(_SETTING.values() if name == "settings" else ())
            wrong += [f"{name}.{key}" for key in sorted((keys - set(block)) | (set(block) - known))]
            wrong += [f"{name}.{key}" for key in sorted(known & set(block)) if not _INNER.get(key, _text)(block[key])]
    if wrong:
        return wrong
    by, settings, replied = value["by"], value["settings"], value["by"] in ("behaviour", "harm")
    wrong = [f"settings.{name}" for way, name in _SETTING.items() if (name in settings) != (by == way)]
    wrong += [] if value["unit"] in UNITS[by] else ["unit"]
    wrong += [] if isinstance(value["bound"]["replies_sha256"], dict) == replied else ["bound.replies_sha256"]
    return wrong + ([] if (value["behaviour"] is None) == (by != "behaviour") else ["behaviour"])


_LARGEST = 10**15  # beyond it, no count is one
Fits = Callable[[Any], bool]


def _is(*kinds: type) -> Fits:
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _number(value: Any) -> bool:
    return _is(int, float)(value) and abs(value) <= sys.float_info.max and math.isfinite(value)


def _whole(value: Any) -> bool:
    return _is(int)(value) and 0 <= value <= _LARGEST


def _judge(value: Any) -> bool:
    kinds = {"name": _text, "revision": _text, "max_new_tokens": _whole}
    return isinstance(value, dict) and set(value) == set(kinds) and all(kinds[key](value[key]) for key in kinds)


def _or_null(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


_text, _flag, _object, _list = _is(str), _is(bool), _is(dict), _is(list)


def _texts(value: Any) -> bool:
    return _list(value) and all(map(_text, value))


# What the values inside blocks must be, by name; text where nothing is said.
_INNER: dict[str, Fits] = {
    name: fits
    for fits, names in (
        (lambda value: value is None or _text(value) or _whole(value), "prompts"),  # a place, or a number of them
        (_whole, "declared this n regressions unclear max_new_tokens longest asked_rows conflicts dropped public rows"),
        (_or_null(_whole), "max_length"),
        (_or_null(_number), "chosen p_value upper_bound"),
        (_flag, "checked trust_remote_code"),
        (_or_null(_text), "against splits_sha256 splits adapter before_revision after_revision"),
        (_object, "counted lost flips asked_twice classes rules replies log reading"),
        (_or_null(_object), "replies_sha256"),
        (_texts, "sets"),
        (_list, "tested"),
        (_judge, "judge"),
    )
    for name in names.split()
}
_KINDS_OF = {"bool": _flag, "str": _text, "float": _number, "int": _whole, "list[str]": _texts}
_TYPES: dict[str, Fits] = {"sha256": _text} | {
    field.name: _or_null(fits) if str(field.type).endswith("| None") else fits
    for field in fields(CertificateRecord)
    for fits in [_KINDS_OF.get(str(field.type).removesuffix(" | None"), _object)]
}
_TYPES |= {"by": WAYS.__contains__, "kind": KINDS.__contains__, "drawn": ("groups", "rows").__contains__}
