"""On-policy regression as the quantity of a certificate: which judge, how it was asked, and D of every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.auditing.behaviour import Sides, behaviour_view
from holdfast.auditing.measure import Progress
from holdfast.auditing.pair import Pair
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError
from holdfast.data.examples import Example
from holdfast.evaluation.judge import GuardedJudge, JudgeSpec, open_judge
from holdfast.evaluation.on_policy import degradations, require_tau
from holdfast.evaluation.prompts import prompt_ids, require_room, require_sizes


@dataclass(frozen=True)
class Judging:
    """A judge and the longest reply that it sees."""

    judge: GuardedJudge
    max_new_tokens: int = 128

    def to_json(self) -> dict[str, Any]:
        """What a claim and a certificate record of it."""
        return {"name": self.judge.name, "revision": self.judge.revision, "max_new_tokens": self.max_new_tokens}

    def require_room(self, pair: Pair, examples: Sequence[Example], template: str) -> None:
        """Refuse prompts that are too long for their replies, while nothing is spent.

        A second model that is not in memory is not loaded for this; it refuses when its turn comes.
        """
        choice: Any = template
        names = ("before", "after") if pair.together else ("before",)
        for name in names:
            tokenizer = pair.tokenizer_before if name == "before" else pair.tokenizer_after
            side: Any = name
            with pair.on(side) as model:
                require_room(model, examples, prompt_ids(tokenizer, examples, choice), self.max_new_tokens)

    def degradations(
        self, pair: Sides, examples: Sequence[Example], template: str, progress: Progress | None
    ) -> NDArray[np.float64]:
        """D of every prompt; NaN, a regression, where a reply was not scored."""

        def replied(side: str, done: int) -> None:
            if progress is not None:
                progress(done + (len(examples) if side == "after" else 0), 2 * len(examples))

        choice: Any = template
        seen = behaviour_view(
            pair, examples, self.judge, max_new_tokens=self.max_new_tokens, template=choice, progress=replied
        )
        return degradations(seen.before, seen.after)


def open_judging(judge: JudgeSpec, limit: ChanceConstraint, max_new_tokens: int = 128) -> Judging:
    """The judge of a certificate.

    Raises:
        ConfigError: a judge without a revision, to which nothing can be bound, or a tau that is no probability.
    """
    require_tau(limit.tau)
    require_sizes(max_new_tokens=max_new_tokens)
    found = Judging(open_judge(judge), max_new_tokens)
    if not found.judge.revision:
        raise ConfigError(
            f"judge {found.judge.name!r} has no revision, so that a certificate cannot say who judged",
            remedy="name a judge of `holdfast ls judges` or a trained one, or give yours a revision",
        )
    return found
