"""The data of a run: what to learn, the safety examples with their roles, and what asking theta_0 changes of both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from holdfast.certification.openings import scope_of
from holdfast.core.errors import DataError
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.data.examples import Example, as_chat, searchable_texts, uniform
from holdfast.data.rows import BadRowsError, Problems
from holdfast.data.sources import read_examples
from holdfast.data.splits import Split, move_leaks, require_apart, require_unseen, split_examples, split_from_roles
from holdfast.data.tasks import PAPER, PROTOCOLS, TASKS, Roles, poisoned
from holdfast.data.templates import Template
from holdfast.runs.config.resolve import ResolvedRun
from holdfast.screening.asking import asker_of, progress_to
from holdfast.screening.record import FOLDER, fixed_screening
from holdfast.screening.screen import Screening, ask_and_screen, belongs_to, content_sha256
from holdfast.training.hooks import Row
from holdfast.training.support import require_whole_model

TASK_SIZE = 1000  # N of a named task, as in the paper


@dataclass(frozen=True)
class Prepared:
    """The examples of a run: what to learn, and per safety set what to steer by, watch and certify on."""

    task: list[Example]
    safety: dict[str, Split]
    harmful: list[Example] | None = None
    skipped: dict[str, Problems] = field(default_factory=dict)
    """Malformed rows that were left out on request, by block: `task`, `harmful` or `safety NAME`."""


def row_counts(data: Prepared) -> dict[str, object]:
    """What became of the rows: used, skipped as malformed, and of the safety sets duplicates and contradictions.

    `duplicates_dropped` have the prompt and completion of an earlier row; `contradictory_prompts` occur with more than
    one completion, all of which are kept.
    """

    def used(rows: int, name: str) -> dict[str, object]:
        found = data.skipped.get(name)
        listed = {} if found is None or not found.total else {"skipped_rows": list(found.listed)}
        return {"rows": rows, "skipped": 0 if found is None else found.total, **listed}

    safety = {
        name: {
            **used(sum(split.record.counts.values()), f"safety {name}"),
            "duplicates_dropped": split.record.duplicates_dropped,
            "contradictory_prompts": split.record.contradictory_prompts,
        }
        for name, split in data.safety.items()
    }
    harmful = {} if data.harmful is None else {"harmful": used(len(data.harmful), "harmful")}
    return {"task": used(len(data.task), "task"), "safety": safety, **harmful}


def prepare(
    task: Mapping[str, Any], safety: Mapping[str, Mapping[str, Any]], *, template: Template, seed: int,
    roles: Mapping[str, Any] | None = None, harmful: Mapping[str, Any] | None = None,
) -> Prepared:  # fmt: skip
    """Read all data of a run and split every safety set once, by prompt.

    `task` holds arguments of `read_examples` with the source under `data`; or the `name` of a task with `size` and
    `poison_ratio`; or `role: align`. A safety set likewise, with `fractions` and `on_leak`, or `role: constraint`;
    harmful pairs likewise, or `role: harmful`. Unless the template is `none`, prompt/completion rows become one user
    and one assistant turn. `roles` are settings of the protocol.
    """
    source = _Source(template, seed, roles)
    examples = source.task(task)
    pairs = None if harmful is None else source.harmful(harmful)
    texts = [text for example in [*examples, *(pairs or [])] for text in searchable_texts(example)]
    splits = {}
    for name, block in safety.items():
        split = source.safety(block, name)
        if block["on_leak"] == "move":
            split = move_leaks(split, texts)
        require_unseen(split.certify, texts)
        splits[name] = split
    require_apart(splits)
    return Prepared(task=examples, safety=splits, harmful=pairs, skipped=source.skipped)


@dataclass(frozen=True)
class _Source:
    template: Template
    seed: int
    settings: Mapping[str, Any] | None
    skipped: dict[str, Problems] = field(default_factory=dict)

    @cached_property
    def roles(self) -> Roles:
        assert self.settings is not None  # the settings of a run that names a task or a role have them
        return PROTOCOLS[PAPER](self.settings)

    def task(self, block: Mapping[str, Any]) -> list[Example]:
        if block.get("role") is not None:
            return self._shaped(self.roles.align)
        if block.get("name") is None:
            return self._read(block, "task")
        rows = TASKS[block["name"]].train(self.template)
        ratio = block.get("poison_ratio") or 0.0
        poison = self.roles.poison if ratio else ()
        mixed = poisoned(rows, poison, size=block.get("size") or TASK_SIZE, ratio=ratio, seed=self.seed)
        return self._shaped(mixed)

    def safety(self, block: Mapping[str, Any], name: str) -> Split:
        if block.get("role") is not None:
            named = (self.roles.constraint, self.roles.monitor, self.roles.certify)
            return split_from_roles(*(self._shaped(examples) for examples in named))
        return split_examples(self._read(block, f"safety {name}"), fractions=tuple(block["fractions"]), seed=self.seed)

    def harmful(self, block: Mapping[str, Any]) -> list[Example]:
        return self._shaped(self.roles.harmful) if block.get("role") is not None else self._read(block, "harmful")

    def _read(self, block: Mapping[str, Any], name: str) -> list[Example]:
        reading = {key: block.get(key) for key in ("columns", "split", "subset", "limit", "revision")}
        if block.get("skip_bad"):
            reading["skipped"] = self.skipped[name] = Problems(str(block["data"]))
        try:
            return self._shaped(read_examples(block["data"], **reading))
        except BadRowsError as error:
            if block.get("skip_bad"):
                raise
            what = error.what
            raise DataError(what, remedy=f"{error.remedy}; --skip-bad leaves them out, if they are few") from error

    def _shaped(self, examples: Sequence[Example]) -> list[Example]:
        if self.template == "none":
            return uniform(examples)
        try:
            return [as_chat(example) for example in examples]
        except DataError as error:
            raise DataError(error.what, remedy=f"{error.remedy}; or set `template: none`") from error


def hold(
    plan: ResolvedRun, data: Prepared, model: LanguageModel, tokenizer: Tokenizer, *, model_sha256: str,
    started: bool, listeners: Sequence[Callable[[Row], None]] = (),
) -> Screening:  # fmt: skip
    """The screening of a run that asks: made before its first step, read from the run folder afterwards.

    `model` is theta_0, loaded and without a new adapter; `data` has the task, and the safety sets that the user wrote.
    """
    run, arguments, settings, template = plan.folder, plan.arguments, plan.screening, plan.config.template
    assert settings is not None  # asked of runs that ask
    require_whole_model(
        arguments, "screening or a behaviour monitor",
        "screen on one device first (holdfast screen); train on its kept rows with `safety: {data: FILE}` and "
        "`monitor: {prompts: 0}`; `holdfast certify` asks the trained model",
    )  # fmt: skip

    def make() -> Screening:
        if getattr(model, "hf_device_map", None) is None:
            model.to(arguments.device)
        asker = asker_of(
            model, tokenizer, model_sha256=model_sha256, template=template, engine=plan.config.screening.engine,
            options=plan.config.screening.engine_options, progress=progress_to(listeners),
        )  # fmt: skip
        listed = run.with_name(f"{run.name}-conflicts.jsonl")
        return ask_and_screen(model, data.task, asker, settings, pairs=data.safety.values(), listed=listed)

    bound = belongs_to(model_sha256, data.task, settings, template)
    return fixed_screening(run / FOLDER, bound, make, started=started)


def share_scope(model_sha256: str, task: Sequence[Example]) -> str:
    """Within what the openings of bundled certify prompts are counted: this model before, and this task."""
    return scope_of(model_sha256, content_sha256(task))
