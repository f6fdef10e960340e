"""What a certificate is asked: which two models, how measured and how tested; and the claim it is entered under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast.auditing.judging import Judging
from holdfast.auditing.pair import Pair, open_pair
from holdfast.certification.arguments import confidence_level
from holdfast.certification.assessment import Terms
from holdfast.certification.claim import JUDGE, Claim
from holdfast.certification.record import KINDS
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError
from holdfast.core.hashing import sha256_json
from holdfast.core.registry import nearest
from holdfast.evaluation.on_policy import UNIT

CLAIMED = ("template", "tokenizer", "max_length", "dtype")  # settings that change a degradation


@dataclass(frozen=True)
class Setup:
    """How prompts are read and models loaded.

    Attributes:
        template: `chat` or `none`.
        tokenizer: whose tokenizer reads the data: `same`, `before`, `after` or `own`.
        max_length: tokens after which an example is cut.
        dtype: `auto` keeps each checkpoint's.
        device: the GPU where there is one, unless given.
        reading: options of `read_examples`.
    """

    template: str = "chat"
    tokenizer: str = "same"
    max_length: int | None = None
    dtype: str = "auto"
    device: str | None = None
    before_revision: str | None = None
    after_revision: str | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.template not in ("chat", "none"):
            raise ConfigError(f"template is {self.template!r}", remedy="use chat or none")

    def to_json(self) -> dict[str, Any]:
        """What the certificate records: all but the device."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "device"}
        return found | {"reading": dict(self.reading)}


@dataclass(frozen=True)
class Question:
    """Everything that decides what is certified, but for the prompts.

    With `judging`, regressions are on-policy: tau of the constraint is a probability, and its unit is not used.
    """

    before: str | Path
    after: str | Path
    constraint: ChanceConstraint
    kind: str
    confidence: float
    pool: int | None
    setup: Setup
    judging: Judging | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"certificate kind {self.kind!r} is unknown", remedy=nearest(self.kind, list(KINDS)))
        if (self.pool is not None) != (self.kind == "finite_pool"):
            raise ConfigError(
                f"kind {self.kind} with pool {self.pool}; expected a pool for finite_pool and for no other kind",
                remedy="give the size of the list that the prompts were drawn from (--pool N), or leave it out",
            )
        confidence_level(self.confidence)

    @property
    def unit(self) -> str:
        """Of a degradation."""
        return self.constraint.unit if self.judging is None else UNIT

    @property
    def settings(self) -> dict[str, Any]:
        """What the certificate records of how it was measured."""
        judge = {} if self.judging is None else {JUDGE: self.judging.to_json()}
        return self.setup.to_json() | judge

    def pair(self) -> Pair:
        """Both models, hashed but not loaded."""
        choice: Any = self.setup.tokenizer
        dtype: Any = self.setup.dtype
        return open_pair(
            self.before, self.after, dtype=dtype, device=self.setup.device, tokenizer=choice,
            trust_remote_code=self.setup.trust_remote_code, before_revision=self.setup.before_revision,
            after_revision=self.setup.after_revision,
        )  # fmt: skip

    def claim(self, pair: Pair, categories: Mapping[str, str | None]) -> Claim:
        """The claim that an opening is entered under; `categories` by the prompts' ids."""
        limit, settings = self.constraint, self.settings
        return Claim(
            before_sha256=pair.before.sha256, after_sha256=pair.after.sha256, unit=self.unit, tau=float(limit.tau),
            alpha=float(limit.alpha), first_k=int(limit.first_k), confidence=float(self.confidence), kind=self.kind,
            settings=claimed(settings, self.pool, categories if self.kind == "per_category" else None),
        )  # fmt: skip

    def terms(self, openings: int) -> Terms:
        """The test, when delta is shared by that many openings."""
        limit = self.constraint
        return Terms(
            self.kind, float(limit.tau), float(limit.alpha), float(self.confidence), openings, self.pool, self.unit
        )


def claimed(
    settings: Mapping[str, Any], pool: int | None, categories: Mapping[str, str | None] | None
) -> dict[str, Any]:
    """The settings that make a claim another one: what changes a degradation or the test.

    Categories are no part of a prompt's id, so that sorting prompts into others would else be the same claim.
    """
    found = {name: settings[name] for name in CLAIMED} | {"pool": pool}
    found |= {JUDGE: settings[JUDGE]} if JUDGE in settings else {}
    return found if categories is None else found | {"categories": sha256_json(sorted(categories.items()))}
