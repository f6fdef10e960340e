"""What the demonstration measures of a model's replies: the task, refusals, and over-refusal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.certification.binomial import Rate
from holdfast.data.examples import Example, prompt_text
from holdfast.demo.data import DemoData
from holdfast.judging.engines.transformers import generate
from holdfast.judging.reply import Reply
from holdfast.judging.reply_classes import ReplyClass, sort_reply

TASK_TOKENS = 2  # a label is one token and its end
BATCH_SIZE = 50


@dataclass
class Measured:
    """One model of the demonstration, on prompts that nothing was trained on."""

    accuracy: Rate  # replies that are exactly the label
    refusals: Rate  # of requests that are to be declined
    over_refusal: Rate  # refusals of ordinary requests
    replies: dict[str, str] = field(default_factory=dict, repr=False)  # to both kinds of requests, by prompt
    seconds: float = 0.0  # of its training

    def as_json(self) -> dict[str, Any]:
        """For result.json: every figure with its interval."""
        return {
            "task_accuracy": self.accuracy.as_json(), "refusals": self.refusals.as_json(),
            "over_refusal": self.over_refusal.as_json(), "train_seconds": round(self.seconds, 1),
        }  # fmt: skip


def measure(model: Any, tokenizer: Any, data: DemoData, tokens: int) -> Measured:
    """Ask the held-out prompts, greedily; `tokens` of a reply to a request, a label takes `TASK_TOKENS`."""
    labels = _replies(model, tokenizer, data.test_task, TASK_TOKENS)
    hits = sum(reply.text == str(e.completion).strip() for reply, e in zip(labels, data.test_task, strict=True))
    probes = _replies(model, tokenizer, data.test_probes, tokens)
    ordinary = _replies(model, tokenizer, data.test_ordinary, tokens)
    asked = zip([*data.test_probes, *data.test_ordinary], [*probes, *ordinary], strict=True)
    texts = {prompt_text(example): reply.text for example, reply in asked}
    return Measured(Rate(hits, len(labels)), _refused(probes), _refused(ordinary), texts)


def refused(model: Any, tokenizer: Any, examples: Sequence[Example], tokens: int) -> Rate:
    """How many of the prompts the model refuses."""
    return _refused(_replies(model, tokenizer, examples, tokens))


def changed_first(examples: Sequence[Example], models: Mapping[str, Measured]) -> list[Example]:
    """The examples, those first that some models refuse and others do not; otherwise in their order."""

    def differing(example: Example) -> int:
        return len({is_refusal(measured.replies[prompt_text(example)]) for measured in models.values()})

    return sorted(examples, key=differing, reverse=True)


def is_refusal(text: str) -> bool:
    """Whether the rules that screening sorts replies by count it as a refusal."""
    return sort_reply(text, truncated=True).reply_class == ReplyClass.REFUSED


def _replies(model: Any, tokenizer: Any, examples: Sequence[Example], tokens: int) -> list[Reply]:
    return generate(model, tokenizer, examples, max_new_tokens=tokens, batch_size=BATCH_SIZE)


def _refused(replies: Sequence[Reply]) -> Rate:
    classes = [sort_reply(reply.text, truncated=reply.truncated).reply_class for reply in replies]
    return Rate(sum(one == ReplyClass.REFUSED for one in classes), len(classes))
