"""One table, one protocol: cells measured differently are not compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_json
from holdfast.tables.results import Result

SHOWN = 3


def require_one_protocol(results: Sequence[Result], table: str) -> None:
    """Raises `DataError` naming two cells and the first fields in which their protocols differ."""
    if not results:
        return
    first = results[0]
    digest = sha256_json(first.protocol)
    for other in results[1:]:
        if other.protocol_sha256 == first.protocol_sha256 and sha256_json(other.protocol) == digest:
            continue
        fields = list(differences(first.protocol, other.protocol))
        more = f" and {len(fields) - SHOWN} more" if len(fields) > SHOWN else ""
        where = ", ".join(fields[:SHOWN]) + more if fields else "protocol_sha256 alone"
        raise DataError(
            f"table {table}: cells {first.cell} and {other.cell} follow different protocols ({where}), "
            "expected one protocol in a table",
            remedy="make one table per protocol from a folder of its own, or run the other cells again",
        )


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Fields in which two protocols differ, as `path: value / value`, in sorted order."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}, key=str):
            inner = f"{path}.{key}" if path else str(key)
            if key not in one or key not in other:
                yield f"{inner}: {'absent' if key not in one else _shown(one[key])} / " + (
                    "absent" if key not in other else _shown(other[key])
                )
            else:
                yield from differences(one[key], other[key], inner)
    elif one != other:
        yield f"{path}: {_shown(one)} / {_shown(other)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
