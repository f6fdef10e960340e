"""The work of `holdfast evaluate`: which model, which questions, which figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.options import engine_options
from holdfast.cli.terminal import note
from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.registry import nearest
from holdfast.data.examples import Example, normalise, prompt_text
from holdfast.data.sources import read_examples
from holdfast.data.tasks import TASKS
from holdfast.data.templates import Template, use_template
from holdfast.judging.engines import ENGINES
from holdfast.judging.judge import GuardedJudge, Judgement, open_judge
from holdfast.judging.on_policy import OnPolicy, require_tau
from holdfast.models.content import content_of
from holdfast.models.unmerged import load_unmerged
from holdfast_lab.cli.evaluate import RESULT
from holdfast_lab.evaluation.evaluate import (
    Decoding,
    Questions,
    answer,
    borderline_prompts,
    held_out,
    judged,
    score,
    stored_judgements,
    task_loss,
)
from holdfast_lab.protocol.roles import RoleSettings, draw_roles, evaluation_prompts

if TYPE_CHECKING:
    from holdfast.runs.config import RunConfig

SOURCES = ("beavertails_test", "beavertails_evaluation")


@dataclass(frozen=True)
class Subject:
    """The model that is asked: its place, the template it was trained with, and the run that trained it."""

    ref: str
    revision: str | None
    template: Template
    run: RunConfig | None = None


def subject(model: str, revision: str | None, template: str) -> Subject:
    """A model, or what the run in a folder trained."""
    from holdfast.runs.config import stored_config
    from holdfast.runs.stages.run_folder import RunFolder

    known = ("chat", "alpaca", "none")
    if template not in known:
        raise ConfigError(f"template {template!r} is unknown", remedy=nearest(template, list(known)))
    folder = RunFolder(Path(model))
    chosen: Any = template
    if not folder.config.is_file():
        return Subject(model, revision, chosen, _run_around(Path(model)))
    folder.finished()  # its settings are those it was made with: they say which prompts it was trained on
    config = stored_config(folder.config)
    trained = folder.model if config.lora is None else folder.adapter
    if not folder.result.is_file() or not trained.is_dir():
        raise ConfigError(f"the run in {model} is not finished", remedy="holdfast train RUN.yaml --resume finishes it")
    return Subject(str(trained), None, config.template, config)


def _run_around(model: Path) -> RunConfig | None:
    from holdfast.runs.config import stored_config
    from holdfast.runs.stages.run_folder import RunFolder

    folder = RunFolder(model.resolve().parent)
    ours = model.is_dir() and model.resolve() in (folder.adapter.resolve(), folder.model.resolve())
    if not (ours and folder.config.is_file()):
        return None
    folder.finished()
    return stored_config(folder.config)


def refuse_trained_prompts(run: RunConfig | None, harm: Sequence[Example]) -> None:
    """Refuse prompts that a run was trained on, steered by or aligned with: they do not measure harm.

    Of a run on the protocol's data only the evaluation role of its own seed and size is kept apart from them. Where
    the data of a run cannot be read any more, that is said instead.
    """
    if run is None:
        return
    roles = None if run.roles is None else RoleSettings(**run.roles.model_dump())
    known = {normalise(prompt_text(example)) for example in _used(run, roles)}
    if shared := sum(normalise(prompt_text(example)) in known for example in harm):
        apart = "use prompts of another file" if roles is None else (
            f"use --prompts {roles.harm_prompts} --n {roles.evaluation} (or fewer) --seed {roles.seed}: those "
            "prompts were kept apart for this run"
        )  # fmt: skip
        raise ConfigError(
            f"{shared} of {len(harm)} harm prompts are also in the data that this run was aligned or trained on",
            remedy=apart,
        )


def _used(run: RunConfig, roles: RoleSettings | None) -> Iterator[Example]:
    from holdfast.runs.pipeline import read_data

    if roles is not None:
        drawn = draw_roles(roles)
        yield from (*drawn.align, *drawn.constraint, *drawn.asked, *drawn.poison, *drawn.harmful)
        return
    try:
        data = read_data(run)
    except (ConfigError, DataError) as error:
        note(f"not checked whether the run was trained on these prompts: {error.what}")
        return
    yield from data.task
    for split in data.safety.values():
        yield from split.constraint


def _reference(
    reference: Path | None, output_dir: Path, judge: GuardedJudge | None, harm: Sequence[Example], tokens: int
) -> list[Judgement] | None:
    if reference is None:
        return None
    if judge is None:
        raise ConfigError("--reference compares judged replies", remedy="name the judge with --judge")
    if reference.resolve() == output_dir.resolve():
        raise ConfigError(
            f"--reference and --output-dir are one folder, {reference}: replies would be compared with themselves",
            remedy="name the folder of another model's evaluation",
        )
    return stored_judgements(reference, judge, [example.id for example in harm], max_new_tokens=tokens)


def run_evaluation(
    *,
    model: str,
    output_dir: Path,
    judge: str | None,
    reference: Path | None,
    tau: float,
    template: str,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,
    count: Callable[[int, int], None],
    **how: Any,
) -> dict[str, Any]:
    """Ask, judge and score one model; the content of evaluation.json. `how` are the command's other options."""
    require_tau(tau)
    decoding = _decoding(how)
    judging = None if judge is None else open_judge(judge)
    asked = subject(model, revision, template)
    questions = _questions(asked, how)
    refuse_trained_prompts(asked.run, questions.harm)
    before = _reference(reference, output_dir, judging, questions.harm, decoding.harm_tokens)
    loaded, identity = _open(asked, decoding.engine, dtype=dtype, trust_remote_code=trust_remote_code)
    replies = answer(
        *loaded, questions, decoding, folder=output_dir, model_sha256=identity, template=asked.template,
        progress=_telling(questions, count),
    )  # fmt: skip
    losses = {} if loaded[0] is None else task_loss(*loaded, questions, max_length=None, template=asked.template)
    del loaded  # a judge may need the memory
    judgements = None if judging is None else judged(
        questions, replies, judging, folder=output_dir, max_new_tokens=decoding.harm_tokens
    )  # fmt: skip
    metrics = score(questions, replies, judgements) | losses
    found: dict[str, Any] = {
        "model": model, "model_sha256": identity, "template": asked.template,
        "judge": None if judging is None else {"name": judging.name, "revision": judging.revision},
        "metrics": {name: metric.as_json() for name, metric in metrics.items()},
        "versions": versions(), "commit": commit(), "hardware": hardware(),
    }  # fmt: skip
    if before is not None and judgements is not None:
        found["on_policy"] = OnPolicy.of(before, judgements, tau).to_json()
    write_json(output_dir / RESULT, found)
    return found


