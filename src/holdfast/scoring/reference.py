"""Reference losses: every safety example at theta_0, measured once, bound to what they were measured on; their noise.

A table is `reference.safetensors` (losses, with their sha256 in the other) and `reference.json` (example ids and
provenance, sealed). It is reused only where every provenance key agrees, the hash of all ids, tokens and labels among
them. Whoever changes losses can compute the hashes again, so a sample of each role is measured with the model at hand:
n = ln(0.001) / ln(0.95) = 135 rows, which nobody can know beforehand, find with probability > 0.999 any change of at
least 5 % of a role's rows, the least that moves its violation rate by 5 points.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load, save
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, DataError
from holdfast.core.files import read_plain_file, write_bytes
from holdfast.core.hashing import sha256_json, sha256_lines
from holdfast.core.ranks import barrier, from_first, rank
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.core.seeding import sample
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded
from holdfast.models.embedded import cache_root
from holdfast.scoring.completion import CompletionLosses
from holdfast.scoring.degradation import in_unit
from holdfast.scoring.forward import Forward

COLUMNS = ("total", "tokens", "first", "first_tokens")
FORGED_SHARE, MISSED = 0.05, 0.001
SPOT_CHECK = math.ceil(math.log(MISSED) / math.log(1 - FORGED_SHARE))  # rows of a role that are measured again
VERSION = 2
NOISE_QUANTILE, NOISE_SAMPLE = 0.99, 256


class Gaps(NamedTuple):
    """How far rows measured again may differ, in nats per token: on average, on average with sign, and at most."""

    mean: float
    shift: float
    largest: float


# A single row strays further than the mean, in bfloat16 by far; a wrong model is off by more than any of these.
SPOT_TOLERANCE = {"float32": Gaps(1e-3, 1e-3, 1e-2), "bfloat16": Gaps(5e-2, 2e-2, 0.5)}


@dataclass(frozen=True)
class ReferenceTable:
    """Losses at theta_0, one row per example, with their provenance."""

    ids: tuple[str, ...]
    losses: CompletionLosses
    provenance: Mapping[str, Any]

    @cached_property
    def sha256(self) -> str:
        """Hash of ids, losses and provenance."""
        columns = [getattr(self.losses, name).tolist() for name in COLUMNS]
        return sha256_json([list(self.ids), columns, dict(self.provenance)])

    def in_unit(self, constraint: ChanceConstraint) -> Tensor:
        """The losses to subtract for this constraint; zeros for a KL."""
        if constraint.unit in KL_UNITS:
            return torch.zeros(len(self.ids), dtype=torch.float64)
        return in_unit(self.losses, constraint)

    def rows(self, ids: Sequence[str]) -> "ReferenceTable":
        """The part of the table for these examples, in this order."""
        at = {example_id: i for i, example_id in enumerate(self.ids)}
        picked = [at[example_id] for example_id in ids]
        losses = CompletionLosses(*(getattr(self.losses, name)[picked] for name in COLUMNS))
        return replace(self, ids=tuple(ids), losses=losses)

    def save(self, stem: Path) -> None:
        """Write `<stem>.safetensors` and then `<stem>.json`, which holds its checksum and its own, each atomically."""
        losses = save({name: getattr(self.losses, name) for name in COLUMNS})
        write_bytes(stem.with_suffix(".safetensors"), losses)
        record = {"version": VERSION, "ids": list(self.ids), "provenance": dict(self.provenance)}
        write_sealed(stem.with_suffix(".json"), record | {"losses_sha256": sha256(losses).hexdigest()})

    @classmethod
    def load(cls, stem: Path) -> Self:
        """Read a table; damage of either file is a `CheckpointError`."""
        try:
            record = read_sealed(stem.with_suffix(".json"))
            data = read_plain_file(stem.with_suffix(".safetensors"), remedy="")
        except CheckpointError as error:
            raise _damaged(stem, error.what) from error
        ids: Any = record.get("ids")
        provenance: Any = record.get("provenance")
        listed = isinstance(ids, list) and all(isinstance(name, str) for name in ids) and len(set(ids)) == len(ids)
        if record.get("version") != VERSION or not listed or not isinstance(provenance, dict):
            raise _damaged(stem, f"expected version {VERSION} with ids that occur once, and a provenance")
        if sha256(data).hexdigest() != record.get("losses_sha256"):
            raise _damaged(stem, "the losses do not match their checksum")
        try:
            tensors = load(data)
            columns = [tensors[name] for name in COLUMNS]
        except Exception as error:
            raise _damaged(stem, f"the losses cannot be read ({type(error).__name__})") from error
        if any(column.shape != (len(ids),) or column.dtype != torch.float64 for column in columns):
            raise _damaged(stem, "the losses are not one number an example")
        return cls(tuple(ids), CompletionLosses(*columns), provenance)


def _damaged(stem: Path, why: str) -> CheckpointError:
    remedy = "delete both files; they are measured again"
    return CheckpointError(f"reference losses {stem}.* are damaged: {why}", remedy=remedy)


def data_sha256(examples: Sequence[Encoded]) -> str:
    """Hash of the tokenised examples, labels included."""
    return sha256_lines(f"{e.id}|{list(e.input_ids)}|{list(e.labels)}" for e in examples)


def require_same_provenance(stored: Mapping[str, object], current: Mapping[str, object], where: Path) -> None:
    """Refuse a table measured on anything else, naming the differing keys."""

    def short(value: object) -> str:
        text = str(value)
        return text if len(text) <= 20 else text[:12] + "..."

    differing = sorted(k for k in {*stored, *current} if stored.get(k) != current.get(k))
    if differing:
        listed = "; ".join(f"{k}: stored {short(stored.get(k))}, now {short(current.get(k))}" for k in differing)
        remedy = "use another run folder, or delete the reference.* files there to measure them again"
        raise CheckpointError(f"reference losses {where} were measured on something else ({listed})", remedy=remedy)


def measure_reference(
    forward: Forward, examples: Sequence[Encoded], provenance: Mapping[str, object], first_k: int
) -> ReferenceTable:
    """Measure the table now; non-finite losses are refused by id."""
    losses = forward.losses(examples, first_k)
    if bad := [e.id for e, x in zip(examples, losses.total.tolist(), strict=True) if not math.isfinite(x)]:
        what = f"the reference loss of {len(bad)} safety examples is not finite (ids {', '.join(bad[:20])})"
        raise DataError(what, remedy="remove these examples, or load the model in float32")
    return ReferenceTable(tuple(e.id for e in examples), losses, provenance)


def drawn_rows(roles: Sequence[int]) -> list[int]:
    """Positions of the rows to measure again: of each role `SPOT_CHECK` at random, or all where it has fewer.

    Nobody can know them beforehand, and a small role is not hidden behind a large one. The rows lie role after role.
    """
    random, start, chosen = SystemRandom(), 0, []
    for size in roles:
        chosen += [start + at for at in random.sample(range(size), min(size, SPOT_CHECK))]
        start += size
    return sorted(chosen)


def _spot_check(
    forward: Forward, table: ReferenceTable, examples: Sequence[Encoded], roles: Sequence[int], where: Path
) -> None:
    """Refuse a table whose rows, measured again, are others.

    The mean of the gaps shows a wrong model, which is off on all rows; the largest gap a forged table, which is off on
    some; the mean with its sign one that was shifted as a whole, by less than single rows stray.
    """
    some = from_first(lambda: drawn_rows(roles))
    fresh = forward.losses([examples[i] for i in some], int(table.provenance["first_k"]))
    exact = table.provenance["dtype"] == "float32" and table.provenance["autocast"] == "no"
    tolerance = SPOT_TOLERANCE["float32" if exact else "bfloat16"]
    for column, tokens in (("total", "tokens"), ("first", "first_tokens")):
        gaps = (getattr(fresh, column) - getattr(table.losses, column)[some]) / getattr(fresh, tokens)
        found = Gaps(float(gaps.abs().mean()), abs(float(gaps.mean())), float(gaps.abs().max()))
        if not all(gap <= limit for gap, limit in zip(found, tolerance, strict=True)):
            raise CheckpointError(
                f"reference losses {where} do not belong to this model: {len(some)} examples measured again differ by "
                f"{found.mean:.3g} nats per token on average, {found.largest:.3g} at most",
                remedy="delete these files; the losses are measured again",
            )


def _require_rows(table: ReferenceTable, examples: Sequence[Encoded], where: Path) -> None:
    """Every row speaks of the example that it serves: as many scored tokens, and finite losses."""
    tokens = torch.tensor([example.n_labels for example in examples], dtype=torch.float64)
    first, losses = tokens.clamp(max=int(table.provenance["first_k"])), table.losses
    same = torch.equal(losses.tokens.double(), tokens) and torch.equal(losses.first_tokens.double(), first)
    if not (same and bool(torch.isfinite(losses.total).all()) and bool(torch.isfinite(losses.first).all())):
        raise _damaged(where, "its rows are not those of the examples it lists")


def cache_folder(configured: str | None) -> Path:
    """Where tables are shared between runs: `reference` in the setting, or in holdfast's cache."""
    return (Path(configured) if configured else cache_root()).expanduser() / "reference"


