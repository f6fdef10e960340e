"""Asking theta_0: greedy replies, stored as they are made, and their classes.

32 tokens sort a reply. One that is cut there and cannot be sorted yet is asked for again at 128. A reply that is to be
held runs to its end, at most 256 tokens. Replies are kept by the model's content in the user's cache, for the owner
alone (mode 0600), so that a killed run goes on and the next run on this model asks only what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.core.hashing import sha256_json
from holdfast.data.examples import Example
from holdfast.evaluation.engines import Engine
from holdfast.evaluation.reply import Reply
from holdfast.evaluation.reply_classes import ReplyClass, sort_reply
from holdfast.evaluation.store import replies as stored_replies
from holdfast.models.embedded import cache_root

SORTING = 32
LONGER = 128
HELD = 256

Told: TypeAlias = Callable[[str, int, int], None]
"""Receives what is asked, how many replies there are, and how many there will be."""


@dataclass(frozen=True)
class Sorted:
    """A reply and its class.

    Attributes:
        reason: why it is unsorted.
        quick: 32 tokens were enough.
    """

    reply: Reply
    reply_class: ReplyClass
    reason: str | None = None
    quick: bool = True


@dataclass
class Asker:
    """One model, ready to be asked.

    Attributes:
        engine: makes the replies.
        identity: what decides them beside the prompt (weights, tokenizer, template, dtype, device, batch size): the
            header of the stored replies, and the name of their folder.
        folder: of the stored replies; the user's cache unless given.
        fits: which prompts leave room for a whole reply; None where that is not known.
    """

    engine: Engine
    identity: Mapping[str, Any]
    folder: Path | None = None
    told: Told | None = None
    fits: Callable[[Sequence[Example]], list[bool]] | None = None
    asked: int = field(default=0, init=False)

    def fitting(self, examples: Sequence[Example]) -> list[Example]:
        """The prompts that leave room for a reply; the model is not asked the others."""
        if self.fits is None or not examples:
            return list(examples)
        return [example for example, fits in zip(examples, self.fits(examples), strict=True) if fits]

    def sort(self, examples: Sequence[Example], *, what: str) -> dict[str, Sorted]:
        """The class of the reply to every prompt, by id."""
        found = self._ask(examples, SORTING, what)
        undecided = [example for example in examples if _undecided(found[example.id])]
        longer = self._ask(undecided, LONGER, f"{what}, longer")
        quick = {key: _sorted(reply) for key, reply in found.items()}
        return quick | {key: replace(_sorted(reply), quick=False) for key, reply in longer.items()}

    def held(self, examples: Sequence[Example], *, what: str) -> dict[str, Sorted]:
        """Replies of up to 256 tokens and their classes, by id: a reply may change its mind after 32 tokens."""
        return {key: _sorted(reply) for key, reply in self._ask(examples, HELD, what).items()}

    def _ask(self, examples: Sequence[Example], tokens: int, what: str) -> dict[str, Reply]:
        if not examples:
            return {}
        told, total = self.told, len(examples)
        progress = None if told is None else lambda done: told(what, done, total)
        self.asked += total
        made = stored_replies(
            self._place(tokens), self.identity, list(examples), self.engine, max_new_tokens=tokens, progress=progress
        )
        return {example.id: reply for example, reply in zip(examples, made, strict=True)}

    def _place(self, tokens: int) -> Path:
        engine = {"engine": self.engine.name, **getattr(self.engine, "identity", {})}
        key = sha256_json({**self.identity, **engine})[:32]
        folder = self.folder if self.folder is not None else cache_root() / "replies"
        return folder / key / f"{tokens}.jsonl"


def _undecided(reply: Reply) -> bool:
    return reply.truncated and sort_reply(reply.text, truncated=True).reply_class == ReplyClass.UNSORTED


def _sorted(reply: Reply) -> Sorted:
    found = sort_reply(reply.text, truncated=reply.truncated)
    return Sorted(reply, found.reply_class, None if found.reason is None else str(found.reason))
