"""Several processes train one model only if all of them have the same data and settings: compared before the start."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.errors import DataError
from holdfast.core.ranks import gather_objects


def require_same_inputs(hashes: Mapping[str, str]) -> None:
    """Refuse processes that read other data or settings than the first one; a collective call.

    Args:
        hashes: of this process: what it is of, and its sha256.

    Raises:
        DataError: on every process, naming what differs and on which ranks.
    """
    every = gather_objects(dict(hashes))
    names = dict.fromkeys(name for one in every for name in one)
    different = {
        name: [rank for rank, one in enumerate(every) if one.get(name) != every[0].get(name)] for name in names
    }
    listed = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in different.items() if ranks]
    if listed:
        raise DataError(
            f"the processes do not train on the same: {'; '.join(listed)} differs from rank 0",
            remedy="give every process the same files, versions and settings (on every machine), then start again",
        )
