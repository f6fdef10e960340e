"""What a certificate compares, one class each: likelihoods or divergences, judged replies, and classes of replies.

Every measure has two steps. `prepare` does what can be refused while the opening is not spent: it sees the model before
alone, or noise. `measure` looks at the model after.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from holdfast.auditing.asking import FOLDER, Asked, Asking
from holdfast.auditing.certify_prompts import Prompts, units_per_category
from holdfast.auditing.judging import Judging
from holdfast.auditing.measure import Progress, measure_pair
from holdfast.auditing.noise import noise_floor
from holdfast.auditing.pair import Name, Pair
from holdfast.auditing.strength import search_strength
from holdfast.certification.behaviour import Claimed, Classes, too_many_flips
from holdfast.certification.enough import require_enough
from holdfast.certification.terms import Rows, Terms
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import DataError, InfeasibleError, NumericalError, UnsupportedError
from holdfast.data.encode import Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import prompt_text
from holdfast.evaluation.on_policy import degradations
from holdfast.evaluation.refusal_rules import RULES_NAME, RULES_REVISION
from holdfast.evaluation.rule_errors import rule_error_rates
from holdfast.records.certificate_table import Table


class Measure(Protocol):
    """Compares the two models on prompts.

    Attributes:
        by: its name in a record.
        noise: the numerical noise floor in the unit of tau; 0 where there is none.
        settles: whether measuring again may give something else, so that the first outcome stands.
    """

    noise: float
    settles: bool

    @property
    def by(self) -> str: ...

    def settings(self) -> dict[str, Any]:
        """What the claim records of how replies were made and judged."""
        ...

    def prepare(self, pair: Pair, prompts: Prompts, terms: Terms) -> None:
        """Refuse what would only fail later."""
        ...

    def measure(self, pair: Pair, prompts: Prompts, terms: Terms, known: Rows | None) -> Table:
        """The rows of all prompts, after those that are known."""
        ...

    def facts(self, pair: Pair) -> dict[str, Any]:
        """Further figures of the record."""
        ...

    def notes(self) -> list[str]:
        """Assumptions to state."""
        ...


@dataclass
class ByLikelihood:
    """D of a given completion in nats: `nll_token`, `nll_sum`, `nll_first`, or `kl_token`."""

    limit: ChanceConstraint
    max_length: int | None
    progress: Progress | None = None
    noise: float = 0.0
    settles: bool = False
    _encoded: dict[Name, list[Encoded]] = field(default_factory=dict)

    @property
    def by(self) -> str:
        """`kl` or `likelihood`."""
        return "kl" if self.limit.unit == "kl_token" else "likelihood"

    def settings(self) -> dict[str, Any]:
        """Nothing: no reply was made."""
        return {}

    def prepare(self, pair: Pair, prompts: Prompts, terms: Terms) -> None:
        """Encode the examples and measure the noise floor.

        Raises:
            UnsupportedError: no strength to scale, or a unit that is not defined for this pair.
            InfeasibleError: tau lies inside the noise.
        """
        if terms.kind == "strength":
            pair.set_strength(1.0)
        if pair.tokenizers.own and self.limit.unit != "nll_sum":
            raise UnsupportedError(
                f"unit {self.limit.unit!r} is not defined across tokenizers: it is counted in tokens",
                remedy="use unit nll_sum, or read both models with one tokenizer",
            )
        self._encoded = _encode(pair, prompts, self.max_length)
        self.noise = noise_floor(pair, self._encoded["before"], self.limit.unit, first_k=self.limit.first_k)
        if not math.isfinite(self.noise):
            raise NumericalError(
                "the model before gives no finite loss on these prompts",
                remedy="load it in float32, or check its files",
            )
        self.limit.require_tau_above_noise(self.noise)

    def measure(self, pair: Pair, prompts: Prompts, terms: Terms, known: Rows | None) -> Rows:
        """Degradations of the prompts that are not known yet, after those that are."""
        start = 0 if known is None else len(known.ids)
        todo = {name: items[start:] for name, items in self._encoded.items()}
        unit, first_k = self.limit.unit, self.limit.first_k

        def measured() -> Rows:
            found = measure_pair(pair, todo, first_k=first_k, kl=unit == "kl_token", progress=self.progress)
            return _rows(prompts, start, found.degradation(unit))

        if terms.kind == "strength":
            return search_strength(pair, measured, terms)
        return measured() if known is None else Rows.joined([known, measured()])

    def facts(self, pair: Pair) -> dict[str, Any]:
        """Nothing further."""
        return {}

    def notes(self) -> list[str]:
        """How many examples were cut."""
        cut = sum(item.truncated for item in self._encoded["before"])
        return [f"{cut} of the examples were cut at {self.max_length} tokens."] if cut else []


@dataclass
class ByJudge:
    """D: how much more probably harmful the judge finds the reply of `after` than the one of `before`."""

    judging: Judging
    asking: Asking
    output: Path
    progress: Progress | None = None
    noise: float = 0.0
    settles: bool = True
    _last: Asked | None = None

    @property
    def by(self) -> str:
        """`harm`."""
        return "harm"

    def settings(self) -> dict[str, Any]:
        """The judge and the longest reply."""
        return {"judge": self.judging.to_json()}

    def prepare(self, pair: Pair, prompts: Prompts, terms: Terms) -> None:
        """Refuse prompts that leave no room for a reply, and an adapter without a strength to scale."""
        if terms.kind == "strength":
            pair.set_strength(1.0)
        for name in ("before", "after"):
            side: Any = name
            if side == "before" or pair.together:
                self._asked(pair, prompts, 0).require_room(side)

    def measure(self, pair: Pair, prompts: Prompts, terms: Terms, known: Rows | None) -> Rows:
        """Both models reply, both replies are judged."""
        start = 0 if known is None else len(known.ids)
        asked, judge = self._asked(pair, prompts, start), self.judging.judge
        texts = [prompt_text(example) for example in asked.examples]

        def measured() -> Rows:
            before = judge.judge(texts, [reply.text for reply in asked.replies("before")])
            after = judge.judge(texts, [reply.text for reply in asked.replies("after")])
            return _rows(prompts, start, degradations(before, after))

        if terms.kind == "strength":
            return search_strength(pair, measured, terms)
        return measured() if known is None else Rows.joined([known, measured()])

    def facts(self, pair: Pair) -> dict[str, Any]:
        """Where the replies lie."""
        assert self._last is not None, "prepare comes first"
        return {"replies_sha256": self._last.stored()}

    def notes(self) -> list[str]:
        """Nothing further."""
        return []

    def _asked(self, pair: Pair, prompts: Prompts, start: int) -> Asked:
        place = self.output / FOLDER
        # A class does not tell what a judge would say, so replies of an earlier start are made again.
        self._last = Asked(
            pair, prompts.examples[start:], self.asking, place, passes=2, progress=self.progress, reuse=False
        )
        return self._last


@dataclass
class ByBehaviour:
    """Whether what the model before refused (or answered) is refused (answered) by the model after."""

    asking: Asking
    output: Path
    claims: tuple[Claimed, ...] = (Claimed.REFUSALS,)
    progress: Progress | None = None
    noise: float = 0.0
    settles: bool = True
    _asked: Asked | None = None
    _before: Sequence[str] = ()
    _again: Sequence[str] = ()

    @property
    def by(self) -> str:
        """`behaviour`."""
        return "behaviour"

    def settings(self) -> dict[str, Any]:
        """The rules and the longest reply."""
        return {
            "replies": {
                "rules": RULES_NAME, "rules_revision": RULES_REVISION, "decoding": "greedy",
                "max_new_tokens": self.asking.max_new_tokens, "longest": self.asking.longest,
            }
        }  # fmt: skip

    def prepare(self, pair: Pair, prompts: Prompts, terms: Terms) -> None:
        """Ask the model before twice; nothing is known of the model after by that.

        Raises:
            InfeasibleError: it refuses too little, or its replies change with the batch they are made in.
        """
        place = self.output / FOLDER
        self._asked = Asked(pair, prompts.examples, self.asking, place, passes=3, progress=self.progress)
        self._asked.require_room("before")
        self._before = self._asked.classes("before")
        self._again = self._asked.classes("before", again=True)
        classes = self._classes(prompts, self._before)
        for claim in self.claims:
            _require_counted(classes, claim, replace(terms, claims=len(self.claims)))
            _require_steady(classes, claim, terms.alpha, pair)

    def measure(self, pair: Pair, prompts: Prompts, terms: Terms, known: Rows | None) -> Classes:
        """The classes of both models' replies."""
        assert self._asked is not None, "prepare comes first"
        return self._classes(prompts, self._asked.classes("after"))

    def facts(self, pair: Pair) -> dict[str, Any]:
        """Engine and dtype, which rounding depends on, and where the replies lie."""
        assert self._asked is not None, "prepare comes first"
        return {"engine": self._asked.engine, "dtype": pair.dtype, "replies_sha256": self._asked.stored()}

    def notes(self) -> list[str]:
        """What the rules get wrong, as far as that was measured."""
        found = rule_error_rates()
        unknown = f"How often {RULES_NAME} {RULES_REVISION} sort a reply wrongly was not measured."
        return [unknown if found is None else found.sentence(), *_found(self._asked)]

    def _classes(self, prompts: Prompts, after: Sequence[str]) -> Classes:
        return Classes(
            prompts.ids, np.array(prompts.cluster, dtype=np.int64), prompts.categories, self._before, self._again,
            after, prompts.keep,
        )  # fmt: skip


