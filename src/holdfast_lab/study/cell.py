"""The work of a study: aligning a model once, and one cell from its data to its metrics.

align      base --(safe pairs)--> adapter                     shared by all cells of a model
train      base + adapter --(poisoned task, defense)--> adapter
generate   replies to harm, task and borderline prompts       stored; a killed cell goes on where it was
judge      harm probabilities of the replies                  the model is freed before the judge is loaded
score      metrics with intervals

`require_ready` refuses, before anything is trained, what could not be finished in this way.

The safety set of a study may be the aligned model's own refusals: a constraint protects what its prompts are like, and
where the alignment pairs ask other things than the attack does, the model is asked the attack's kind of prompts (the
`asked` role, which no other role shares).
"""

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.file_lock import locked
from holdfast.core.files import read_json, write_json, write_text
from holdfast.core.hashing import sha256_file, sha256_json, sha256_text
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.examples import prompt_text
from holdfast.data.tasks import TASKS, poison_count
from holdfast.data.templates import use_template
from holdfast.judging.judge import open_judge
from holdfast.models.content import content_of
from holdfast.models.handle import load_unmerged
from holdfast.records.audit import Audit
from holdfast.records.stored_evidence import believed_result
from holdfast.runs.config import config_from_dict, stored_config
from holdfast.runs.config.resolve import resolved
from holdfast_lab.data.catalogue import NAMES, load
from holdfast_lab.evaluation import evaluate as evaluation
from holdfast_lab.evaluation.evaluate import held_out
from holdfast_lab.evaluation.harm import Metric
from holdfast_lab.evaluation.refusal_rules_1 import is_refusal
from holdfast_lab.protocol.roles import Roles, RoleSettings, draw_roles
from holdfast_lab.study.cells import Alignment, Cell, Model
from holdfast_lab.study.protocol import Protocol, align_settings, finetune_settings

TOKENS = 128  # longest reply that is kept
FEWEST = 100  # replies to keep, where as many are asked for
RUN, EVALUATION, TIMINGS = "run", "evaluation", "timings.json"
SOMEWHERE = Path("study")  # stands for folders that a run file has to name, and that are not made here
ALIGNED = "aligned/adapter"  # stands for the adapter that a cell starts from, which does not exist yet


def kept_file(alignment: Path) -> Path:
    return alignment / "kept" / "safety.jsonl"


def adapter_of(folder: Path) -> Path:
    return folder / RUN / "adapter"


def _roles(protocol: Protocol) -> Roles:
    return draw_roles(RoleSettings(**protocol.roles.model_dump()))


def _opened(protocol: Protocol, ref: str | Path, revision: str | None = None) -> tuple[LanguageModel, Tokenizer]:
    """Model and tokenizer, which renders prompts as in training."""
    model, tokenizer = load_unmerged(ref, revision=revision, dtype=protocol.dtype)
    use_template(tokenizer, protocol.template)
    return model, tokenizer


def keep_replies(protocol: Protocol, adapter: Path, alignment: Path) -> dict[str, object]:
    """Ask the aligned model, keep its refusals that came to an end within 128 tokens, and say how many there are."""
    asked, how = _roles(protocol).asked, protocol.evaluation
    decoding = evaluation.Decoding(harm_tokens=TOKENS, engine=how.engine, batch_size=how.batch_size)
    replies = evaluation.answer(
        *_opened(protocol, adapter), evaluation.Questions(harm=asked), decoding,
        folder=kept_file(alignment).parent, model_sha256=content_of(adapter).sha256, template=protocol.template,
    ).get("harm", [])  # fmt: skip
    rows = [
        {"prompt": prompt_text(example), "completion": reply.text, "category": example.category}
        for example, reply in zip(asked, replies, strict=True)
        if not reply.truncated and is_refusal(reply.text)
    ]
    fewest = max(1, min(FEWEST, protocol.roles.asked))
    if len(rows) < fewest:
        raise DataError(
            f"the aligned model refused {len(rows)} of {len(replies)} prompts that ask for harm, expected at least "
            f"{fewest}: there is nothing to keep",
            remedy="align longer (protocol.align.train), ask more (protocol.roles.asked), or set protocol.keep: pairs",
        )
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    write_text(kept_file(alignment), text, mode=0o600)
    return {"asked": len(asked), "kept": len(rows), "kept_sha256": sha256_text(text)}


