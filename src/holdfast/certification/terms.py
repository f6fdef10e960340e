"""What a certificate tests: the table of what was measured, and the terms of the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.certification.arguments import confidence_level
from holdfast.certification.share import Counted, ShareTest, require_unit, share_test
from holdfast.certification.statement import Words, claim, found
from holdfast.core.errors import ConfigError

Degradations = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """What was measured, one row per prompt; per strength and prompt in a strength search.

    Attributes:
        ids: of the prompts.
        degradation: in the claim's unit.
        cluster: number of the group of near-duplicate prompts.
        category: of the prompt, or None.
        strength: the adapter strength measured; NaN outside a strength search.
    """

    ids: Sequence[str]
    degradation: Degradations
    cluster: NDArray[np.int64]
    category: Sequence[str | None]
    strength: Degradations

    def at(self, chosen: NDArray[np.bool_]) -> Rows:
        """Returns the rows where `chosen` is true."""
        where = np.flatnonzero(chosen).tolist()
        return Rows(
            [self.ids[i] for i in where],
            self.degradation[where],
            self.cluster[where],
            [self.category[i] for i in where],
            self.strength[where],
        )

    @staticmethod
    def joined(pieces: Sequence[Rows]) -> Rows:
        """Returns the rows of all pieces, in order."""
        return Rows(
            [name for piece in pieces for name in piece.ids],
            np.concatenate([piece.degradation for piece in pieces]),
            np.concatenate([piece.cluster for piece in pieces]),
            [category for piece in pieces for category in piece.category],
            np.concatenate([piece.strength for piece in pieces]),
        )

    def regressed(self, tau: float) -> NDArray[np.bool_]:
        """Returns for every prompt whether its degradation is not at most tau; a NaN is not."""
        return np.asarray(~(self.degradation <= tau))


@dataclass(frozen=True)
class Terms:
    """What is asked of the rows: the constraint, the confidence and the share of it, and the unit of the test.

    Attributes:
        pool: size of the known list that the prompts were drawn from, of a finite pool.
        unit: of a degradation.
        drawn: `groups`, or `rows` where the user asserts that prompts were drawn one by one.
        max_weight: the most that a group weighs, declared beforehand; None: groups are what is counted.
        words: for a regression and its source; None: those of the unit.
        claims: how many claims of one certificate share the confidence, so that all hold together.
    """

    kind: str
    tau: float
    alpha: float
    confidence: float
    openings: int
    pool: int | None
    unit: str
    drawn: str = "groups"
    max_weight: int | None = None
    words: Words | None = None
    claims: int = 1

    def __post_init__(self) -> None:
        if require_unit(self.drawn, self.max_weight) is not None and self.kind in ("finite_pool", "sequential"):
            what = "a sample of a known list is of prompts" if self.kind == "finite_pool" else "it has no groups"
            raise ConfigError(
                f"a {self.kind} certificate with max_weight {self.max_weight}: {what}, so there is nothing to weigh",
                remedy="leave out --max-weight, or certify a fixed number of prompts",
            )

    @property
    def level(self) -> float:
        """delta / (m c) for m openings and c claims."""
        return confidence_level(self.confidence, self.parts)

    @property
    def parts(self) -> int:
        """The number of tests that share 1 - confidence."""
        return self.openings * self.claims

    @property
    def said(self) -> Words:
        """A regression in words."""
        if self.words is not None:
            return self.words
        if self.unit == "on_policy":
            reply = f"a reply that the judge finds harmful with a probability more than {self.tau:g} above before's"
            return Words(f"get {reply}", f"gets {reply}")
        by = f"by more than {self.tau:g} ({self.unit})"
        return Words(f"degrade {by}", f"degrades {by}")

    def claim(self, words: Words | None = None) -> str:
        """Returns "at most alpha of ... regress"."""
        return claim(self.alpha, words or self.said, drawn=self.drawn, max_weight=self.max_weight)

    def found(self, groups: Counted, rows: Counted) -> str:
        """Returns the counts behind it."""
        return found(groups, rows, drawn=self.drawn, max_weight=self.max_weight)

    def test(self, rows: Rows, tau: float | None = None) -> ShareTest:
        """Returns the test of the share in these rows, at the constraint's tau unless given."""
        return share_test(
            rows.regressed(self.tau if tau is None else tau), rows.cluster, alpha=self.alpha,
            confidence=self.confidence, parts=self.parts, drawn=self.drawn, max_weight=self.max_weight,
        )  # fmt: skip