def _stored(place: Path, provenance: Mapping[str, object], examples: Sequence[Encoded]) -> ReferenceTable | None:
    """The table kept at `place`, or None. Rank 0 reads it for all: a cache may lie on its node alone."""
    ids = tuple(example.id for example in examples)

    def read() -> ReferenceTable | None:
        if not place.with_suffix(".json").exists():
            return None
        table = ReferenceTable.load(place)
        require_same_provenance(table.provenance, provenance, place)
        if set(table.ids) != set(ids):
            raise _damaged(place, "it lists other examples")
        _require_rows(table.rows(ids), examples, place)
        return table.rows(ids)

    return from_first(read)


def reference_table(
    forward: Forward, examples: Sequence[Encoded], provenance: Mapping[str, Any], *, stem: Path, cache: Path,
    roles: Sequence[int] | None = None,
) -> ReferenceTable:  # fmt: skip
    """The table from the run folder (`stem`, without suffix), else from the cache, else measured; stored in both.

    `roles`: how many of the examples each role has, one after the other; one role unless given.
    """
    places = (stem, cache / sha256_json(dict(provenance)))
    for place in places:
        if (table := _stored(place, provenance, examples)) is not None:
            _spot_check(forward, table, examples, roles or [len(examples)], place)
            break
    else:
        table = measure_reference(forward, examples, provenance, int(provenance["first_k"]))
    if rank() == 0:
        for place in places:
            if not place.with_suffix(".json").exists():
                table.save(place)
    barrier()
    return table


def noise_floor(
    forward: Forward, examples: Sequence[Encoded], reference: Tensor, constraint: ChanceConstraint, seed: int
) -> float:
    """The 99 % quantile of |D_i| at theta_0, where each is zero by definition, in the constraint's unit.

    A second pass over at most 256 examples in another batch composition moves each loss a little, more so in bfloat16.
    tau must stay well above that, or numerical noise alone would spend the budget alpha.
    """
    chosen = sample(range(len(examples)), NOISE_SAMPLE, seed, "noise floor")
    found = forward.degradations([examples[i] for i in chosen], reference[chosen], constraint, shuffle=seed)
    return float(torch.quantile(found.abs(), NOISE_QUANTILE))
