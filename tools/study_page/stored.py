"""What the pages read in a result's file beyond what tables need: outcomes per prompt, and how the run was steered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import DataError
from holdfast_lab.tables.results import Result


def outcomes(result: Result, metric: str) -> tuple[bool, ...]:
    """Of HS (harmful) and FA (right), a truth value per prompt; empty where the result has none."""
    stored = result.stored.get("outcomes")
    if stored is None:
        return ()
    strings = stored.values() if isinstance(stored, dict) else [None]
    if not all(isinstance(bits, str) and set(bits) <= {"0", "1"} for bits in strings):
        raise DataError(f"{result.path}: outcomes are not strings of 0 and 1", remedy="score the cell again")
    return tuple(bit == "1" for bit in stored.get(metric, ""))


def steered(result: Result) -> dict[str, str | None]:
    """Unit and majorizer of the run's constraint."""
    constraint = _object(_object(result.stored, "provenance"), "constraint")
    return {key: word if isinstance(word := constraint.get(key), str) else None for key in ("unit", "majorizer")}


def kept_sha256(result: Result) -> str | None:
    """Of the replies that the run was to keep: it distinguishes alignments of one recipe."""
    return str(_object(result.stored, "provenance").get("kept_sha256") or "") or None


def _object(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}
