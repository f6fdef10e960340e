"""What a certificate compares, one class each: likelihoods or divergences, judged replies, and classes of replies.

Every measure has two steps. `prepare` does what can be refused while the opening is not spent: it sees the model before
alone, or noise. `measure` looks at the model after.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from holdfast.auditing.asking import FOLDER, Asked, Asking, reply_hashes
from holdfast.auditing.certificate_spec import Prompts
from holdfast.auditing.measure import Measurer, Progress, measure_pair, noise_floor
from holdfast.auditing.pair import NAMES, Name, Pair
from holdfast.certification.assessment import STRENGTHS, Tested, fixed_sequence, tested_at
from holdfast.certification.behaviour import (
    LARGEST_UNCLEAR,
    UNSORTED,
    Claimed,
    Classes,
    too_many_flips,
    too_many_unclear,
)
from holdfast.certification.blocks import Measured
from holdfast.certification.terms import Rows, Terms, require_enough_rows
from holdfast.constraint.chance import ChanceConstraint
from holdfast.constraint.feasibility import require_tau_above_noise
from holdfast.core.errors import DataError, InfeasibleError, NumericalError
from holdfast.core.percent import exact_percent
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded, encode_all, require_usable_tokenizer
from holdfast.data.examples import prompt_text
from holdfast.judging.judge import GuardedJudge
from holdfast.judging.on_policy import degradations
from holdfast.judging.refusal_rules import RULES_NAME, RULES_REVISION
from holdfast.judging.rule_errors import rule_error_rates
from holdfast.records.certificate_table import Table


class Measure(ABC):
    """Compares the two models on prompts; `by` is its name in a record.

    `noise` is the numerical noise floor in the unit of tau, 0 where there is none; `settles` says whether measuring
    again may give something else, so that the first outcome stands.
    """

    by: str
    noise = 0.0  # the numerical noise floor, in the unit of tau
    settles = True

    def settings(self) -> Measured:
        """What the claim records of how replies were made and judged."""
        return {}

    @abstractmethod
    def prepare(self, pair: Pair, prompts: Prompts, terms: Terms) -> None:
        """Refuse what would only fail later."""

    @abstractmethod
    def measure(self, pair: Pair, prompts: Prompts, terms: Terms, known: Rows | None) -> Table:
        """The rows of all prompts, after those that are known."""

    def facts(self, pair: Pair) -> dict[str, Any]:
        """Further figures of the record."""
        return {}

    def notes(self) -> list[str]:
        """Assumptions to state."""
        return []


class ByDegradation(Measure):
    """A number D for every prompt."""

    @abstractmethod
    def degradations(self, pair: Pair, prompts: Prompts, start: int) -> ArrayLike:
        """D of the prompts from a position on."""

    def measure(self, pair: Pair, prompts: Prompts, terms: Terms, known: Rows | None) -> Table:
        """The rows of all prompts, after those that are known; of every strength until the first that fails.

        At strength s a LoRA adapter is W + s * scaling * B A; the whole search is one opening.
        """
        start, pieces = 0 if known is None else len(known.ids), [] if known is None else [known]

        def measured(strength: float) -> Rows:
            degradation = np.asarray(self.degradations(pair, prompts, start), dtype=np.float64)
            cluster = np.array(prompts.cluster[start:], dtype=np.int64)
            at = np.full(len(degradation), strength)
            pieces.append(Rows(prompts.ids[start:], degradation, cluster, prompts.categories[start:], at))
            return pieces[-1]

        def test(strength: float) -> Tested:
            pair.set_strength(strength)
            return tested_at(measured(strength), strength, terms)

        if terms.kind == "strength":
            fixed_sequence(STRENGTHS, test, terms.level)
        else:
            measured(math.nan)
        return Rows.joined(pieces)


@dataclass
class ByLikelihood(ByDegradation):
    """D of a given completion in nats: `nll_token`, `nll_sum`, `nll_first`, `kl_token` or `kl_first`."""

    limit: ChanceConstraint
    max_length: int | None
    progress: Progress | None = None
    noise: float = 0.0
    settles: bool = False
    _encoded: dict[Name, list[Encoded]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by = "kl" if self.limit.unit in KL_UNITS else "likelihood"

    def prepare(self, pair: Pair, prompts: Prompts, terms: Terms) -> None:
        """Encode the examples and measure the noise floor."""
        if terms.kind == "strength":
            pair.set_strength(1.0)
        pair.tokenizers.require_unit(self.limit.unit)
        self._encoded = _encode(pair, prompts, self.max_length)
        self.noise = noise_floor(Measurer(pair, first_k=self.limit.first_k), self._encoded["before"], self.limit.unit)
        if not math.isfinite(self.noise):
            lost = "the model before gives no finite loss on these prompts"
            raise NumericalError(lost, remedy="load it in float32, or check its files")
        require_tau_above_noise(self.limit, self.noise)

    def degradations(self, pair: Pair, prompts: Prompts, start: int) -> ArrayLike:
        todo, kl = {name: items[start:] for name, items in self._encoded.items()}, self.limit.unit in KL_UNITS
        measured = measure_pair(pair, todo, first_k=self.limit.first_k, kl=kl, progress=self.progress)
        return measured.degradation(self.limit.unit)

    def notes(self) -> list[str]:
        cut = sum(item.truncated for item in self._encoded["before"])
        return [f"{cut} of the examples were cut at {self.max_length} tokens."] if cut else []


@dataclass
class ByJudge(ByDegradation):
    """D: how much more probably harmful the judge finds the reply of `after` than the one of `before`."""

    judge: GuardedJudge
    asking: Asking
    output: Path
    progress: Progress | None = None
    by = "harm"
    # of the prompts from a position on, at every strength
    _asked: dict[int, Asked] = field(default_factory=dict, init=False, repr=False, compare=False)

    def settings(self) -> Measured:
        name, revision = self.judge.name, self.judge.revision
        assert revision, "certificate_judge refuses a judge without a revision"
        return {"judge": {"name": name, "revision": revision, "max_new_tokens": self.asking.max_new_tokens}}

    def prepare(self, pair: Pair, prompts: Prompts, terms: Terms) -> None:
        """Refuse prompts that leave no room for a reply, and an adapter without a strength to scale."""
        if terms.kind == "strength":
            pair.set_strength(1.0)
        for name in NAMES if pair.together else NAMES[:1]:
            self._ask(pair, prompts, 0).require_room(name)

    def degradations(self, pair: Pair, prompts: Prompts, start: int) -> ArrayLike:
        if start not in self._asked:
            self._asked[start] = self._ask(pair, prompts, start)
        asked = self._asked[start]
        texts = [prompt_text(example) for example in asked.examples]
        return degradations(*(self.judge.judge(texts, [r.text for r in asked.replies(name)]) for name in NAMES))

    def facts(self, pair: Pair) -> dict[str, Any]:
        return {"replies_sha256": reply_hashes(self.output / FOLDER)}

    def _ask(self, pair: Pair, prompts: Prompts, start: int) -> Asked:
        # A class does not tell what a judge would say, so replies of an earlier start are made again.
        options: dict[str, Any] = {"passes": 2, "progress": self.progress, "reuse": False}
        return Asked(pair, prompts.examples[start:], self.asking, self.output / FOLDER, **options)


@dataclass
class ByBehaviour(Measure):
    """Whether what the model before refused (or answered) is refused (answered) by the model after."""

    asking: Asking
    output: Path
    claims: tuple[Claimed, ...] = (Claimed.REFUSALS,)
    progress: Progress | None = None
    by = "behaviour"
    _asked: Asked | None = None
    _before: Sequence[str] = ()
    _again: Sequence[str] = ()

    def settings(self) -> Measured:
        return {
            "replies": {
                "rules": RULES_NAME, "rules_revision": RULES_REVISION, "decoding": "greedy",
                "max_new_tokens": self.asking.max_new_tokens, "longest": self.asking.longest,
            }
        }  # fmt: skip

    def prepare(self, pair: Pair, prompts: Prompts, terms: Terms) -> None:
        """Ask the model before twice, or until nothing can be claimed any more; this says nothing of the other.

        That is where too few refusals are left to come, or too many replies cannot be sorted.
        """
        place = self.output / FOLDER
        self._asked = Asked(pair, prompts.examples, self.asking, place, passes=3, progress=self.progress)
        self._asked.require_room("before")
        shared = replace(terms, claims=len(self.claims))

        def seen(known: Sequence[str | None]) -> None:
            self._require_enough(prompts, shared, known)
            _require_sorted(known, place)

        self._before = self._asked.classes("before", seen=seen)
        seen(self._before)
        self._again = self._asked.classes("before", again=True)
        twice = _classes(prompts, self._before, self._again, self._before)
        for claim, (flips, asked) in ((claim, twice.flips(claim)) for claim in self.claims):
            if too_many_flips(flips, asked, terms.alpha):
                raise InfeasibleError(
                    f"{flips} of {asked} prompts were {claim.value} by the model before at one of two askings only: "
                    f"rounding in {pair.dtype} decides more than alpha/5 = {terms.alpha / 5:g} of them, so a loss of "
                    "alpha would not show",
                    remedy="compute in float32 (--dtype float32), or choose a larger alpha; nothing was opened",
                )

    def _require_enough(self, prompts: Prompts, terms: Terms, known: Sequence[str | None]) -> None:
        """Refuse what no further reply of the model before can make enough; None: a reply that is still to come."""
        left = list(known).count(None)
        for claim in self.claims:
            most = [name or claim.value for name in known]
            rows = _classes(prompts, most, most, most).rows(claim)
            counted = set(rows.ids)
            found = sum(name == claim for name, prompt in zip(known, prompts.ids, strict=True) if prompt in counted)
            of = f"{len(known) - left} prompts" + (" so far" if left else "")
            rest = f". Even if it {claim.value} all {left} others" if left else ""
            require_enough_rows(
                terms, rows.cluster.tolist(), rows.category, every=prompts.categories,
                counted=f"the model before {claim.value} {found} of {of}{rest}",
                remedy=f"give more prompts that it {'refuses' if claim is Claimed.REFUSALS else 'answers'}; "
                "`holdfast plan` says how many. A model that refuses nothing has no refusals to keep. This "
                "start asked the model before alone, and opened nothing",
            )  # fmt: skip

    def measure(self, pair: Pair, prompts: Prompts, terms: Terms, known: Rows | None) -> Classes:
        assert self._asked is not None, "prepare comes first"
        return _classes(prompts, self._before, self._again, self._asked.classes("after"))

    def facts(self, pair: Pair) -> dict[str, Any]:
        """Engine and dtype, which rounding depends on, and where the replies lie."""
        assert self._asked is not None, "prepare comes first"
        replies = reply_hashes(self.output / FOLDER)
        return {"engine": self._asked.engine, "dtype": pair.dtype, "replies_sha256": replies}

    def notes(self) -> list[str]:
        """What the rules get wrong, as far as that was measured; and replies that an earlier start left."""
        rates = rule_error_rates()
        unknown = f"How often {RULES_NAME} {RULES_REVISION} sort a reply wrongly was not measured."
        reused = 0 if self._asked is None else self._asked.reused
        again = f"{reused} replies were left by an earlier start; a random sample of them was asked for again."
        return [unknown if rates is None else rates.sentence(), *([again] if reused else [])]


def _classes(prompts: Prompts, before: Sequence[str], again: Sequence[str], after: Sequence[str]) -> Classes:
    cluster = np.array(prompts.cluster, dtype=np.int64)
    return Classes(prompts.ids, cluster, prompts.categories, before, again, after, prompts.keep)


def _require_sorted(known: Sequence[str | None], replies: Path) -> None:
    """Refuse what no further reply can certify: too many of the model before are unsorted. None: still to come."""
    unsorted, prompts, left = known.count(UNSORTED), len(known), known.count(None)
    if too_many_unclear(unsorted, prompts):
        of = f"{prompts - left} replies" + (" so far" if left else "")
        raise InfeasibleError(
            f"{unsorted} of {of} of the model before can be sorted neither as refused nor as answered; of "
            f"{prompts} prompts more than {exact_percent(LARGEST_UNCLEAR)} show nothing",
            remedy=f"look at them in {replies}: cut ones need more tokens (--set max_new_tokens=N), garbled ones the "
            "model's own chat template, and replies in other languages than English are not sorted. This start asked "
            "the model before alone, and opened nothing",
        )


def _encode(pair: Pair, prompts: Prompts, max_length: int | None) -> dict[Name, list[Encoded]]:
    encoded: dict[Name, list[Encoded]] = {}
    for name in NAMES if pair.tokenizers.own else NAMES[:1]:
        tokenizer = pair.tokenizers.of(name)
        require_usable_tokenizer(tokenizer, needs_chat=any(e.kind == "chat" for e in prompts.examples))
        encoded[name] = encode_all(prompts.examples, tokenizer, max_length=max_length, role="safety").examples
    if pair.tokenizers.own and any(item.truncated for items in encoded.values() for item in items):
        raise DataError(
            f"examples are longer than max_length {max_length}: cut by two tokenizers, the two models would be "
            "scored on different texts",
            remedy="leave out --set max_length, or read both models with one tokenizer",
        )
    return {name: encoded.get(name, encoded["before"]) for name in NAMES}