def run_alignment(node: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Align a model on the protocol's safe pairs; an interrupted alignment goes on from its checkpoint.

    `node` has `protocol`, `model` (`ref`, `revision`) and `align`, the alignment-stage defense or `sft`.
    """
    from holdfast.runs.pipeline import run

    protocol, model = Protocol.model_validate(node["protocol"]), node["model"]
    settings = align_settings(
        protocol, model=model["ref"], revision=model.get("revision"), defense=node["align"], output_dir=folder / RUN
    )
    with _timed(folder, "align"):
        result = run(config_from_dict(settings, complete=True), resume=True)
    outcome = {"adapter": str(adapter_of(folder)), "steps": result.values["steps"]}
    if protocol.keep == "replies":
        with _timed(folder, "keep"):
            outcome |= keep_replies(protocol, adapter_of(folder), folder)
    return outcome


def run_cell(node: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """One cell from data to metrics: what its result file holds.

    `node` has `protocol`, `cell` (kind, model, task, defense, align, poison_ratio, seed), `aligned` (the alignment's
    folder; null for the base row) and `shared` (a folder for what several cells of one model share).
    """
    protocol, cell = Protocol.model_validate(node["protocol"]), node["cell"]
    open_judge(protocol.judge())  # refuses before anything is trained; weights are read when they are needed
    work = _Cell(protocol, cell, folder, None if node.get("aligned") is None else Path(node["aligned"]))
    place = folder / EVALUATION
    if cell["kind"] != "defense":  # harm replies of the base and the aligned model serve all tasks
        place = Path(node["shared"]) / Alignment(Model(**cell["model"]), cell["align"]).id
    metrics: dict[str, Metric] = {}
    if cell["kind"] == "defense":
        with _timed(folder, "train"):
            metrics = work.train()
    roles = _roles(protocol)
    evaluated, judge, hashes, each = work.evaluate(roles, place)
    metrics |= evaluated
    record = protocol.record(judge=judge, roles=roles.record)
    return {
        "version": 1,
        "model": cell["model"]["name"], "model_ref": cell["model"]["ref"], "task": cell["task"],
        "defense": cell["defense"]["name"], "label": cell["defense"]["label"], "setting": cell["defense"]["setting"],
        "align": cell["align"], "poison_ratio": cell["poison_ratio"], "seed": cell["seed"],
        "protocol_sha256": sha256_json(record), "protocol": record,
        "metrics": {name: metric.as_json() for name, metric in metrics.items()}, "outcomes": each,
        "seconds": _timings(folder) | ({} if work.aligned is None else _timings(work.aligned)),
        "provenance": work.provenance() | hashes,
    }  # fmt: skip


@dataclass(frozen=True)
class _Cell:
    protocol: Protocol
    cell: Mapping[str, Any]
    folder: Path
    aligned: Path | None

    def train(self) -> dict[str, Metric]:
        """Fine-tune on the poisoned task; violation rates of the held-out and the constraint pairs.

        In the protocol's unit and tau, by which all rows are compared; where the defense enforces a limit, also in its.
        """
        from holdfast.runs.pipeline import run

        if self.aligned is None:
            raise ConfigError("a cell with a defense needs an aligned model", remedy="name its alignment")
        settings = finetune_settings(
            self.protocol, self.cell, model=str(adapter_of(self.aligned)), output_dir=self.folder / RUN, kept=self.kept
        )
        made = run(config_from_dict(settings, complete=True), resume=True)
        measure, own = self.protocol.measure, self.constraint()
        compared = violations(self.folder / RUN, unit=measure.unit, tau=measure.tau)
        if own is None or not made.values["defense"]["constrains"]:
            return compared
        steered = violations(self.folder / RUN, unit=own["unit"], tau=own["tau"])
        return compared | {f"own_{name}": metric for name, metric in steered.items()}

    def constraint(self) -> dict[str, Any] | None:
        file = self.folder / RUN / "config.yaml"
        return dict(resolved(stored_config(file))["constraint"]) if file.is_file() else None

    @property
    def kept(self) -> Path | None:
        """The aligned model's own replies, where they are what is kept."""
        return None if self.aligned is None or self.protocol.keep != "replies" else kept_file(self.aligned)

    def provenance(self) -> dict[str, object]:
        """With how steps were computed (`two_pass`, `fused` or `fused, recorded`), and why not fused."""
        result, task = believed_result(self.folder / RUN) or {}, self.cell["task"]
        return {
            "versions": versions(), "commit": commit(), "hardware": hardware(), "defense": self.cell["defense"],
            "constraint": self.constraint(), "step": result.get("step"), "step_declined": result.get("step_declined"),
            "kept_sha256": None if self.kept is None else sha256_file(self.kept),
            "task_data": load(task, "train").describe() if task in NAMES else None,
        }  # fmt: skip

    def model_ref(self) -> tuple[str, str | None]:
        if self.cell["kind"] == "base":
            return self.cell["model"]["ref"], self.cell["model"].get("revision")
        assert self.aligned is not None
        return str(adapter_of(self.aligned if self.cell["kind"] == "aligned" else self.folder)), None

    def evaluate(
        self, roles: Roles, place: Path
    ) -> tuple[dict[str, Metric], dict[str, Any], dict[str, Any], dict[str, str]]:
        """Metrics, the judge that gave them, hashes of what they were taken from, and outcomes per prompt."""
        import torch

        asked, template, task = self.protocol.evaluation, self.protocol.template, TASKS[self.cell["task"]]
        examples = evaluation.held_out(task.test(template), asked.task_examples, self.protocol.roles.seed)
        borderline = evaluation.borderline_prompts() if asked.over_refusal else ()
        questions = evaluation.Questions(
            harm=roles.evaluation, task=task, task_examples=examples, borderline=borderline
        )
        ref, revision = self.model_ref()
        content = content_of(ref, revision=revision)
        how = asked.model_dump(include={"harm_tokens", "task_tokens", "engine", "batch_size"})
        decoding = evaluation.Decoding(**how)
        with locked(place), _timed(self.folder, "generate"):
            model, tokenizer = _opened(self.protocol, ref, revision)
            replies = evaluation.answer(
                model, tokenizer, questions, decoding, folder=place, model_sha256=content.sha256, template=template
            )
            length = self.protocol.train.get("max_length")
            losses = evaluation.task_loss(model, tokenizer, questions, max_length=length, template=template)
            del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        with _timed(self.folder, "judge"):
            judge = open_judge(self.protocol.judge())
            judgements = evaluation.judged(questions, replies, judge, folder=place, max_new_tokens=asked.harm_tokens)
        with _timed(self.folder, "score"):
            metrics = evaluation.score(questions, replies, judgements)
        files = {name: evaluation.replies_file(place, name, task) for name in questions.sets}
        hashes = {
            "model_sha256": content.sha256,
            "replies_sha256": {name: sha256_file(file) for name, file in files.items()},
            "task_examples_sha256": sha256_json([example.id for example in questions.task_examples]),
        }
        each = evaluation.outcomes(questions, replies, judgements)
        return metrics | losses, {"name": judge.name, "revision": judge.revision}, hashes, each


def violations(run: Path, *, unit: str, tau: float) -> dict[str, Metric]:
    """Share of the monitor and constraint pairs with D > tau in `unit`, whatever the run was steered by."""
    measured, shares = Audit.load(run), {}
    for role, name in (("monitor", "violation_rate"), ("constraint", "violation_rate_constraint")):
        values = measured.degradations(unit, role=role)
        if len(values):
            shares[name] = Metric.share(int(np.sum(~(values <= tau))), len(values))  # NaN counts as a violation
    return shares


@contextmanager
def _timed(folder: Path, stage: str) -> Iterator[None]:
    """Add the seconds of a stage to the folder's timings, over all processes that worked on it."""
    start = time.monotonic()
    try:
        yield
    finally:
        known = _timings(folder)
        known[stage] = round(known.get(stage, 0.0) + time.monotonic() - start, 3)
        write_json(folder / TIMINGS, known)


def _timings(folder: Path) -> dict[str, float]:
    file = folder / TIMINGS
    return dict(read_json(file)) if file.is_file() else {}


def require_ready(protocol: Mapping[str, Any], cells: Sequence[Cell], *, data: bool = True) -> None:
    """Refuse cells that would fail after hours of training; `protocol` holds the fields of a `Protocol`.

    Looked at are settings and the judge's folder; with `data` the roles are drawn and the tasks' held-out splits read
    too, which may be downloaded for it. No weights are loaded.
    """
    settings = Protocol.model_validate(protocol)
    _require_judge(settings)
    for place in dict.fromkeys(Path(cell.model.ref) for cell in cells):
        if place.is_absolute() and not place.is_dir():  # a hub id is asked for when it is loaded
            raise ConfigError(
                f"models: there is no folder {place}",
                remedy="correct the path (in a study, folders are relative to its file), or name a hub id",
            )
    for alignment in dict.fromkeys(cell.alignment for cell in cells if cell.alignment is not None):
        run = align_settings(settings, model="embedded", revision=None, defense=alignment.name, output_dir=SOMEWHERE)
        config_from_dict(run, where=f"alignment {alignment.id}", complete=True)
    for cell in (cell for cell in cells if cell.kind == "defense"):
        _require_run(settings, cell)
    if data and cells:
        _roles(settings)
    for task in dict.fromkeys(cell.task for cell in cells if data):
        held_out(TASKS[task].test(settings.template), settings.evaluation.task_examples, settings.roles.seed)


def _require_judge(settings: Protocol) -> None:
    spec = settings.judge()
    judge = open_judge(spec)
    if judge.name == "trained":
        from holdfast.judging.judges.trained import read_description
        from holdfast.models.source import resolve

        options = {"folder": spec} if isinstance(spec, str) else dict(spec)
        _ = judge.revision  # hashes the folder's files, so that a damaged one is found
        described = read_description(Path(options.get("folder") or options["name"]))
        if described["kind"] == "lora":  # one trained in full needs no base
            base, given = described["base"], options.get("base")
            resolve(given or base["ref"], None if given else base["revision"], False)


def _require_run(settings: Protocol, cell: Cell) -> None:
    assert cell.poison_ratio is not None  # every cell with a defense has one
    kept = kept_file(SOMEWHERE) if settings.keep == "replies" else None
    run = finetune_settings(settings, asdict(cell), model=ALIGNED, output_dir=SOMEWHERE, kept=kept)
    config_from_dict(run, where=f"cell {cell.id}", complete=True)
    poison = poison_count(cell.poison_ratio, settings.size)
    if poison > settings.roles.poison:
        raise ConfigError(
            f"cell {cell.id}: {poison} of {settings.size} rows are to be poison, the poison role has "
            f"{settings.roles.poison}",
            remedy="raise protocol.roles.poison, or lower protocol.size",
        )
