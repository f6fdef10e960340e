"""What is asked of certify prompts: the claim of a certificate, and what an audit has in common with it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.core.hashing import sha256_json

LOOKED = ("template", "tokenizer", "max_length")  # settings that change the figures of an audit
JUDGE = "judge"  # name, revision and longest reply, where replies were judged


@dataclass(frozen=True, slots=True)
class Claim:
    """What an opening asks: is it true that at most a share alpha of the prompts degrades by more than tau?

    Degradations of the model `after` are measured against `before`; `settings` is what else decides them or the test.
    """

    before_sha256: str
    after_sha256: str
    unit: str
    tau: float
    alpha: float
    first_k: int
    confidence: float
    kind: str
    settings: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        return sha256_json({**asdict(self), "settings": dict(self.settings)})

    @property
    def look(self) -> str:
        """What an audit has in common with a certificate: all but confidence, kind and some settings."""
        return look_sha256(
            self.before_sha256, self.after_sha256, self.unit, self.tau, self.alpha, self.first_k, self.settings
        )


def look_sha256(
    before_sha256: str, after_sha256: str, unit: str, tau: float, alpha: float, first_k: int,
    settings: Mapping[str, Any],
) -> str:  # fmt: skip
    """Identity of a look at prompts: which two models were compared, and by which measure.

    Of `settings`, as a claim has them, those that a better figure could be looked for with: `LOOKED` and the judge.
    """
    read = [settings.get(name) for name in LOOKED]
    read += [settings[JUDGE]] if settings.get(JUDGE) else []
    return sha256_json([before_sha256, after_sha256, unit, float(tau), float(alpha), first_k, *read])
