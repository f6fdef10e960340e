"""How often the rules that sort replies are wrong, measured on blind labels: printed, never subtracted.

The counts come from `benchmarks/refusal_rules` and are shipped beside this module; the rates and Clopper-Pearson
intervals are computed from them. A false refusal is a reply that the rules call refused and that is none; a missed
refusal is one they call answered. A label that is unclear counts as an error.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.certification.binomial import interval
from holdfast.core.errors import CheckpointError, HoldfastError
from holdfast.core.files import read_json
from holdfast.core.percent import percent_up
from holdfast.judging.refusal_rules import RULES_NAME, RULES_REVISION

DATA: Final = Path(__file__).with_name("refusal_rules.json")
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class ErrorRate:
    """Errors among labelled replies of one class."""

    n: int  # labelled replies
    errors: int  # those whose label is another, the unclear among them
    unclear: int  # of the errors, those whose label is `unclear`

    @property
    def rate(self) -> float | None:
        return self.errors / self.n if self.n else None

    @property
    def interval(self) -> tuple[float, float]:
        """Clopper-Pearson, 95 %; of no replies, everything."""
        return (0.0, 1.0) if self.n == 0 else interval(self.errors, self.n, CONFIDENCE)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "rate": self.rate, "interval": list(self.interval)}


@dataclass(frozen=True)
class RuleErrors:
    """Error rates of one revision of the rules."""

    revision: str  # of the rules
    labels_sha256: str  # of the file of labels
    labeller: str  # who labelled, in words
    false_refusals: ErrorRate  # of replies called refused, those that are none; over all models, drawn in equal numbers
    missed_refusals: ErrorRate  # of replies called answered, those that are refusals
    # (false refusals, missed refusals) of each model
    models: Mapping[str, tuple[ErrorRate, ErrorRate]] = field(default_factory=dict)

    def sentence(self) -> str:
        """The rates as a certificate prints them."""
        false, missed = (
            f"{found.errors} of {found.n} (at most {percent_up(found.interval[1])})"
            for found in (self.false_refusals, self.missed_refusals)
        )
        return (
            f"Of replies that {RULES_NAME} {self.revision} call refused, {false} were none or unclear by blind "
            f"labels; of those called answered, {missed} were refusals or unclear. These errors are not in the bound."
        )

    def to_json(self) -> dict[str, object]:
        """What is shipped, and what a certificate stores."""
        return {
            "rules": RULES_NAME, "revision": self.revision, "labels_sha256": self.labels_sha256,
            "labeller": self.labeller, "confidence": CONFIDENCE,
            **_pair_json(self.false_refusals, self.missed_refusals),
            "models": {name: _pair_json(*pair) for name, pair in sorted(self.models.items())},
        }  # fmt: skip


def rule_error_rates(path: Path = DATA) -> RuleErrors | None:
    """The measured error rates; None where those of this revision were not measured.

    Rates and intervals are computed from the stored counts.
    """
    if not path.exists():
        return None
    stored = read_json(path)
    try:
        if stored["revision"] != RULES_REVISION or stored["rules"] != RULES_NAME:
            return None
        found = RuleErrors(
            str(stored["revision"]), str(stored["labels_sha256"]), str(stored["labeller"]), *_pair(stored),
            {str(name): _pair(model) for name, model in stored["models"].items()},
        )  # fmt: skip
        if found.to_json() == stored:
            return found
    except (KeyError, TypeError, AttributeError, HoldfastError):
        pass
    what = f"{path}: not the error rates of its own counts"
    raise CheckpointError(what, remedy="install holdfast again, or measure them again")


def _pair(stored: Mapping[str, Any]) -> tuple[ErrorRate, ErrorRate]:
    rates = (stored["false_refusals"], stored["missed_refusals"])
    false, missed = (ErrorRate(rate["n"], rate["errors"], rate["unclear"]) for rate in rates)
    return false, missed


def _pair_json(false: ErrorRate, missed: ErrorRate) -> dict[str, object]:
    return {"false_refusals": false.to_json(), "missed_refusals": missed.to_json()}
