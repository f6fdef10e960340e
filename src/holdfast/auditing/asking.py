"""Asking both models of a pair the same prompts: greedy replies, stored as they are made, so that a killed run goes on.

Whoever can write to the folder can put replies there before the command starts. A random sample of the replies that
were found is therefore asked for again, and where one comes out in another class, none of them is used: forging a share
s of them goes unnoticed with probability (1 - s)^300 at most.

A reply that ends before its class is certain (cut at `max_new_tokens` while it refuses, or cannot be sorted) is asked
for once more at four times the length. What is then still cut is unsorted: nobody saw how it ends.
"""

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.auditing.measure import Progress
from holdfast.auditing.pair import Name, Pair
from holdfast.certification.behaviour import UNSORTED, Classes
from holdfast.core.errors import CheckpointError
from holdfast.core.hashing import sha256_file
from holdfast.core.library_types import LanguageModel
from holdfast.data.examples import Example
from holdfast.judging.engines import BATCH_SIZE, Engine, open_engine
from holdfast.judging.prompts import positions_of, prompt_ids, require_room, require_sizes
from holdfast.judging.refusal_rules import RULES_REVISION
from holdfast.judging.reply import Reply
from holdfast.judging.reply_classes import ReplyClass, sort_reply
from holdfast.judging.store import read_replies, replies
from holdfast.records.certificate import CertificateRecord
from holdfast.records.certificate_table import Table

logger = logging.getLogger(__name__)

FOLDER = "replies"
LONGER = 4
LOOKS = 50  # at the classes so far, in a pass over the prompts
ASKED_AGAIN = 300  # of the replies that an earlier start left
WHO = {"before": "the model before", "again": "the model before again, in other batches", "after": "the model after"}

Seen = Callable[[Sequence[str | None]], None]
"""Gets the classes of the replies so far, in the order of the prompts; None where the class is not certain yet."""


@dataclass(frozen=True)
class Asking:
    """How replies are made: their length at first, the template of plain prompts, prompts decoded together at most."""

    max_new_tokens: int = 128
    template: Any = "chat"
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        require_sizes(max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)

    @property
    def longest(self) -> int:
        return LONGER * self.max_new_tokens


