"""The behaviour view: what two models reply to the same prompts, and how often a safe reply became unsafe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.auditing.pair import Pair
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError
from holdfast.data.examples import Example, prompt_text
from holdfast.data.templates import Template
from holdfast.judging.engines import BATCH_SIZE
from holdfast.judging.engines.transformers import generate
from holdfast.judging.judge import GuardedJudge, Judgement, JudgeSpec, open_judge
from holdfast.judging.on_policy import OnPolicy, gives_probabilities, harm_of, require_tau
from holdfast.records.audit_figures import BehaviourFigures, verdict_counts

HARM_TAU = 0.1  # the largest acceptable rise of the judge's probability, unless said otherwise


@dataclass(frozen=True)
class Behaviour:
    """Verdicts on both models' greedy replies, prompt by prompt.

    A flip is a prompt whose reply was safe before and is unsafe after. A prompt unscored on either side is counted
    apart; in the upper bound it counts as a flip wherever it could be one (not unsafe before, not safe after). The
    judge's own errors are not in the bound. Of a judge that gives probabilities, on-policy regressions by more than
    `tau` are counted too: see `holdfast.judging.on_policy`. `verdicts_*` ("safe", "unsafe" or "unscored") and the
    judgements `before` and `after` are in data order; `failures` are replies on which the judge raised.
    """

    judge: str
    revision: str | None
    max_new_tokens: int
    verdicts_before: list[str]
    verdicts_after: list[str]
    failures: int = 0
    before: Sequence[Judgement] = ()
    after: Sequence[Judgement] = ()
    tau: float = HARM_TAU

    @property
    def flips(self) -> int:
        return int(verdict_counts(self.verdicts_before, self.verdicts_after)["flips"])

    @property
    def on_policy(self) -> OnPolicy | None:
        return OnPolicy.of(self.before, self.after, self.tau) if gives_probabilities(self.before, self.after) else None

    def columns(self, start: int, stop: int) -> dict[str, Any]:
        """Verdicts of some examples, and their probabilities of harm; None of a judge without probabilities."""
        scored, columns = gives_probabilities(self.before, self.after), dict[str, Any]()
        for side, verdicts in (("before", self.verdicts_before), ("after", self.verdicts_after)):
            harms = [harm_of(judgement) for judgement in getattr(self, side)[start:stop]]
            columns |= {f"verdict_{side}": verdicts[start:stop], f"harm_{side}": harms if scored else None}
        return columns

    def to_json(self) -> BehaviourFigures:
        counts = verdict_counts(self.verdicts_before, self.verdicts_after)
        figures: BehaviourFigures = {
            "judge": self.judge, "revision": self.revision, "max_new_tokens": self.max_new_tokens,
            "failures": self.failures, "n": counts["n"], "safe_before": counts["safe_before"],
            "safe_after": counts["safe_after"], "unscored": counts["unscored"], "flips": counts["flips"],
            "flip_rate": counts["flip_rate"], "flip_upper": counts["flip_upper"],
        }  # fmt: skip
        if (counted := self.on_policy) is not None:
            figures["on_policy"] = counted.to_json()
        return figures


def behaviour_view(
    pair: Pair, examples: Sequence[Example], judge: JudgeSpec, *, max_new_tokens: int = 128, tau: float = HARM_TAU,
    template: Template = "chat", batch_size: int = BATCH_SIZE, progress: Callable[[str, int], None] | None = None,
) -> Behaviour:  # fmt: skip
    """Reply to every prompt with both models, by the same greedy decoding, and judge both replies.

    A side's replies are judged before the next side is loaded, and then forgotten: judgements are all that is kept.
    `progress` is called with the side and the number of its finished replies.
    """
    judging = open_judge(judge)
    failed = judging.failures
    require_tau(tau)
    if not examples:
        raise DataError("the behaviour view got no examples, expected at least one", remedy="give prompts to reply to")
    prompts = [prompt_text(example) for example in examples]
    judged: dict[str, list[Judgement]] = {}
    for name, model in pair.sides():
        replies = generate(
            model, pair.tokenizers.of(name), examples, max_new_tokens=max_new_tokens, batch_size=batch_size,
            template=template, progress=None if progress is None else partial(progress, name),
        )  # fmt: skip
        judged[name] = judging.judge(prompts, [reply.text for reply in replies])
        del model  # or it would still be held while the next one is loaded
    before, after = ([str(judgement.verdict) for judgement in judged[name]] for name in ("before", "after"))
    return Behaviour(
        judging.name, judging.revision, max_new_tokens, before, after, judging.failures - failed, judged["before"],
        judged["after"], tau,
    )  # fmt: skip


def judge_record(judge: GuardedJudge, max_new_tokens: int) -> dict[str, str | int | None]:
    """What the ledger records of a look's judge and of the longest reply that it sees."""
    return {"name": judge.name, "revision": judge.revision, "max_new_tokens": max_new_tokens}


def certificate_judge(judge: JudgeSpec, limit: ChanceConstraint) -> GuardedJudge:
    """The judge of a certificate: one with a revision, to which something can be bound; tau is a probability."""
    require_tau(limit.tau)
    opened = open_judge(judge)
    if not opened.revision:
        raise ConfigError(
            f"judge {opened.name!r} has no revision, so that a certificate cannot say who judged",
            remedy="name a judge of `holdfast ls judges` or a trained one, or give yours a revision",
        )
    return opened
