"""From degradations to the verdict: the statistical part of a certificate, as a function of its table alone.

| kind         | what the sentence speaks of            | test                                                     |
|--------------|----------------------------------------|----------------------------------------------------------|
| fixed        | the unit                               | that of `share`                                          |
| per_category | the unit, within every category        | that of `share` in each, Holm over the categories        |
| strength     | the unit, at an adapter strength       | that of `share` at each strength, fixed sequence         |
| sequential   | groups of one prompt, or rows          | e-process over the table's order                         |
| finite_pool  | prompts of a known list                | hypergeometric: the sample is of prompts                 |

The unit is the group of near-duplicate prompts unless the user asserts another (`share`). A group regresses when any of
its prompts does, and a NaN regresses. Nothing is certified while more than alpha of the measured prompts regress.

The fixed sequence is Learn-then-Test: strengths are tested in an order fixed beforehand, each at the full level, until
the first failure. A false pass needs the first truly violating strength of the sequence to pass, one event of
probability at most the level: no share of delta is lost to the search, whatever the dependence between strengths.
Testing past a failure would break this.
"""

import itertools
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from holdfast.certification.arguments import exact
from holdfast.certification.binomial import p_value
from holdfast.certification.blocks import Assessment, KindFigures, StrengthFigures
from holdfast.certification.certificate import Certificate, certify_counts
from holdfast.certification.sequential import EProcess
from holdfast.certification.share import Counted, ShareTest, certify_categories, grouped
from holdfast.certification.terms import Rows, Terms, statement
from holdfast.core.errors import CheckpointError, ConfigError

STRENGTHS: tuple[float, ...] = tuple(tenth / 10 for tenth in range(1, 11))


@dataclass(frozen=True)
class Tested:
    """One strength (the factor on the adapter's change of the weights), what was counted at it, and whether it passed.

    `p_value` is of H0 "more than alpha regress at this strength"; `passed` is set by `fixed_sequence`.
    """

    strength: float
    regressions: int
    n: int
    p_value: float
    passed: bool = False

    @classmethod
    def binomial(cls, strength: float, regressions: int, n: int, alpha: float) -> Self:
        """Returns the exact binomial test at one strength."""
        return cls(strength, int(regressions), int(n), p_value(regressions, n, alpha))

    def to_json(self) -> StrengthFigures:
        return {
            "strength": self.strength, "regressions": self.regressions, "n": self.n, "p_value": self.p_value,
            "passed": self.passed,
        }  # fmt: skip


def fixed_sequence(strengths: Sequence[float], test: Callable[[float], Tested], level: float) -> list[Tested]:
    """Returns the tested strengths in order, the last of them the first failure unless all passed.

    `test` measures one strength; it is not called after a failure.
    """
    finite = len(strengths) > 0 and all(math.isfinite(s) and s > 0 for s in strengths)
    if not finite or any(b <= a for a, b in itertools.pairwise(strengths)):
        what = f"strengths = {list(strengths)}, expected positive numbers in increasing order"
        raise ConfigError(what, remedy="use the default 0.1, 0.2, ..., 1.0")
    if isinstance(level, bool) or not 0 < level < 1:
        raise ConfigError(f"level = {level!r}, expected 0 < level < 1", remedy="pass delta, such as 0.05")
    tested: list[Tested] = []
    for strength in strengths:
        outcome = test(strength)
        tested.append(replace(outcome, passed=bool(outcome.p_value <= level)))  # NaN fails
        if not tested[-1].passed:
            break
    return tested


def largest(tested: Sequence[Tested]) -> float | None:
    """Returns the last strength before the first failure; None when the first failed."""
    passed = list(itertools.takewhile(lambda outcome: outcome.passed, tested))
    return passed[-1].strength if passed else None


def assess(rows: Rows, terms: Terms) -> Assessment:
    """Returns the fields of a certificate that follow from its table, which must fit the kind of certificate."""
    if len(rows.ids) == 0:
        raise _unfit("it has no rows")
    if (terms.kind == "strength") == bool(np.isnan(rows.strength).any()):
        raise _unfit("strengths are given where there should be none, or missing")
    return {
        "categories": None, "strength": None, "sequential": None, "e_value": None, "certified_tau": None,
        "level": terms.level, "examples": len(rows.ids), "drawn": terms.drawn, "max_weight": terms.max_weight,
        **_KINDS[terms.kind](rows, terms),
    }  # fmt: skip


