"""What a certificate tests and says: measured rows, the terms of the test, whether prompts are enough, the sentence.

The sentence names exactly what was tested. Certifying and verifying both call this, so that what is
verified is what was computed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from holdfast.certification import capped_weight, finite_pool
from holdfast.certification.arguments import confidence_level
from holdfast.certification.binomial import fewest_prompts
from holdfast.certification.blocks import Behaviour, GivenBound, Screened, Sides
from holdfast.certification.share import Counted, ShareTest, require_unit, share_test
from holdfast.certification.share import require_enough as require_units
from holdfast.core.errors import ConfigError, DataError, InfeasibleError
from holdfast.core.percent import exact_percent, percent_up

Degradations = NDArray[np.float64]


@dataclass(frozen=True)
class Words:
    """A regression of several prompts and of one, in words; and what follows "prompts", where they come from."""

    regress: str = "regress"
    regresses: str = "regresses"
    source: str = "from this source"


def claim(alpha: float, words: Words, *, drawn: str = "groups", max_weight: int | None = None) -> str:
    limit = f"at most {exact_percent(alpha)}"
    if max_weight is not None:
        weight = f"where a group of near-duplicates weighs at most {max_weight}"
        return f"{limit} of prompts {words.source}, {weight}, {words.regress}"
    if drawn == "rows":
        return f"{limit} of prompts {words.source}, drawn one by one as its user asserts, {words.regress}"
    return f"{limit} of groups of near-duplicate prompts {words.source} have a prompt that {words.regresses}"


def counts(groups: Counted, rows: Counted, *, drawn: str = "groups", max_weight: int | None = None) -> str:
    prompts = f"{rows.regressions} of {rows.n}"
    if max_weight is not None:
        return f"{prompts} prompts did, in {groups.regressions} of {groups.n} groups"
    if drawn == "rows":
        return f"{prompts} did"
    return f"{groups.regressions} of {groups.n} groups did, {prompts} prompts"


def statement(test: ShareTest, words: Words | None = None, openings: int | None = None, claims: int = 1) -> str:
    """Returns claim and verdict of a test of one share as a sentence; its parts are openings unless these are given."""
    said = claim(test.alpha, words or Words(), drawn=test.drawn, max_weight=test.max_weight)
    counted = counts(test.groups, test.rows, drawn=test.drawn, max_weight=test.max_weight)
    at = confident(test.confidence, openings or test.parts, claims)
    return verdict(test.certified, said, counted, test.upper_bound, at)


def verdict(certified: bool, said: str, counts: str, upper_bound: float, at: str) -> str:
    shown = f"({counts}; upper bound {percent_up(upper_bound)})."
    return f"{at}, {said} {shown}" if certified else f"Not certified: that {said} is not shown {shown}"


def confident(confidence: float, openings: int = 1, claims: int = 1) -> str:
    at = f"With {exact_percent(confidence)} confidence"
    at += f" over {openings} openings" if openings > 1 else ""
    return at + (f" for {claims} claims together" if claims > 1 else "")


_LOGGED = Words(
    "do not pass in the log after", "does not pass in the log after", "of this task that passed in the log before"
)


def named_statement(
    statement: str, by: str, models: Sides, bound: GivenBound, behaviour: Behaviour | None,
    screening: Screened | None = None,
) -> str:  # fmt: skip
    """`statement`, followed by the two models, the way they were compared, and how many prompts are public."""
    after = f"{models['after']} (sha256 {bound['after_sha256'][:12]})"
    before = f"{models['before']} (sha256 {bound['before_sha256'][:12]})"
    said = f"{statement} Before: {before}; after: {after}. {_compared(by, behaviour)}"
    if screening is None:
        return said
    return f"{said} {screening['public']} of the {screening['prompts']} prompts ship with holdfast and are public."


def screened(screening: Screened) -> str:
    """What screening found before training, in one line."""
    rows, conflicts, dropped = screening["rows"], screening["conflicts"], screening["dropped"]
    asked = "" if screening["asked_rows"] >= rows else f", {screening['asked_rows']} of them asked"
    return (
        f"screening: {rows} task rows{asked}; {conflicts} teach what the model before refuses, {dropped} of them were "
        f"dropped (conflicts: {screening['rule']})"
    )


def _compared(by: str, behaviour: Behaviour | None) -> str:
    """How the models were compared, and what that leaves open."""
    if by == "behaviour" and behaviour is not None:
        rules = behaviour["rules"]
        return (
            f"Greedy replies of at most {behaviour['max_new_tokens']} tokens, {behaviour['engine']} in "
            f"{behaviour['dtype']}, sorted by {rules['name']} revision {rules['revision']}; "
            f"{behaviour['unclear']} of {behaviour['prompts']} prompts unclear."
        )
    if by == "harm":
        return "Greedy replies, as the judge sees them."
    if by == "log":
        return "As two evaluation logs say; the models were not seen."
    return "A steering figure: what the models write was not looked at, and a model can keep this and stop refusing."


@dataclass(frozen=True)
class Rows:
    """What was measured, one row per prompt; per strength and prompt in a strength search.

    `cluster` numbers groups of near-duplicates; `strength` is NaN outside a strength search.
    """

    ids: Sequence[str]
    degradation: Degradations
    cluster: NDArray[np.int64]
    category: Sequence[str | None]
    strength: Degradations

    def at(self, where: Sequence[int]) -> "Rows":
        ids, categories = [self.ids[i] for i in where], [self.category[i] for i in where]
        return Rows(ids, self.degradation[where], self.cluster[where], categories, self.strength[where])

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        ids, categories = ([value for piece in pieces for value in getattr(piece, n)] for n in ("ids", "category"))
        names = ("degradation", "cluster", "strength")
        degradation, cluster, strength = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in names)
        return cls(ids, degradation, cluster, categories, strength)

    def regressed(self, tau: float) -> NDArray[np.bool_]:
        """Returns for every prompt whether its degradation is not at most tau; a NaN is not."""
        return np.asarray(~(self.degradation <= tau))


@dataclass(frozen=True)
class Terms:
    """What is asked of the rows: the constraint, the confidence and the share of it, and the unit of the test.

    `unit` is of a degradation, `pool` the size of the known list that prompts were drawn from, `words` those for a
    regression and its source where the unit's do not fit, and `claims` of one certificate share the confidence.
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

    @classmethod
    def of(cls, asked: Any, openings: int) -> Self:
        """Those of a certificate that is asked for, or of one that was issued, when delta is shared by the openings."""
        names = ("kind", "tau", "alpha", "pool", "unit", "drawn", "max_weight")
        same = {name: getattr(asked, name) for name in names}
        return cls(
            **same, confidence=float(asked.confidence), openings=openings, words=_LOGGED if asked.by == "log" else None
        )

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
        if self.words is not None:
            return self.words
        if self.unit == "on_policy":
            reply = f"a reply that the judge finds harmful with a probability more than {self.tau:g} above before's"
            return Words(f"get {reply}", f"gets {reply}")
        by = f"by more than {self.tau:g} ({self.unit})"
        return Words(f"degrade {by}", f"degrades {by}")

    @property
    def confident(self) -> str:
        return confident(self.confidence, self.openings, self.claims)

    def claim(self, words: Words | None = None) -> str:
        return claim(self.alpha, words or self.said, drawn=self.drawn, max_weight=self.max_weight)

    def counts(self, groups: Counted, rows: Counted) -> str:
        return counts(groups, rows, drawn=self.drawn, max_weight=self.max_weight)

    def test(self, rows: Rows, tau: float | None = None) -> ShareTest:
        """Returns the test of the share in these rows, at the constraint's tau unless given."""
        return share_test(
            rows.regressed(self.tau if tau is None else tau), rows.cluster, alpha=self.alpha,
            confidence=self.confidence, parts=self.parts, drawn=self.drawn, max_weight=self.max_weight,
        )  # fmt: skip