def _found(asked: Asked | None) -> list[str]:
    """A note of replies that an earlier start left."""
    if asked is None or asked.found == 0:
        return []
    return [f"{asked.found} replies were left by an earlier start; a random sample of them was asked for again."]


def _require_counted(classes: Classes, claim: Claimed, terms: Terms) -> None:
    """Refuse a model that refuses (or answers) too little to show anything."""
    rows = classes.rows(claim)
    groups = len(set(rows.cluster.tolist()))
    try:
        labels = rows.cluster.tolist()
        per_category = None
        if terms.kind == "per_category":  # a category without a refusal certifies nothing, and must not be left out
            none = dict.fromkeys(map(str, classes.category), 0)
            per_category = none | units_per_category(rows.category, labels, terms.drawn)
        sizes = list(Counter(labels).values())
        require_enough(terms, len(rows.ids) if terms.drawn == "rows" else groups, per_category, sizes=sizes)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"the model before {claim.value} {len(rows.ids)} of {len(classes.ids)} prompts, in {groups} groups of "
            f"near-duplicates: {error.what}",
            remedy="give more prompts that it "
            + ("refuses" if claim is Claimed.REFUSALS else "answers")
            + "; `holdfast plan` says how many. A model that refuses nothing has no refusals to keep",
        ) from error


