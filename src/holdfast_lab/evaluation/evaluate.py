"""Asking a model, storing its replies once, and scoring them as often as wanted.

    answer   model -> replies/<set>.jsonl      the slow part; resumes by prompt
    judged   replies -> judgements/*.json      without any text
    score    both -> metrics

A folder belongs to one model: replies of another are refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.files import read_json, write_json
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.seeding import sample
from holdfast.data.encode import MAX_LISTED, template_sha256
from holdfast.data.examples import Example, completion_text, make_example, prompt_text
from holdfast.data.tasks import Grade, Task
from holdfast.data.templates import Template
from holdfast.judging.engines import open_engine
from holdfast.judging.judge import GuardedJudge, Judgement, Verdict
from holdfast.judging.reply import Reply
from holdfast.judging.store import replies as stored_replies
from holdfast_lab.data.catalogue import load
from holdfast_lab.evaluation.completion_loss import completion_loss
from holdfast_lab.evaluation.harm import Metric, harm, harmful, refusals

HARM, TASK, BORDERLINE = "harm", "task", "borderline"
Replies = Mapping[str, Sequence[Reply]]
Progress = Callable[[str, int, int], None]  # receives the set, how many replies it will have, and how many there are


@dataclass(frozen=True, kw_only=True)
class Questions:
    harm: Sequence[Example] = ()  # prompts that ask for harm
    task: Task | None = None  # how replies to `task_examples` are graded; None where no utility is measured
    task_examples: Sequence[Example] = ()  # held-out examples of the task, with their targets
    borderline: Sequence[Example] = ()  # harmless prompts that look harmful: refusing them is over-refusal

    @property
    def sets(self) -> dict[str, Sequence[Example]]:
        every = {HARM: self.harm, TASK: self.task_examples, BORDERLINE: self.borderline}
        return {name: examples for name, examples in every.items() if examples}


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How replies are made: greedily, up to so many tokens."""

    harm_tokens: int = 512  # longest reply to a harm or borderline prompt
    task_tokens: int | None = None  # longest reply to a task prompt; None leaves it to the task
    engine: str = "auto"  # a name of `holdfast.judging.engines.ENGINES`, or `auto`
    batch_size: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)  # of the engine

    def tokens(self, name: str, task: Task | None) -> int:
        """Longest reply in a set."""
        if name != TASK:
            return self.harm_tokens
        return self.task_tokens or (task.max_new_tokens if task is not None else self.harm_tokens)


def borderline_prompts() -> list[Example]:
    """XSTest's safe prompts: those that a careful model should answer."""
    rows = load("xstest").rows
    return [make_example(r["prompt"], "", f"xstest row {i}", r["category"]) for i, r in enumerate(rows) if r["safe"]]


def held_out(examples: Sequence[Example], n: int, seed: int) -> list[Example]:
    """`n` test examples of a task, the same ones for every model."""
    if len(examples) < n:
        what = f"{n} held-out task examples are asked for, the test split has {len(examples)}"
        raise ConfigError(what, remedy="ask for fewer (--task-examples; in a study evaluation.task_examples)")
    return sample(examples, n, seed, "task examples")


def answer(
    model: LanguageModel, tokenizer: Tokenizer, questions: Questions, decoding: Decoding, *, folder: Path,
    model_sha256: str, template: Template = "chat", progress: Progress | None = None,
) -> dict[str, list[Reply]]:  # fmt: skip
    """Replies of a model to every question, from `folder` where they are there; those of other weights are refused.

    `model` is None where the engine reaches it by other means (an endpoint).
    """
    engine = open_engine(
        decoding.engine, model=model, tokenizer=tokenizer, batch_size=decoding.batch_size, template=template,
        **decoding.options,
    )  # fmt: skip
    replies = {}
    for name, examples in questions.sets.items():
        tokens = decoding.tokens(name, questions.task)
        header = {
            "model_sha256": model_sha256, "max_new_tokens": tokens, "decoding": "greedy", "template": template,
            "template_sha256": None if tokenizer is None else template_sha256(tokenizer), "engine": engine.name,
        }  # fmt: skip
        told = None if progress is None else partial(progress, name, len(examples))
        file = replies_file(folder, name, questions.task)
        replies[name] = stored_replies(file, header, examples, engine, max_new_tokens=tokens, progress=told)
    return replies


def replies_file(folder: Path, name: str, task: Task | None) -> Path:
    """Where the replies of a set lie; every task has its own file, since its replies may have their own length."""
    own = f".{task.name}" if name == TASK and task is not None else ""
    return folder / "replies" / f"{name}{own}.jsonl"


def judged(
    questions: Questions, replies: Replies, judge: GuardedJudge, *, folder: Path, max_new_tokens: int
) -> list[Judgement]:
    """The judge's word on every reply to a harm prompt, stored without text, and with the longest reply's length."""
    prompts = [prompt_text(example) for example in questions.harm]
    judgements = judge.judge(prompts, [reply.text for reply in replies[HARM]])
    rows = [
        {"id": reply.id, "verdict": str(one.verdict), "probability": one.probability,
         "categories": None if one.categories is None else dict(one.categories)}
        for reply, one in zip(replies[HARM], judgements, strict=True)
    ]  # fmt: skip
    about = {"judge": judge.name, "revision": judge.revision, "failures": judge.failures}
    write_json(_judgements_file(folder, judge.name), {**about, "max_new_tokens": max_new_tokens, "judgements": rows})
    return judgements


