"""The block `holdfast:` of an Axolotl file: the parts of a run file that Axolotl does not already have.

Axolotl checks that the keys are known; what they hold is checked where a run file is (`holdfast.runs.config`), with the
same messages.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

OF_RUN_FILE = ("safety", "conflicts", "screening", "monitor", "constraint", "defense")
"""Keys that mean what they mean in a run file."""
TRAIN = (
    "safety_batch_size", "safety_micro_batch_size", "safety_eval_batch_size", "spikes", "probe_rows", "reference_cache",
)  # fmt: skip
"""Keys of `holdfast: {train: ...}`: the safety pass is holdfast's, everything else about training is Axolotl's."""


class HoldfastSettings(BaseModel):
    """`holdfast:`; an empty block is `safety: auto` with every default."""

    model_config = ConfigDict(extra="forbid")

    safety: Any = "auto"
    conflicts: Any = None
    screening: dict[str, Any] | None = None
    monitor: dict[str, Any] | None = None
    constraint: dict[str, Any] | None = None
    defense: Any = None
    train: dict[str, Any] | None = None
    """Fields of the safety pass, those of `TRAIN`."""
    certify: bool = True
    """Whether the closed prompts are opened, once, when training has ended; else `holdfast certify` does it later."""
    report: bool = True
    """Whether report.html and the model card are written then."""


class HoldfastArgs(BaseModel):
    """What Axolotl adds to the keys of its file."""

    holdfast: HoldfastSettings | None = Field(default_factory=HoldfastSettings)
    """The block; empty, or left out, it has every default."""