def _decoding(how: dict[str, Any]) -> Decoding:
    engine = how["engine"]
    if engine == "vllm":
        raise UnsupportedError(
            "the vllm engine is for Python alone",
            remedy="serve the model (vllm serve) and use --engine endpoint, or leave --engine out",
        )
    if engine != "auto":
        ENGINES[engine]  # refuses an unknown name before anything is loaded
    return Decoding(
        harm_tokens=how["harm_tokens"], task_tokens=how["task_tokens"], engine=engine, batch_size=how["batch_size"],
        options=engine_options(how["engine_option"]),
    )  # fmt: skip


def _questions(asked: Subject, how: dict[str, Any]) -> Questions:
    task, source, n, seed = how["task"], how["prompts"], how["n"], how["seed"]
    task = None if task is None else TASKS[task]
    # Of a file of one's own the completions are not looked at.
    harm = evaluation_prompts(source, n, seed=seed) if source in SOURCES else tuple(read_examples(source, limit=n))
    examples = () if task is None else held_out(task.test(asked.template), how["task_examples"], seed)
    borderline = borderline_prompts() if how["over_refusal"] else ()
    return Questions(harm=harm, task=task, task_examples=examples, borderline=borderline)


def _open(asked: Subject, engine: str, *, dtype: str, trust_remote_code: bool) -> tuple[tuple[Any, Any], str]:
    if engine == "endpoint":
        return (None, None), f"endpoint {asked.ref}"
    content = content_of(asked.ref, revision=asked.revision, trust_remote_code=trust_remote_code)
    model, tokenizer = load_unmerged(
        asked.ref, revision=asked.revision, dtype=dtype, trust_remote_code=trust_remote_code
    )
    use_template(tokenizer, asked.template)
    return (model, tokenizer), content.sha256


def _telling(questions: Questions, count: Callable[[int, int], None]) -> Callable[[str, int, int], None]:
    total = sum(len(examples) for examples in questions.sets.values())
    finished = dict.fromkeys(questions.sets, 0)

    def tell(name: str, done: int, _: int) -> None:
        finished[name] = done
        count(sum(finished.values()), total)

    return tell
