"""Asking theta_0, in memory or behind vLLM or a named endpoint: greedy replies, stored as they come, and their classes.

32 tokens sort a reply; one that is cut there and cannot be sorted yet is asked for again at 128. A reply that is to be
held runs to its end, at most 256 tokens. Replies are kept by the model's content in the user's cache, for the owner
alone (mode 0600), so that a killed run goes on and the next run on this model asks only what is new.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.core.hashing import sha256_json
from holdfast.data.bundled import KINDS, Use, bundled
from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.data.examples import Example, prompt_text
from holdfast.data.sources import read_prompts
from holdfast.data.templates import Template
from holdfast.judging.engines import Engine, open_engine
from holdfast.judging.prompts import positions_of, prompt_ids
from holdfast.judging.reply import Reply
from holdfast.judging.reply_classes import ReplyClass, sort_reply
from holdfast.judging.store import missing
from holdfast.judging.store import replies as stored_replies
from holdfast.models.embedded import cache_root
from holdfast.screening.questions import Key, as_question, asked_rows, prompt_key, questions_of
from holdfast.screening.settings import TASK, ScreeningSettings, uses_of

SORTING = 32
LONGER = 128
HELD = 256
HELD_SHARE = 0.25  # of the prompts: what estimates take to be held at full length, at most
LARGEST_SHARE = 8  # of the prompts, one in so many warms up and one in so many is timed, at most
UNSORTED = ReplyClass.UNSORTED
BATCH_CPU, BATCH_CUDA = 32, 256
REMOTE = ("endpoint",)

Progress: TypeAlias = Callable[[str, int, int], None]
"""Receives what is asked, how many replies there are, and how many there will be."""


def progress_to(listeners: Sequence[Callable[[dict[str, Any]], None]]) -> Progress:
    """Hands on to listeners, as a row, what is asked and how far it is."""

    def show(what: str, done: int, total: int) -> None:
        for listener in listeners:
            listener({"stage": "ask", "what": what, "done": done, "total": total})

    return show


@dataclass(frozen=True)
class Sorted:
    """A reply and its class."""

    reply: Reply
    reply_class: ReplyClass
    reason: str | None = None  # why it is unsorted
    quick: bool = True  # 32 tokens were enough


@dataclass
class Asker:
    """One model, ready to be asked."""

    engine: Engine  # makes the replies
    # what decides them beside the prompt (weights, tokenizer, template, dtype, device, batch size): the header of the
    # stored replies, and the name of their folder
    identity: Mapping[str, Any]
    folder: Path | None = None  # of the stored replies; the user's cache unless given
    progress: Progress | None = None
    # the prompts that leave room for a whole reply; the model is not asked the others
    fitting: Callable[[Sequence[Example]], list[Example]] = list
    batch: int = BATCH_CPU  # prompts that the engine takes together
    plain: bool = False  # whether prompts are asked as they are, without a template

    def question(self, example: Example) -> Example:
        """The prompt alone, as it is asked."""
        return as_question(example.prompt, example, plain=self.plain)

    def sort(self, examples: Sequence[Example], *, what: str) -> dict[str, Sorted]:
        """Replies of 32 tokens, or 128 where those do not sort them, and their classes, by id."""
        quick = {key: _sorted(reply) for key, reply in self.ask(examples, SORTING, what).items()}
        undecided = [e for e in examples if quick[e.id].reply.truncated and quick[e.id].reply_class == UNSORTED]
        longer = self.ask(undecided, LONGER, f"{what}, cut replies once more")
        return quick | {key: _sorted(reply, quick=False) for key, reply in longer.items()}

    def held(self, examples: Sequence[Example], *, what: str) -> dict[str, Sorted]:
        """Replies of up to 256 tokens and their classes, by id: a reply may change its mind after 32 tokens."""
        quick = self.ask(examples, SORTING, what)  # stored already where they were sorted; a short one is whole
        longer = self.ask([e for e in examples if quick[e.id].truncated], HELD, f"{what}, whole replies")
        return {key: _sorted(reply) for key, reply in (quick | longer).items()}

    def ask(self, examples: Sequence[Example], tokens: int, what: str) -> dict[str, Reply]:
        """Replies of up to `tokens` tokens, by id."""
        if not examples:
            return {}
        show, total = self.progress, len(examples)
        progress = None if show is None else lambda done: show(what, done, total)
        made = stored_replies(
            self._path(tokens), self.identity, list(examples), self.engine, max_new_tokens=tokens, progress=progress
        )
        return {example.id: reply for example, reply in zip(examples, made, strict=True)}

    def unanswered(self, examples: Sequence[Example]) -> list[Example]:
        """Those that were not sorted before, each once."""
        return missing(self._path(SORTING), self.identity, examples, self.engine, max_new_tokens=SORTING)

    def _path(self, tokens: int) -> Path:
        engine = {"engine": self.engine.name, **getattr(self.engine, "identity", {})}
        folder = self.folder if self.folder is not None else cache_root() / "replies"
        return folder / sha256_json({**self.identity, **engine})[:32] / f"{tokens}.jsonl"


def _sorted(reply: Reply, *, quick: bool = True) -> Sorted:
    found = sort_reply(reply.text, truncated=reply.truncated)
    return Sorted(reply, found.reply_class, None if found.reason is None else str(found.reason), quick)


def asker_of(
    model: Any, tokenizer: Any, *, model_sha256: str, template: Template = "chat", engine: str = "auto",
    options: Mapping[str, Any] | None = None, folder: Path | None = None, progress: Progress | None = None,
) -> Asker:  # fmt: skip
    """Ready to ask; replies are stored by `model_sha256`, and prompts leave the machine for an `endpoint` alone."""
    device = getattr(getattr(model, "device", None), "type", None)
    batch = BATCH_CUDA if device == "cuda" else BATCH_CPU
    made = open_engine(
        engine, model=None if engine in REMOTE else model, tokenizer=tokenizer, batch_size=batch, template=template,
        **(options or {}),
    )  # fmt: skip
    identity = {
        "model_sha256": model_sha256, "template": template, "batch_size": batch,
        "tokenizer_sha256": None if tokenizer is None else tokenizer_sha256(tokenizer),
        "template_sha256": None if tokenizer is None else template_sha256(tokenizer),
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."), "device": device,
    }  # fmt: skip
    positions = None if engine in REMOTE else positions_of(model)

    def fitting(examples: Sequence[Example]) -> list[Example]:
        if positions is None or not examples:
            return list(examples)
        if positions <= HELD:  # whatever the prompts are
            return []
        ids = prompt_ids(tokenizer, examples, template)
        return [example for example, own in zip(examples, ids, strict=True) if len(own) + HELD <= positions]

    return Asker(made, identity, folder, progress, fitting, batch, plain=template == "none")


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Asking leaves no trace in training: random states and module modes are put back."""
    import torch

    modes = [] if model is None else [(module, module.training) for module in model.modules()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@dataclass(frozen=True)
class AskingPlan:
    """Counts of prompts, and of new tokens at most."""

    rows: int
    asked_rows: int
    task_prompts: int  # distinct questions of the task
    bundled_prompts: int  # bundled prompts that are asked before training
    files: tuple[str, ...]  # prompt files and hub data sets that are asked too
    file_prompts: int  # in those of the files that are on this machine; a hub data set is read when asking begins
    new_tokens: int  # at most, if `HELD_SHARE` of the prompts are held at full length
    sets: Mapping[str, Mapping[str, Any]]  # what is held, by name

    def sentence(self) -> str:
        sample = f" (a stratified sample: {self.asked_rows} of {self.rows} rows)"
        sampled = "" if self.asked_rows == self.rows else sample
        local = [name for name in self.files if Path(name).is_file()]
        remote = [name for name in self.files if name not in local]
        files = f" and {self.file_prompts:,} of {', '.join(local)}" if local else ""
        files += f" and those of {', '.join(remote)}" if remote else ""
        bundled = f", {self.bundled_prompts:,} bundled prompts" if self.bundled_prompts else ""
        most = f"at most about {self.new_tokens:,} new tokens"
        return f"{self.task_prompts:,} task prompts{sampled}{bundled}{files}; {most}"


def plan_asking(task: Sequence[Example], settings: ScreeningSettings) -> AskingPlan:
    """What will be asked for a task under these settings."""
    numbers = asked_rows(task, max_prompts=settings.max_prompts, seed=settings.seed) if settings.asks_task else []
    keys: set[Key] = {prompt_key(asked.prompt) for number in numbers for asked in questions_of(task[number])}
    return planned(len(task), len(numbers), len(keys), settings)


def planned(rows: int, asked_rows: int, task_prompts: int, settings: ScreeningSettings) -> AskingPlan:
    """The plan once the task's questions are known: `task_prompts` of them, for `asked_rows` of its rows."""
    sources = [(source, one) for one in settings.sets.values() for source in one.prompts if source != TASK]
    parts: set[tuple[str, Use, int | None]] = {(name, "monitor", None) for name in settings.watched_beside}
    parts |= {(name, use, one.limit) for name, one in sources if name in KINDS for use in uses_of(name, one.keep)}
    asked = {e.id for name, use, limit in parts if use != "certify" for e in bundled(name, use, limit)}
    read = dict.fromkeys((source, one.limit) for source, one in sources if source not in KINDS)
    files = tuple(dict.fromkeys(source for source, _ in read))
    file_prompts = sum(len(read_prompts(source, limit=limit)) for source, limit in read if Path(source).is_file())
    prompts = task_prompts + len(asked) + file_prompts
    tokens = round((SORTING + HELD * HELD_SHARE) * prompts)
    sets = {name: one.as_json() for name, one in settings.sets.items()}
    return AskingPlan(rows, asked_rows, task_prompts, len(asked), files, file_prompts, tokens, sets)


@dataclass(frozen=True)
class AskingTime:
    """How long asking will take, measured on its own prompts before the others are asked.

    Of the prompts without a stored reply, those of about average length go first: one batch to warm up, one by the
    clock. With r seconds a prompt and n prompts left, an estimate is

        r n                to sort the replies
        r n/4 * 256/32     more, at most about, where a quarter of them is held whole

    The cost of a batch grows about linearly with the length of its prompts, so that average ones stand for all.
    """

    timed: int  # prompts that were asked by the clock
    seconds: float  # that they took
    left: int  # prompts that are asked after them

    @property
    def sorting(self) -> float:
        return self.seconds / self.timed * self.left

    @property
    def holding(self) -> float:
        """More, at most about, for the replies that are held whole."""
        return self.sorting * HELD_SHARE * HELD / SORTING

    def sentence(self) -> str:
        sorting, holding = (str(timedelta(seconds=round(seconds))) for seconds in (self.sorting, self.holding))
        return (
            f"estimated {sorting} to sort the replies to {self.left:,} more prompts, and at most about {holding} for "
            f"the whole replies that are held ({self.timed} prompts took {self.seconds:.1f} s)"
        )


def measured(asker: Asker, examples: Sequence[Example]) -> AskingTime | None:
    """Ask a few of the prompts, and say how long the others will take; None where too few are left to ask."""
    waiting = asker.unanswered(examples)
    size = min(asker.batch, len(waiting) // LARGEST_SHARE)
    if size == 0:
        return None
    chosen = of_average_length(waiting, 2 * size)
    asker.ask(chosen[::2], SORTING, "a first batch")
    start = time.monotonic()
    asker.ask(chosen[1::2], SORTING, "a batch by the clock")
    return AskingTime(size, time.monotonic() - start, len(waiting) - 2 * size)


def of_average_length(examples: Sequence[Example], count: int) -> list[Example]:
    """The `count` prompts around the average length in characters, shortest first."""
    ordered = sorted(examples, key=lambda example: len(prompt_text(example)))
    lengths = [len(prompt_text(example)) for example in ordered]
    middle = bisect_left(lengths, sum(lengths) / len(lengths))
    start = min(max(0, middle - count // 2), len(ordered) - count)
    return ordered[start : start + count]
