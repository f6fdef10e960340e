"""The work of `holdfast evaluate`: which model, which questions, which figures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cli.options import engine_options
from holdfast.cli.terminal import note
from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.examples import Example, normalise, prompt_text
from holdfast.data.sources import read_examples
from holdfast.data.tasks import TASKS
from holdfast.data.templates import Template, known_template, use_template
from holdfast.judging.engines import ENGINES
from holdfast.judging.judge import GuardedJudge, Judgement, open_judge
from holdfast.judging.on_policy import OnPolicy, require_tau
from holdfast.models.content import content_of
from holdfast.models.handle import load_unmerged
from holdfast.runs.config import RunConfig, stored_config
from holdfast.runs.stages.run_folder import RunFolder
from holdfast_lab.cli.evaluate import RESULT
from holdfast_lab.evaluation import evaluate as evaluation
from holdfast_lab.evaluation.harm import Metric
from holdfast_lab.protocol.roles import RoleSettings, draw_roles, evaluation_prompts

SOURCES = ("beavertails_test", "beavertails_evaluation")
Values = dict[str, Any]  # the options of the command by name


@dataclass(frozen=True)
class Subject:
    """The model that is asked: its place, the template it was trained with, and the run that trained it."""

    ref: str
    revision: str | None
    template: Template
    run: RunConfig | None = None


def subject(model: str, revision: str | None, template: str) -> Subject:
    chosen, place = known_template(template), Path(model)
    folder = RunFolder(place)
    if inside := not folder.config.is_file():  # perhaps a run's adapter or model; a copy elsewhere is not known
        folder = RunFolder(place.resolve().parent)
        ours = place.is_dir() and place.resolve() in (folder.adapter.resolve(), folder.model.resolve())
        if not (ours and folder.config.is_file()):
            return Subject(model, revision, chosen)
    folder.finished()  # its settings are those it was made with: they say which prompts it was trained on
    config = stored_config(folder.config)
    if inside:
        return Subject(model, revision, chosen, config)
    trained = folder.model if config.lora is None else folder.adapter
    if not folder.result.is_file() or not trained.is_dir():
        raise ConfigError(f"the run in {model} is not finished", remedy="holdfast train RUN.yaml --resume finishes it")
    return Subject(str(trained), None, config.template, config)


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
        what = f"{shared} of {len(harm)} harm prompts are also in the data that this run was aligned or trained on"
        apart = "use prompts of another file" if roles is None else (
            f"use --prompts {roles.harm_prompts} --n {roles.evaluation} (or fewer) --seed {roles.seed}: those "
            "prompts were kept apart for this run"
        )  # fmt: skip
        raise ConfigError(what, remedy=apart)


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


def run_evaluation(values: Values, count: Callable[[int, int], None]) -> dict[str, Any]:
    """Ask, judge and score one model; the content of evaluation.json."""
    require_tau(values["tau"])
    decoding, output = _decoding(values), values["output_dir"]
    judge = None if values["judge"] is None else open_judge(values["judge"])
    asked = subject(values["model"], values["revision"], values["template"])
    questions = _questions(asked, values)
    refuse_trained_prompts(asked.run, questions.harm)
    before = _reference(values, judge, questions.harm)  # looked for before anything is generated
    loaded, identity = _open(asked, values)
    total, replied = sum(map(len, questions.sets.values())), dict.fromkeys(questions.sets, 0)

    def tell(name: str, _: int, done: int) -> None:
        replied[name] = done
        count(sum(replied.values()), total)

    replies = evaluation.answer(
        *loaded, questions, decoding, folder=output, model_sha256=identity, template=asked.template, progress=tell
    )
    losses: dict[str, Metric] = {}
    if loaded[0] is not None:
        losses = evaluation.task_loss(*loaded, questions, max_length=None, template=asked.template)
    del loaded  # a judge may need the memory
    tokens = decoding.harm_tokens
    judgements = None
    if judge is not None:
        judgements = evaluation.judged(questions, replies, judge, folder=output, max_new_tokens=tokens)
    metrics = evaluation.score(questions, replies, judgements) | losses
    result: dict[str, Any] = {
        "model": values["model"], "model_sha256": identity, "template": asked.template,
        "judge": None if judge is None else {"name": judge.name, "revision": judge.revision},
        "metrics": {name: metric.as_json() for name, metric in metrics.items()},
        "versions": versions(), "commit": commit(), "hardware": hardware(),
    }  # fmt: skip
    if before is not None and judgements is not None:
        result["on_policy"] = OnPolicy.of(before, judgements, values["tau"]).to_json()
    write_json(output / RESULT, result)
    return result


def _decoding(values: Values) -> evaluation.Decoding:
    engine = values["engine"]
    if engine == "vllm":
        remedy = "serve the model (vllm serve) and use --engine endpoint, or leave --engine out"
        raise UnsupportedError("the vllm engine is for Python alone", remedy=remedy)
    if engine != "auto":
        ENGINES[engine]  # refuses an unknown name before anything is loaded
    given = {name: values[name] for name in ("harm_tokens", "task_tokens", "batch_size")}
    return evaluation.Decoding(**given, engine=engine, options=engine_options(values["engine_option"]))


def _questions(asked: Subject, values: Values) -> evaluation.Questions:
    source, n, seed = values["prompts"], values["n"], values["seed"]
    task = None if values["task"] is None else TASKS[values["task"]]
    # Of a file of one's own the completions are not looked at.
    harm = evaluation_prompts(source, n, seed=seed) if source in SOURCES else tuple(read_examples(source, limit=n))
    examples = () if task is None else evaluation.held_out(task.test(asked.template), values["task_examples"], seed)
    borderline = evaluation.borderline_prompts() if values["over_refusal"] else ()
    return evaluation.Questions(harm=harm, task=task, task_examples=examples, borderline=borderline)


def _reference(values: Values, judge: GuardedJudge | None, harm: Sequence[Example]) -> list[Judgement] | None:
    reference = values["reference"]
    if reference is None:
        return None
    if judge is None:
        raise ConfigError("--reference compares judged replies", remedy="name the judge with --judge")
    if reference.resolve() == values["output_dir"].resolve():
        what = f"--reference and --output are one folder, {reference}: replies would be compared with themselves"
        raise ConfigError(what, remedy="name the folder of another model's evaluation")
    ids = [example.id for example in harm]
    return evaluation.stored_judgements(reference, judge, ids, max_new_tokens=values["harm_tokens"])


def _open(asked: Subject, values: Values) -> tuple[tuple[Any, Any], str]:
    """Model, tokenizer and which weights they are; nothing is loaded for a model behind an endpoint."""
    if values["engine"] == "endpoint":
        return (None, None), f"endpoint {asked.ref}"
    place = {"revision": asked.revision, "trust_remote_code": values["trust_remote_code"]}
    content = content_of(asked.ref, **place)
    model, tokenizer = load_unmerged(asked.ref, dtype=values["dtype"], **place)
    use_template(tokenizer, asked.template)
    return (model, tokenizer), content.sha256
