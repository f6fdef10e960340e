"""Asking both models of a pair the same prompts: greedy replies, stored as they are made, so that a killed run goes on.

Whoever can write to the folder can put replies there before the command starts. A random sample of the replies that
were found is therefore asked for again, and where one comes out in another class, none of them is used: forging a share
s of them goes unnoticed with probability (1 - s)^300 at most.

A reply that ends before its class is certain (cut at `max_new_tokens` while it refuses, or cannot be sorted) is asked
for once more at four times the length. What is then still cut is unsorted: nobody saw how it ends.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.auditing.measure import Progress
from holdfast.auditing.pair import Name, Pair
from holdfast.certification.behaviour import UNSORTED
from holdfast.constraint.completion import deterministic
from holdfast.core.hashing import sha256_file
from holdfast.data.examples import Example
from holdfast.evaluation.engines import BATCH_SIZE, Engine, open_engine
from holdfast.evaluation.prompts import prompt_ids, require_room, require_sizes
from holdfast.evaluation.reply import Reply
from holdfast.evaluation.reply_classes import ReplyClass, sort_reply
from holdfast.evaluation.store import read_replies, replies

logger = logging.getLogger(__name__)

FOLDER = "replies"
LONGER = 4
ASKED_AGAIN = 300  # of the replies that an earlier start left


@dataclass(frozen=True)
class Asking:
    """How replies are made.

    Attributes:
        max_new_tokens: length of the longest reply at first.
        template: `chat` puts plain prompts into a user turn, `none` leaves them as they are.
        batch_size: prompts decoded together at most.
    """

    max_new_tokens: int = 128
    template: str = "chat"
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        require_sizes(max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)

    @property
    def longest(self) -> int:
        """Length of the longest reply that is asked for again."""
        return LONGER * self.max_new_tokens


class Asked:
    """The replies of a pair to prompts, kept in a folder.

    Args:
        pair: the two models.
        examples: with a prompt each; completions are not looked at.
        how: they are asked.
        folder: of the stored replies, for their owner alone.
        progress: called with (done, total) over `passes` passes.
        reuse: whether replies of an earlier start are used.
    """

    def __init__(
        self,
        pair: Pair,
        examples: Sequence[Example],
        how: Asking,
        folder: Path,
        *,
        passes: int,
        progress: Progress | None = None,
        reuse: bool = True,
    ) -> None:
        self.pair, self.examples, self.how, self.folder = pair, list(examples), how, folder
        self.engine = ""
        self.found = 0
        self._reuse, self._own = reuse, set[Path]()
        self._passes, self._progress, self._finished = passes, progress, 0

    def require_room(self, name: Name) -> None:
        """Refuse prompts that are too long for their replies, while nothing is spent."""
        with self._side(name) as (model, tokenizer):
            prompts = prompt_ids(tokenizer, self.examples, self._template)
            require_room(model, self.examples, prompts, self.how.max_new_tokens)

    def replies(self, name: Name) -> list[Reply]:
        """One reply a prompt, in order, as long as `max_new_tokens` allows."""
        with self._side(name) as (model, tokenizer):
            return self._pass(name, name, model, tokenizer, self.how.batch_size)

    def classes(self, name: Name, *, again: bool = False) -> list[str]:
        """The class of every reply, in order; `again` asks in other batches and stores apart."""
        stored = "again" if again else name
        size = _other_batches(self.how.batch_size, len(self.examples)) if again else self.how.batch_size
        with self._side(name) as (model, tokenizer):
            first = self._pass(name, stored, model, tokenizer, size)
            undecided = [i for i, reply in enumerate(first) if _undecided(reply)]
            longer = self._longer(name, stored, model, tokenizer, size, undecided)
        return [class_of(longer.get(i, reply)) for i, reply in enumerate(first)]

    def stored(self) -> dict[str, str]:
        """sha256 of every file of replies."""
        return {path.name: sha256_file(path) for path in sorted(self.folder.glob("*.jsonl"))}

    @property
    def _template(self) -> Any:
        return self.how.template

    @contextmanager
    def _side(self, name: Name) -> Iterator[tuple[Any, Any]]:
        pair = self.pair
        tokenizer = pair.tokenizer_before if name == "before" else pair.tokenizer_after
        keep = pair.together
        with pair.on(name) as model, deterministic(model):
            yield model, tokenizer
        if not keep:
            del model  # or it would still be held while the other one is loaded
            pair.release(name)

    def _pass(self, name: Name, stored: str, model: Any, tokenizer: Any, size: int) -> list[Reply]:
        found = self._ask(name, stored, model, tokenizer, size, self.examples, self.how.max_new_tokens)
        self._finished += len(self.examples)
        return found

    def _longer(
        self, name: Name, stored: str, model: Any, tokenizer: Any, size: int, places: Sequence[int]
    ) -> dict[int, Reply]:
        """Longer replies by place; none where the model's positions leave no room for longer ones."""
        chosen = [self.examples[i] for i in places]
        if not chosen:
            return {}
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        widest = max(map(len, prompt_ids(tokenizer, chosen, self._template)))
        length = self.how.longest if positions is None else min(self.how.longest, positions - widest)
        if length <= self.how.max_new_tokens:
            return {}
        found = self._ask(name, f"{stored}.longer", model, tokenizer, size, chosen, length)
        return dict(zip(places, found, strict=True))

    def _ask(
        self, name: Name, stored: str, model: Any, tokenizer: Any, size: int, examples: list[Example], length: int
    ) -> list[Reply]:
        engine = open_engine("auto", model=model, tokenizer=tokenizer, batch_size=size, template=self._template)
        self.engine = engine.name
        side = self.pair.before if name == "before" else self.pair.after
        strength = self.pair.strength if name == "after" else None
        stored = stored if strength is None else f"{stored}-strength-{strength:g}"
        header = {
            "model_sha256": side.sha256, "tokenizer_sha256": self.pair.tokenizers.tokenizer_sha256,
            "template_sha256": self.pair.tokenizers.template_sha256, "template": self.how.template,
            "dtype": self.pair.asked_dtype, "device": self.pair.device.type, "batch_size": size,
            "strength": strength,
        }  # fmt: skip
        tell = self._telling() if examples is self.examples else None
        place = self.folder / f"{stored}.jsonl"
        if place.is_file() and place not in self._own:
            self._keep(place, engine, examples, length)
        made = replies(place, header, examples, engine, max_new_tokens=length, progress=tell)
        self._own.add(place)
        return made

    def _keep(self, place: Path, engine: Engine, examples: Sequence[Example], length: int) -> None:
        """Use the replies of an earlier start if those asked for again come out alike; otherwise remove them."""
        there = read_replies(place) if self._reuse and place.stat().st_size else {}
        found = [example for example in examples if example.id in there]
        chosen = random.SystemRandom().sample(found, min(ASKED_AGAIN, len(found)))
        fresh = [reply for batch in engine.generate(chosen, max_new_tokens=length) for reply in batch] if chosen else []
        differ = sum(class_of(reply) != class_of(there[reply.id]) for reply in fresh)
        if differ or not found:
            if differ:
                logger.warning(
                    "%s: %d of %d replies of an earlier start came out in another class: all are asked for anew",
                    place, differ, len(chosen),
                )  # fmt: skip
            place.unlink()
            return
        self.found += len(found)

    def _telling(self) -> Callable[[int], None] | None:
        progress, before, total = self._progress, self._finished, self._passes * len(self.examples)
        return None if progress is None else lambda done: progress(before + done, total)


def _other_batches(size: int, prompts: int) -> int:
    """A batch size that puts prompts beside others, so that rounding has its say."""
    return max(1, 3 * size // 4) if prompts > size else max(1, (prompts + 1) // 2)


def _undecided(reply: Reply) -> bool:
    return reply.truncated and sort_reply(reply.text, truncated=True).reply_class != ReplyClass.ANSWERED


def class_of(reply: Reply) -> str:
    """The class of a reply; a refusal that nobody saw the end of may have given in, so it is unsorted."""
    found = sort_reply(reply.text, truncated=reply.truncated).reply_class
    return UNSORTED if reply.truncated and found == ReplyClass.REFUSED else str(found)