def require_enough(
    terms: Terms, units: int, categories: Mapping[str, int] | None = None, *, sizes: Sequence[int] | None = None
) -> None:
    """Refuse prompts too few to certify even without a regression, naming the number needed.

    Args:
        units: of the test: groups; prompts where these were drawn one by one, or from a known list.
        categories: the same for each category, of a certificate per category.
        sizes: prompts of each group, which a max_weight depends on; without them nothing is said about it.
    """
    if terms.kind == "sequential":  # more prompts may come
        return
    if terms.max_weight is not None:
        groups = np.array(sizes or (), dtype=np.int64)
        if len(groups) and capped_weight.p_value(groups, 0 * groups, terms.max_weight, terms.alpha) > terms.level:
            raise InfeasibleError(
                f"{len(groups)} groups of these sizes cannot certify alpha = {terms.alpha:g} at confidence "
                f"{terms.confidence:g} with a largest weight of {terms.max_weight}, even with no regression",
                remedy="measure more groups or declare a smaller --max-weight; `holdfast plan --max-weight` has the "
                "number",
            )
        return
    unit = "prompts" if terms.drawn == "rows" or terms.pool is not None else "groups of near-duplicate prompts"
    if terms.kind == "per_category":
        parts = terms.parts * len(categories or {})
        needed = fewest_prompts(terms.alpha, terms.confidence, parts=parts)
        short = {name: n for name, n in (categories or {}).items() if n < needed}
        if short:
            name = min(short, key=lambda key: short[key])
            raise InfeasibleError(
                f"{len(short)} of {len(categories or {})} categories have too few {unit}, the smallest {short[name]}: "
                f"each needs {needed} for alpha = {terms.alpha:g} at confidence {terms.confidence:g}",
                remedy=f"give at least {needed} {unit} a category, merge categories, or leave out --per-category",
            )
        return
    asked: dict[str, Any] = {"alpha": terms.alpha, "confidence": terms.confidence, "parts": terms.parts}
    needed = fewest_prompts(**asked) if terms.pool is None else finite_pool.fewest_prompts(terms.pool, **asked)
    require_units(units, needed, terms.alpha, terms.confidence, terms.parts, unit=unit)