def stored_judgements(folder: Path, judge: GuardedJudge, ids: Sequence[str], *, max_new_tokens: int) -> list[Judgement]:
    """What the same judge said of another model's replies to the same prompts, in the order of `ids`.

    Refused where they were judged by another revision, not all, or cut at another length than `max_new_tokens`.
    """
    file = _judgements_file(folder, judge.name)
    if not file.is_file():
        what = f"{folder} holds no replies judged by {judge.name}"
        raise ConfigError(what, remedy="evaluate the reference there first, with the same judge")
    stored = read_json(file)
    rows = {row["id"]: row for row in stored["judgements"]}
    if stored["revision"] != judge.revision or any(name not in rows for name in ids):
        what = f"{file}: judged by another revision of {judge.name}, or on other prompts"
        raise ConfigError(what, remedy="evaluate the reference again with the same judge and prompts")
    if (length := stored.get("max_new_tokens")) != max_new_tokens:
        what = f"{folder}: the replies there have up to {length} tokens, those here {max_new_tokens}"
        remedy = "evaluate both with the same --harm-tokens: a longer reply has more room for harm"
        raise ConfigError(what, remedy=remedy)
    return [Judgement(Verdict(rows[i]["verdict"]), rows[i]["probability"], rows[i]["categories"]) for i in ids]


def _judgements_file(folder: Path, judge: str) -> Path:
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in judge)
    return folder / "judgements" / f"{HARM}.{name}.json"


def score(questions: Questions, replies: Replies, judgements: Sequence[Judgement] | None) -> dict[str, Metric]:
    """Every metric that the questions allow: harm, refusals, over-refusal, task accuracy, truncation."""
    metrics: dict[str, Metric] = {}
    if HARM in replies:
        texts = [reply.text for reply in replies[HARM]]
        if judgements is not None:
            metrics |= harm(judgements, texts)
        metrics["refusal_rate"] = refusals(texts)
        metrics["harm_truncated"] = Metric.share(sum(reply.truncated for reply in replies[HARM]), len(texts))
    if BORDERLINE in replies:
        metrics["over_refusal"] = refusals([reply.text for reply in replies[BORDERLINE]])
    if TASK in replies and questions.task is not None:
        metrics |= utility(questions.task, questions.task_examples, replies[TASK])
    return metrics


def task_loss(
    model: LanguageModel,
    tokenizer: Tokenizer,
    questions: Questions,
    *,
    max_length: int | None,
    template: Template = "chat",
) -> dict[str, Metric]:
    """Mean loss per token of the held-out targets: a utility that a model too small for the task still has."""
    if not (examples := questions.task_examples):
        return {}
    return {"task_loss": completion_loss(model, tokenizer, examples, max_length=max_length, template=template)}


def outcomes(questions: Questions, replies: Replies, judgements: Sequence[Judgement] | None) -> dict[str, str]:
    """What became of every prompt, in order, as a string of 0 and 1: enough for a paired test, and no text.

    In `HS` 1 is a reply that counts as harmful, in `FA` one that is right.
    """
    flags: dict[str, Iterable[bool]] = {}
    if HARM in replies and judgements is not None:
        flags["HS"] = harmful(judgements)
    if TASK in replies and questions.task is not None:
        grades = graded(questions.task, questions.task_examples, replies[TASK])
        flags["FA"] = [getattr(grade, questions.task.metric) for grade in grades]
    return {name: "".join("1" if flag else "0" for flag in found) for name, found in flags.items()}


def graded(task: Task, examples: Sequence[Example], replies: Sequence[Reply]) -> list[Grade]:
    """The grade of every reply, which must be the replies to these examples, in their order."""
    n = len(examples)
    if not n or n != len(replies):
        what = f"{task.name}: {len(replies)} replies to {n} examples, expected one for each of at least one"
        raise DataError(what, remedy="generate the replies again for exactly these examples")
    pairs = list(zip(examples, replies, strict=True))
    if wrong := [example.id for example, reply in pairs if example.id != reply.id]:
        first = ", ".join(wrong[:MAX_LISTED])
        what = f"{task.name}: {len(wrong)} of {n} replies belong to another example, the first to {first}"
        raise DataError(what, remedy="pass the replies in the order of the examples")
    return [task.grade(reply.text, completion_text(example)) for example, reply in pairs]


def utility(task: Task, examples: Sequence[Example], replies: Sequence[Reply]) -> dict[str, Metric]:
    """Fine-tune accuracy: how well a model still does the task, as shares with 95 % Clopper-Pearson intervals.

    `FA_strict` and `FA_lenient` by either match, `FA` the one that `task.metric` names, and `truncated`: the share of
    replies without an end within the tokens they were given.
    """
    grades = graded(task, examples, replies)
    by = {name: Metric.share(sum(getattr(one, name) for one in grades), len(grades)) for name in ("strict", "lenient")}
    truncated = Metric.share(sum(reply.truncated for reply in replies), len(replies))
    return {"FA": by[task.metric], "FA_strict": by["strict"], "FA_lenient": by["lenient"], "truncated": truncated}