def _require_steady(classes: Classes, claim: Claimed, alpha: float, pair: Pair) -> None:
    flips, asked = classes.flips(claim)
    if too_many_flips(flips, asked, alpha):
        raise InfeasibleError(
            f"{flips} of {asked} prompts were {claim.value} by the model before at one of two askings only: rounding "
            f"in {pair.dtype} decides more than alpha/5 = {alpha / 5:g} of them, so a loss of alpha would not be told",
            remedy="compute in float32 (--dtype float32), or choose a larger alpha; nothing was opened",
        )


def _rows(prompts: Prompts, start: int, degradation: Any) -> Rows:
    return Rows(
        ids=prompts.ids[start:],
        degradation=np.asarray(degradation, dtype=np.float64),
        cluster=np.array(prompts.cluster[start:], dtype=np.int64),
        category=prompts.categories[start:],
        strength=np.full(len(prompts.ids) - start, np.nan),
    )


def _encode(pair: Pair, prompts: Prompts, max_length: int | None) -> dict[Name, list[Encoded]]:
    """The prompts as each side reads them."""
    found: dict[Name, list[Encoded]] = {}
    tokenizers: dict[Name, object] = {"before": pair.tokenizers.before, "after": pair.tokenizers.after}
    for name, tokenizer in tokenizers.items():
        require_usable_tokenizer(tokenizer, needs_chat=any(e.kind == "chat" for e in prompts.examples))
        same = name == "after" and not pair.tokenizers.own
        found[name] = (
            found["before"]
            if same
            else encode_all(prompts.examples, tokenizer, max_length=max_length, role="safety").examples
        )
    if pair.tokenizers.own and any(item.truncated for items in found.values() for item in items):
        raise DataError(
            f"examples are longer than max_length {max_length}: cut by two tokenizers, the two models would be "
            "scored on different texts",
            remedy="leave out --set max_length, or read both models with one tokenizer",
        )
    return found
