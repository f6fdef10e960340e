"""What a certificate is asked: which two models, what is compared and how it is tested; and the claim it enters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast.auditing.pair import Pair, open_pair
from holdfast.certification.arguments import confidence_level, count
from holdfast.certification.behaviour import BETWEEN, Claimed
from holdfast.certification.claim import JUDGE, Claim
from holdfast.certification.statement import words_of
from holdfast.certification.terms import Terms
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.hashing import sha256_json
from holdfast.core.registry import nearest
from holdfast.records.certificate import KINDS, WAYS

CLAIMED = ("template", "tokenizer", "max_length", "dtype")  # settings that change a degradation
MEASURED = (JUDGE, "replies", "log")  # how replies were made, judged or sorted
DRAWN = ("groups", "rows")
UNIT = {"behaviour": "refusals", "harm": "on_policy", "log": "passes"}


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
        recorded = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "device"}
        return recorded | {"reading": dict(self.reading)}


@dataclass(frozen=True)
class CertificateSpec:
    """Everything that decides what is certified, but for the prompts.

    Attributes:
        by: what is compared, one of `WAYS`.
        constraint: alpha; by kl and likelihood tau, unit and first_k too; by harm tau is a probability.
        kind: of the test.
        drawn: `groups`, or `rows` where the user asserts that prompts were drawn one by one.
        max_weight: the most that a group of near-duplicates weighs, declared beforehand.
        claims: what a behaviour certificate claims was kept.
        measured: how replies were made, judged or sorted, as the claim records it.
    """

    before: str | Path
    after: str | Path
    constraint: ChanceConstraint
    by: str = "likelihood"
    kind: str = "fixed"
    confidence: float = 0.95
    pool: int | None = None
    drawn: str = "groups"
    max_weight: int | None = None
    claims: tuple[Claimed, ...] = (Claimed.REFUSALS,)
    setup: Setup = field(default_factory=Setup)
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, known in (("by", self.by, WAYS), ("drawn", self.drawn, DRAWN), ("kind", self.kind, KINDS)):
            if value not in known:
                raise ConfigError(f"certificate: {name} {value!r} is unknown", remedy=nearest(value, list(known)))
        if (self.pool is not None) != (self.kind == "finite_pool"):
            raise ConfigError(
                f"kind {self.kind} with pool {self.pool}; expected a pool for finite_pool and for no other kind",
                remedy="give the size of the list that the prompts were drawn from (--pool N), or leave it out",
            )
        if self.by in ("behaviour", "log") and self.kind not in ("fixed", "per_category"):
            raise UnsupportedError(
                f"a certificate by {self.by} of kind {self.kind} is not supported: how many prompts it counts is known "
                "only once the model before has been asked all of them",
                remedy="leave out --pool, --anytime and --strength, or certify --by likelihood or kl",
            )
        if self.max_weight is not None:
            count("max_weight", self.max_weight, least=1)
        confidence_level(self.confidence)

    @property
    def unit(self) -> str:
        """Of a degradation."""
        return UNIT.get(self.by, str(self.constraint.unit))

    @property
    def tau(self) -> float:
        """The largest acceptable degradation: a behaviour is kept (0) or lost (1)."""
        return BETWEEN if self.by in ("behaviour", "log") else float(self.constraint.tau)

    @property
    def settings(self) -> dict[str, Any]:
        """What the certificate records of how it was measured."""
        return self.setup.to_json() | dict(self.measured)

    def pair(self) -> Pair:
        """Both models, hashed but not loaded.

        Raises:
            ConfigError: the two are the same model, of which nothing can regress.
        """
        names = ("dtype", "device", "tokenizer", "trust_remote_code", "before_revision", "after_revision")
        pair = open_pair(self.before, self.after, **{name: getattr(self.setup, name) for name in names})
        if pair.before.sha256 == pair.after.sha256:
            raise ConfigError(
                f"before ({self.before}) and after ({self.after}) are the same model, sha256 {pair.before.sha256}: "
                "nothing could be lost, so nothing is shown",
                remedy="name the model that was fine-tuned as --after",
            )
        return pair

    def claim(
        self, before_sha256: str, after_sha256: str, categories: Mapping[str, str | None],
        keep: Mapping[str, str] | None = None,
    ) -> Claim:  # fmt: skip
        """The claim that an opening is entered under; `categories` and `keep` by the prompts' ids."""
        return Claim(
            before_sha256=before_sha256, after_sha256=after_sha256, unit=self.unit, tau=self.tau,
            alpha=float(self.constraint.alpha), first_k=int(self.constraint.first_k),
            confidence=float(self.confidence), kind=self.kind,
            settings=claimed_settings(
                self.settings, pool=self.pool, drawn=self.drawn, max_weight=self.max_weight, claims=self.claims,
                categories=categories if self.kind == "per_category" else None, keep=keep,
            ),
        )  # fmt: skip

    def terms(self, openings: int) -> Terms:
        """The test, when delta is shared by that many openings."""
        return Terms(
            self.kind, self.tau, float(self.constraint.alpha), float(self.confidence), openings, self.pool, self.unit,
            drawn=self.drawn, max_weight=self.max_weight, words=words_of(self.by),
        )  # fmt: skip


def claimed_settings(
    settings: Mapping[str, Any], *, pool: int | None, drawn: str, max_weight: int | None, claims: Sequence[Claimed],
    categories: Mapping[str, str | None] | None, keep: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The settings that make a claim another one: what changes a degradation or the test.

    Categories, and what the set of a prompt keeps, are no part of a prompt's id, so that sorting prompts into others
    would else be the same claim.
    """
    decisive = {name: settings[name] for name in CLAIMED} | {"pool": pool, "drawn": drawn, "max_weight": max_weight}
    decisive |= {name: settings[name] for name in MEASURED if name in settings}
    decisive |= {"claims": [claim.unit for claim in claims]}
    hashed = {"keep": keep, "categories": categories}
    return decisive | {name: sha256_json(sorted(by_id.items())) for name, by_id in hashed.items() if by_id is not None}