def _figures(test: ShareTest, said: str) -> KindFigures:
    return {
        "certified": test.certified, "statement": said, "n": test.unit.n, "regressions": test.unit.regressions,
        "p_value": test.p_value, "upper_bound": test.upper_bound, "e_value": test.e_value,
        "groups": test.groups.to_json(), "rows": test.rows.to_json(),
    }  # fmt: skip


def _fixed(rows: Rows, terms: Terms) -> KindFigures:
    test = terms.test(rows)
    tau = smallest_tau(rows.degradation, lambda value: terms.test(rows, value).certified)
    said = statement(test, terms.said, terms.openings, terms.claims)
    return {**_figures(test, said), "certified_tau": tau}


def _finite_pool(rows: Rows, terms: Terms) -> KindFigures:
    if terms.pool is None:
        raise _unfit("a finite pool has no size")
    n, groups = len(rows.ids), _counts(rows, terms)[0]

    def made(tau: float) -> Certificate:
        k = int(np.count_nonzero(rows.regressed(tau)))
        return certify_counts(k, n, terms.alpha, terms.confidence, openings=terms.parts, pool=terms.pool)

    test = made(terms.tau)
    return {
        "certified": test.certified, "statement": test.sentence(terms.said.regress), "n": n,
        "regressions": test.regressions, "upper_bound": test.upper_bound, "p_value": test.p_value,
        "groups": groups.to_json(),
        "rows": Counted(n, test.regressions, test.p_value, test.upper_bound).to_json(),
        "certified_tau": smallest_tau(rows.degradation, lambda tau: made(tau).certified),
    }  # fmt: skip


def _sequential(rows: Rows, terms: Terms) -> KindFigures:
    if terms.drawn == "groups" and len(set(rows.cluster.tolist())) != len(rows.ids):
        raise _unfit("a sequence holds near-duplicates")
    process = EProcess(terms.alpha, terms.confidence, parts=terms.parts)
    process.update_many(rows.regressed(terms.tau))
    (groups, prompts), said = _counts(rows, terms), terms.claim()
    at, counts = f"{terms.confident} at every look", terms.counts(groups, prompts)
    exceeded = process.regressions > exact(terms.alpha) * process.n
    if process.certified and not exceeded:
        text = f"{at}, {said} (shown after {process.certified_at} prompts; {counts})."
    elif process.certified:
        text = (
            f"Not certified: that {said} was shown after {process.certified_at} prompts, but more than that do by now "
            f"({counts}); the order or the source may have changed."
        )
    else:
        text = f"Not certified yet: that {said} is not shown ({counts}); more prompts may be added at the end."
    return {
        "certified": process.certified and not exceeded, "statement": text, "n": process.n,
        "regressions": process.regressions, "upper_bound": process.upper_bound(kept=not exceeded), "p_value": None,
        "e_value": min(process.e_value, sys.float_info.max), "sequential": process.to_json(),
        "groups": groups.to_json(), "rows": prompts.to_json(),
    }  # fmt: skip


def _per_category(rows: Rows, terms: Terms) -> KindFigures:
    if any(name is None for name in rows.category):
        raise _unfit("prompts without a category")
    labels = np.array(rows.category, dtype=object)
    pieces = {name: rows.at(np.flatnonzero(labels == name).tolist()) for name in sorted(set(labels))}
    verdicts = certify_categories(
        {name: (piece.regressed(terms.tau), piece.cluster) for name, piece in pieces.items()},
        terms.alpha, terms.confidence, openings=terms.parts, drawn=terms.drawn, max_weight=terms.max_weight,
    )  # fmt: skip
    passed = sum(verdict.certified for verdict in verdicts.values())
    certified = passed == len(verdicts)
    groups, prompts = _counts(rows, terms)
    unit = prompts if terms.drawn == "rows" else groups
    said = terms.claim(replace(terms.said, source=f"{terms.said.source} in each of {len(verdicts)} categories"))
    at = f"{terms.confident} for all categories together"
    failed = f"Not certified: that {said} is not shown ({passed} of {len(verdicts)} categories are certified)."
    return {
        "certified": certified, "statement": f"{at}, {said}." if certified else failed,
        "n": unit.n, "regressions": unit.regressions, "groups": groups.to_json(), "rows": prompts.to_json(),
        "upper_bound": max(verdict.upper_bound for verdict in verdicts.values()),
        "p_value": max(verdict.adjusted_p for verdict in verdicts.values()),
        "categories": {name: verdict.to_json() for name, verdict in verdicts.items()},
    }  # fmt: skip