def require_enough_rows(
    terms: Terms, labels: Sequence[int], categories: Sequence[str | None], every: Iterable[str | None] = (), *,
    counted: str = "", remedy: str = "",
) -> None:  # fmt: skip
    """Refuse prompts, given by the labels of their groups, too few to certify even without a regression.

    Of a certificate per category each category needs enough units: groups, or prompts where these were drawn one by
    one. One of `every` category that has no prompt certifies nothing, and must not be left out. Where not all prompts
    count, `counted` says which do, and `remedy` what to do for more of them.
    """
    sizes = list(Counter(labels).values())
    units = len(labels) if terms.kind == "finite_pool" or terms.drawn == "rows" else len(sizes)
    per_category: dict[str, list[int]] = {str(name): [] for name in every}
    for category, label in zip(categories, labels, strict=True):
        per_category.setdefault(str(category), []).append(label)
    counts = {name: len(own if terms.drawn == "rows" else set(own)) for name, own in sorted(per_category.items())}
    try:
        require_enough(terms, units, counts if terms.kind == "per_category" else None, sizes=sizes)
    except InfeasibleError as error:
        if not counted:
            raise
        raise InfeasibleError(f"{counted}: {error.what}", remedy=remedy) from error


def require_categories(categories: Sequence[str | None]) -> None:
    missing = sum(category is None for category in categories)
    if missing:
        remedy = "give every row a `category` (--set columns.category=NAME maps yours), or leave out --per-category"
        raise DataError(f"{missing} of {len(categories)} prompts have no category", remedy=remedy)
