"""Does the barrier hold between the steps? g on the same examples of each safety set after every optimizer step.

A batch of a few rows says little about g, and the filter's own estimate is what is to be checked. The probe is the
first `probe_rows` of a permutation of the constraint split, by the safety seed. It steers nothing. The reference of a
fixed row never changes: for a KL theta_0 is passed over once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.ranks import world
from holdfast.core.seeding import generator
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded
from holdfast.scoring.forward import Forward
from holdfast.scoring.reference_states import KeptReference

if TYPE_CHECKING:
    from holdfast.training.run import Run

ROWS = 64  # passed over at one time on one process, or as many as its device has room for


def on_whole_set(constraint: ChanceConstraint, degradations: Tensor) -> ChanceConstraint:
    """The constraint as it is for these examples: cvar's threshold adapts, and the best one is their own quantile."""
    if constraint.majorizer != "cvar":
        return constraint
    return constraint.with_threshold(float(torch.quantile(degradations, 1.0 - constraint.alpha)))


class ConstraintProbe:
    """The fixed examples of a run."""

    def __init__(self, run: Run, rows: int) -> None:
        self._run = run
        seed = run.args.stream_seed
        self._places = {
            name: generator(seed, f"probe {name}").permutation(len(one.constraint_set))[:rows].tolist()
            for name, one in run.data.safety.items()
        }
        self._kept: dict[tuple[str, int], KeptReference] = {}

    def measure(self) -> dict[str, float]:
        """g of every safety set at the current parameters."""
        return {name: self._g(name, places) for name, places in self._places.items()}

    def _g(self, name: str, places: list[int]) -> float:
        run, one = self._run, self._run.data.safety[name]
        examples, reference = [one.constraint_set[i] for i in places], one.constraint_reference[places]

        def passing(rows: int) -> Tensor:
            return self._forward(name, examples, rows).degradations(examples, reference, one.constraint)

        degradations = run.fitting.evaluation(ROWS if world() == 1 else run.forward.batch_size, passing)
        return float(on_whole_set(one.constraint, degradations).value(degradations))

    def _forward(self, name: str, examples: list[Encoded], rows: int) -> Forward:
        """With what is kept of theta_0, from the batches in which the model itself is passed over: rounding cancels."""
        forward = self._run.forward.resized(rows)
        if forward.kept is not None or self._run.data.safety[name].constraint.unit not in KL_UNITS:
            return forward
        if (name, rows) not in self._kept:
            with self._run.theta_0.active():
                self._kept[name, rows] = KeptReference.of(forward, examples)
        return replace(forward, kept=self._kept[name, rows])


def barrier_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How often each event occurred, and where steps were probed, how often and how far g was above zero.

    Args:
        rows: of events.jsonl.
    """
    steps = [row for row in rows if "loss" in row]  # the behaviour monitor has rows of its own
    events = Counter(str(row["event"]) for row in steps if "event" in row)
    probed: dict[str, list[float]] = {}
    for row in steps:
        for name, g in row.get("probe", {}).items():
            probed.setdefault(name, []).append(math.inf if g is None else g)  # null: not finite
    probes = {
        name: {
            "steps": len(g), "above": sum(x > 0.0 for x in g) / len(g),
            "largest": max(g) if math.isfinite(max(g)) else None,
        }
        for name, g in probed.items()
    }  # fmt: skip
    pulled = [row["pulled"] < 1.0 for row in steps if row.get("pulled") is not None]
    shares = {"pulled": sum(pulled) / len(pulled)} if any(pulled) else {}
    return {"events": dict(events)} | shares | ({"probe": probes} if probes else {})
