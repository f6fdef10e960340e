"""What `result.json` holds. A key that is not required is of runs that have it, or that this version wrote."""

from typing import Any, NotRequired, TypedDict

from holdfast.certification.kept import BehaviourValues


class SetFigures(TypedDict):
    """A safety set: its limit, and the rates of its splits, null of one without examples.

    `feasible`: the violation rates of both are within alpha.
    """

    tau: float
    unit: str
    alpha: float
    noise_floor: float | None
    constraint: dict[str, float] | None
    monitor: dict[str, float] | None
    feasible: bool


class DefenseSaid(TypedDict):
    """The defense, and whether it promises the constraint."""

    name: str
    constrains: bool


class Spikes(TypedDict):
    """Steps that were discarded for a spike of the loss: how many, and the last of them."""

    discarded: int
    last_steps: list[int]


class Cost(TypedDict):
    """Of the last start, by its first process: seconds by part, and the most bytes of memory by place."""

    seconds: dict[str, float]
    peak_memory: dict[str, int]


class ResultValues(BehaviourValues):
    """The object.

    `data`: rows used and skipped, by source; `screening`: counts of `Screening.figures`; `barrier`: how often each
    event occurred, and the probe's g; `memory`: what was made smaller to fit.
    """

    steps: int
    seconds: float
    trust_remote_code: bool
    data: NotRequired[dict[str, Any]]
    screening: NotRequired[dict[str, Any]]
    safety: dict[str, SetFigures]
    defense: DefenseSaid
    step: str | None
    step_declined: str | None
    config_sha256: str
    versions: dict[str, str]
    commit: str | None
    hardware: str
    memory: NotRequired[dict[str, int]]
    cost: NotRequired[Cost]
    spikes: NotRequired[Spikes]
    barrier: NotRequired[dict[str, Any]]
    audit_sha256: NotRequired[dict[str, str]]
    config_file_sha256: NotRequired[str]
    sha256: NotRequired[str]