def _strength(rows: Rows, terms: Terms) -> KindFigures:
    measured = list(dict.fromkeys(rows.strength.tolist()))
    if tuple(measured) != STRENGTHS[: len(measured)]:
        raise _unfit("the strengths are not those of the fixed sequence")
    places = {strength: np.flatnonzero(rows.strength == strength).tolist() for strength in measured}
    tests = {strength: terms.test(rows.at(where)) for strength, where in places.items()}
    tested = fixed_sequence(measured, lambda strength: _tested(strength, tests[strength]), terms.level)
    if len(tested) != len(measured) or (tested[-1].passed and len(tested) < len(STRENGTHS)):
        raise _unfit("the strengths do not end at the first failure")
    chosen = largest(tested)
    shown = tests[tested[-1].strength if chosen is None else chosen]
    # A bound that allows for the choice of the strength (Hsu and Berger 1999): after a failure nothing sharper than
    # alpha holds for the strengths before it; when all passed, the largest bound.
    stopped = chosen is not None and not tested[-1].passed
    bound = terms.alpha if stopped else max(test.upper_bound for test in tests.values())
    said, counts = terms.claim(), terms.counts(shown.groups, shown.rows)
    if chosen is None:
        text = f"Not certified: not even at strength {tested[-1].strength:g} is it shown that {said} ({counts})."
    else:
        text = f"{terms.confident}, at adapter strength {chosen:g}, the largest that passed, {said} ({counts})."
    return {
        **_figures(shown, text), "certified": chosen is not None, "upper_bound": bound,
        "examples": len(places[measured[0]]),
        "strength": {"chosen": chosen, "tested": [outcome.to_json() for outcome in tested]},
    }  # fmt: skip


def tested_at(rows: Rows, strength: float, terms: Terms) -> Tested:
    """Returns the test at one strength, on the rows measured at it."""
    return _tested(strength, terms.test(rows))


def _tested(strength: float, test: ShareTest) -> Tested:
    return Tested(strength, test.unit.regressions, test.unit.n, test.p_value)


def smallest_tau(degradations: NDArray[np.float64], certifies: Callable[[float], bool]) -> float | None:
    """Returns the smallest tau at which a test certifies; None where no finite degradation will do.

    Regressions fall as tau grows, and only at the degradations themselves; so the smallest tau is one of these, and
    bisection over them finds it for any test that one regression more never lets certify. For the exact binomial test
    it is D_(r), r the smallest rank with P(Bin(n, 1 - alpha) <= r - 1) >= 1 - delta.
    """
    values = np.unique(degradations)
    finite = values[np.isfinite(values)].tolist()
    place = bisect_left(finite, True, key=certifies)
    return finite[place] if place < len(finite) else None


def _counts(rows: Rows, terms: Terms) -> tuple[Counted, Counted]:
    sizes, bad = grouped(rows.regressed(terms.tau), rows.cluster)
    return Counted(len(bad), int(np.count_nonzero(bad))), Counted(int(sizes.sum()), int(bad.sum()))


def _unfit(what: str) -> CheckpointError:
    return CheckpointError(f"the certificate's table does not fit it: {what}", remedy="restore it, or certify again")


_KINDS: dict[str, Callable[[Rows, Terms], KindFigures]] = {
    "fixed": _fixed, "finite_pool": _finite_pool, "sequential": _sequential, "per_category": _per_category,
    "strength": _strength,
}  # fmt: skip
