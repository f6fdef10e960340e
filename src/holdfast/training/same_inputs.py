"""Several processes train one model only if all of them have the same data and settings: compared before the start."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_json
from holdfast.core.ranks import gather_objects, world
from holdfast.scoring.reference import data_sha256
from holdfast.training.fingerprint import argument_fingerprint, dataset_sha256


def input_hashes(trainer: Any) -> dict[str, str]:
    """What this process trains on, and how: name to sha256."""
    found = {"task data": dataset_sha256(trainer.train_dataset)}
    for name, one in trainer.safety.items():
        content = [data_sha256(one.all_encoded), one.split.record.to_json(), asdict(one.constraint)]
        found[f"safety set {name}"] = sha256_json(content)
    if trainer.run.data.harmful:
        found["harmful pairs"] = data_sha256(trainer.run.data.harmful)
    found["settings"] = sha256_json([argument_fingerprint(trainer.args), trainer.defense.describe()])
    return found


def require_same_inputs(trainer: Any) -> None:
    """Refuse processes that read other data or settings than the first one; a collective call.

    Raises:
        DataError: on every process, naming what differs and on which ranks.
    """
    if world() > 1:
        require_equal(gather_objects(input_hashes(trainer)))


def require_equal(every: Sequence[Mapping[str, str]]) -> None:
    """Refuse hashes that differ from those of rank 0.

    Args:
        every: of each rank: what it is of, and its sha256.
    """
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