class Asked:
    """The replies of a pair to the prompts of examples, kept in a folder for their owner alone.

    `progress` is called with (done, total) over `passes` passes, the total grown by what is asked for once more;
    `reuse`: whether replies of an earlier start are used.
    """

    def __init__(
        self, pair: Pair, examples: Sequence[Example], how: Asking, folder: Path, *, passes: int,
        progress: Progress | None = None, reuse: bool = True,
    ) -> None:  # fmt: skip
        self.pair, self.examples, self.how, self.folder = pair, list(examples), how, folder
        self.engine, self.reused = "", 0
        self._reuse, self._own = reuse, set[Path]()
        self._progress, self._finished, self._total = progress, 0, passes * len(self.examples)

    def require_room(self, name: Name) -> None:
        """Refuse prompts that are too long for their replies, while nothing is spent."""
        with self.pair.using(name) as model:
            prompts = prompt_ids(self.pair.tokenizers.of(name), self.examples, self.how.template)
            require_room(model, self.examples, prompts, self.how.max_new_tokens)

    def replies(self, name: Name) -> list[Reply]:
        """One reply a prompt, in order, as long as `max_new_tokens` allows."""
        with self.pair.using(name) as model:
            return self._ask(name, name, model, self.how.batch_size)

    def classes(self, name: Name, *, again: bool = False, seen: Seen | None = None) -> list[str]:
        """The class of every reply, in order; `again` asks in other batches and stores apart.

        `seen` is called as they come; what it raises ends the asking.
        """
        stored, size, n = "again" if again else name, self.how.batch_size, len(self.examples)
        if again:  # prompts beside others, so that rounding has its say
            size = max(1, 3 * size // 4 if n > size else (n + 1) // 2)
        told = None if seen is None else self._told(seen)
        with self.pair.using(name) as model:
            first = self._ask(name, stored, model, size, seen=told)
            undecided = [i for i, reply in enumerate(first) if _undecided(reply)]
            longer = self._longer(name, stored, model, size, undecided, told and partial(told, final=True))
        return [class_of(longer.get(i, reply)) for i, reply in enumerate(first)]

    def _told(self, seen: Seen) -> Callable[..., None]:
        """Hears of replies as they are made, and calls `seen` with all classes a few times in a pass."""
        known: dict[str, str] = {}
        n, heard, last = len(self.examples), 0, 0

        def told(made: Sequence[Reply], *, final: bool = False) -> None:
            nonlocal heard, last
            known.update((reply.id, class_of(reply)) for reply in made if final or not _undecided(reply))
            heard += len(made)
            if heard == n or heard - last >= n / LOOKS:  # an engine may give its replies one by one
                last = heard
                seen([known.get(example.id) for example in self.examples])

        return told

    def _longer(
        self, name: Name, stored: str, model: LanguageModel, size: int, places: Sequence[int],
        seen: Callable[[Sequence[Reply]], None] | None,
    ) -> dict[int, Reply]:  # fmt: skip
        """Longer replies by place; none where the model's positions leave no room for longer ones."""
        chosen, length = [self.examples[i] for i in places], self.how.longest
        if chosen and (positions := positions_of(model)) is not None:
            prompts = prompt_ids(self.pair.tokenizers.of(name), chosen, self.how.template)
            length = min(length, positions - max(map(len, prompts)))
        if not chosen or length <= self.how.max_new_tokens:
            return {}
        return dict(zip(places, self._ask(name, f"{stored}.longer", model, size, chosen, length, seen), strict=True))

    def _ask(
        self, name: Name, stored: str, model: LanguageModel, size: int, chosen: list[Example] | None = None,
        length: int = 0, seen: Callable[[Sequence[Reply]], None] | None = None,
    ) -> list[Reply]:  # fmt: skip
        pair, examples = self.pair, self.examples if chosen is None else chosen
        length = length or self.how.max_new_tokens
        engine = open_engine(
            "auto", model=model, tokenizer=pair.tokenizers.of(name), batch_size=size, template=self.how.template
        )
        self.engine = engine.name
        strength = pair.strength if name == "after" else None
        header = {
            "model_sha256": pair.ref(name).sha256, "tokenizer_sha256": pair.tokenizers.tokenizer_sha256,
            "template_sha256": pair.tokenizers.template_sha256, "template": self.how.template,
            "dtype": pair.bound_dtype, "device": pair.device.type, "batch_size": size, "strength": strength,
        }  # fmt: skip
        what = f"{len(examples)} prompts" if chosen is None else f"{len(examples)} cut replies once more"
        at = "" if strength is None else f" at strength {strength:g}"
        logger.info("asking %s%s: %s, at most %d tokens each", WHO[stored.partition(".")[0]], at, what, length)
        self._total += len(chosen or ())
        progress, before, total = self._progress, self._finished, self._total
        tell = None if progress is None else lambda done: progress(before + done, total)
        place = self.folder / f"{stored if strength is None else f'{stored}-strength-{strength:g}'}.jsonl"
        if place.is_file() and place not in self._own:
            self._keep(place, engine, examples, length)
        made = replies(place, header, examples, engine, max_new_tokens=length, progress=tell, seen=seen)
        self._own.add(place)
        self._finished += len(examples)
        return made

    def _keep(self, place: Path, engine: Engine, examples: Sequence[Example], length: int) -> None:
        """Use the replies of an earlier start if those asked for again come out alike; otherwise remove them."""
        there = read_replies(place) if self._reuse and place.stat().st_size else {}
        known = [example for example in examples if example.id in there]
        chosen = random.SystemRandom().sample(known, min(ASKED_AGAIN, len(known)))
        fresh: list[Reply] = []
        if chosen:
            logger.info("asking for %d of %d replies of an earlier start again", len(chosen), len(known))
            fresh = [reply for batch in engine.generate(chosen, max_new_tokens=length) for reply in batch]
        differ = sum(class_of(reply) != class_of(there[reply.id]) for reply in fresh)
        if differ:
            what = "%s: %d of %d replies of an earlier start came out in another class: all are asked for anew"
            logger.warning(what, place, differ, len(chosen))
        if differ or not known:
            place.unlink()
        else:
            self.reused += len(known)


def reply_hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file of replies, by name."""
    return {path.name: sha256_file(path) for path in sorted(folder.glob("*.jsonl"))}


def _undecided(reply: Reply) -> bool:
    """Whether it is asked for once more, at a greater length."""
    return reply.truncated and class_of(reply) == UNSORTED


def class_of(reply: Reply) -> str:
    """The class of a reply; a refusal that nobody saw the end of may have given in, so it is unsorted."""
    sorted_as = sort_reply(reply.text, truncated=reply.truncated).reply_class
    return UNSORTED if reply.truncated and sorted_as == ReplyClass.REFUSED else str(sorted_as)


_RESTORE = "restore the folder of replies from where the certificate was issued, or certify again"


def require_replies(record: CertificateRecord, table: Table, folder: Path) -> bool:
    """Sort the stored replies of a certificate again; False where they are not beside it, or the rules are other ones.

    Replies may be harmful, so a certificate is often passed on without them; its table then stands for them.
    """
    place, listed = folder / FOLDER, record.bound["replies_sha256"]
    if not isinstance(listed, dict) or not place.is_dir():
        return False
    if set(listed) != {file.name for file in place.glob("*.jsonl")}:
        raise CheckpointError(f"{place} holds other files of replies than the certificate lists", remedy=_RESTORE)
    for name, expected in listed.items():
        if not (place / name).is_file() or sha256_file(place / name) != expected:
            raise CheckpointError(f"the replies {place / name} are missing or were changed", remedy=_RESTORE)
    if not isinstance(table, Classes) or record.settings["replies"]["rules_revision"] != RULES_REVISION:
        return False
    for name, classes in (("before", table.before), ("again", table.again), ("after", table.after)):
        final, longer = read_replies(place / f"{name}.jsonl"), place / f"{name}.longer.jsonl"
        final |= read_replies(longer) if longer.is_file() else {}
        if missing := [prompt for prompt in table.ids if prompt not in final]:
            raise CheckpointError(f"{place}: no reply to {len(missing)} prompts in {name}.jsonl", remedy=_RESTORE)
        if [class_of(final[prompt]) for prompt in table.ids] != list(classes):
            what = f"the classes of the column {name} do not follow from the replies in {place}"
            raise CheckpointError(what, remedy=_RESTORE)
    return True
