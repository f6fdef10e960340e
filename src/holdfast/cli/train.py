"""`holdfast train`: run a run file."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.certification.kept import Shown, degraded_words, failures, stored_figures, way_back
from holdfast.cli.check import left_out
from holdfast.cli.options import Json, Opt, Overrides, RunFile, SkipBad, TrustRemoteCode
from holdfast.cli.progress import show_progress
from holdfast.cli.terminal import (
    duration,
    interruptible,
    note,
    note_loading,
    quiet_libraries,
    require_verdict,
    say,
    say_json,
)
from holdfast.core.percent import exact_percent, percent, percent_up

if TYPE_CHECKING:
    from holdfast.runs.config import RunConfig
    from holdfast.runs.pipeline import RunResult


def train(
    run: RunFile,
    overrides: Overrides = None,
    resume: Annotated[bool, Opt("--resume", help="Continue from the newest checkpoint.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    skip_bad: SkipBad = False,
    json: Json = False,
) -> None:
    """Fine-tune under the safety constraint.

    Writes the run folder: adapter, result.json, events.jsonl.

    \b
    Example:
      holdfast train run.yaml train.learning_rate=1e-4 output_dir=runs/second
    """
    from holdfast.demo.starter import require_refusals
    from holdfast.runs.config import load_config

    note_loading()  # settings are checked against the trainer's own
    config = load_config(run, overrides or ())
    require_refusals(config.model, config.refusal_prompts)
    config = config.skipping_bad_rows() if skip_bad else config
    from holdfast.training.hooks import DEFENSES

    constrains = DEFENSES[config.defense.name].constrains
    quiet_libraries()
    from holdfast.runs.pipeline import run as run_pipeline

    advice = "replies are kept; `--resume` continues from the newest checkpoint, or starts anew where none was saved"
    began = time.monotonic()
    with interruptible(advice), show_progress() as progress:
        result = run_pipeline(config, resume=resume, listeners=[progress], trust_remote_code=trust_remote_code)
    if os.environ.get("RANK", "0") != "0":  # one of several processes: the first speaks for all
        return
    if json:
        say_json({"folder": str(result.folder), **result.values})
    else:
        _show(result, config, constrains, time.monotonic() - began)
    # Exit code 4 where behaviour was lost, whatever the defense, or a defense that promises the constraint broke it.
    held = all(entry["feasible"] for entry in result.values["safety"].values())
    lost = list(failures(stored_figures(result.values)))
    for cause, remedy in lost:
        note(f"{'the constraint holds, but ' if held and constrains else ''}{cause}\n  What to do: {remedy}")
    require_verdict(not lost and (result.feasible or not constrains))


def _show(result: RunResult, config: RunConfig, constrains: bool, seconds: float) -> None:
    from holdfast.core import event_log
    from holdfast.reporting.facts import CONFLICTS, conflict_lines, task_loss

    figures = stored_figures(result.values)
    for name, figure in figures.items():
        say(figure.line(name))
    if led := way_back(result.values):
        say(led)
    written = "model" if config.lora is None else "adapter"
    steps, trained = result.values["steps"], duration(result.values["seconds"])
    say(f"{steps} steps in {trained}, {duration(seconds)} with asking and measuring; {result.folder / written}")
    if discarded := result.values.get("spikes", {}).get("discarded"):
        say(f"{discarded} steps discarded as loss spikes (`event: spike` in events.jsonl)")
    for words in task_loss(event_log.read(result.folder / "events.jsonl")):
        say(f"task loss: {words}")
    unused = left_out(result.values["data"]) if "data" in result.values else []  # of this version's runs
    for line in [*unused, *screening_lines(result.values.get("screening"))]:
        say(line)
    for name, entry in result.values["safety"].items():
        say(describe_entry(entry, name if config.named else ""))
    if result.values["safety"] and not constrains:
        say(f"{config.defense.name} does not enforce this limit: the model was only measured by it")
    found = result.values.get("screening") or {}
    if result.values["safety"] and not found.get("asked_rows"):
        why = "none of them has a prompt to ask" if found.get("unaskable") else "`safety: auto` asks their prompts"
        say(f"the task's rows were not screened: {why}")
    if found.get("dropped"):
        where = f" ({lines})" if (lines := conflict_lines(result.folder, dropped=True)) else ""
        say(
            f"look through the rows that were left out{where}: {result.folder / CONFLICTS};"
            " a model that refuses too much refuses some of them"
        )
    if found.get("asked_rows") and config.screening.judge is None:
        say("rows whose prompts the model answers are trained on; `screening: {judge: NAME}` reads their targets")
    for line in _ending([figure.shown for figure in figures.values()], shlex.quote(str(result.folder))):
        say(line)


def _ending(shown: Sequence[Shown], folder: str) -> list[str]:
    """Whether behaviour was kept, in a sentence, and what to do next; what was lost is said with its remedy."""
    report = f"next: holdfast report {folder}"
    if not shown or Shown.OVER in shown:
        return [report]
    if open_ := shown.count(Shown.NOT_SHOWN):
        few = "limits are not shown to hold on so few prompts"
        return [
            f"no loss beyond a limit was found; {open_} of {len(shown)} {few}",
            f"{report}; holdfast certify {folder} asks prompts that nothing has touched",
        ]
    return ["behaviour was kept: every limit is shown to hold on the prompts that were watched", report]


def screening_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What asking the model found: conflicts and what became of them, and what is held."""
    if found is None:
        return []
    lines = []
    if found["asked_rows"]:
        fate = {"keep": "trained on", "learn": f"{found['dropped']} left out"}.get(found["rule"], "left out")
        groups = f" ({found['groups']} groups): {fate}" if found["conflicts"] else ""
        lines.append(f"screening: {found['conflicts']} of {found['rows']} rows teach what the model refuses{groups}")
    if "not_asked" in found:
        rest, share = found["not_asked"]["rows"], found["not_asked"]["conflict_share"]
        lines.append(
            f"screening: {rest} rows were not asked and are trained on; between {percent(share['low'])} and"
            f" {percent_up(share['high'])} of such rows are conflicts (95 % interval)"
        )
    for name, counts in found["sets"].items():
        kept = ", ".join(f"{c['kept']} of {c['asked']} {source}" for source, c in counts["sources"].items())
        lines.append(f"{name}: the model's own {counts['keep']} are held: {kept}; {counts['groups']} groups")
    return lines


def describe_entry(entry: Mapping[str, Any], name: str = "") -> str:
    measured = {role: entry[role] for role in ("constraint", "monitor") if entry[role] is not None}
    shares = " and ".join(
        f"{percent(one['violation_rate'])} of {one['n']:.0f} {role} examples"
        f" (95 % upper bound {percent_up(one['violation_upper'])})"
        for role, one in measured.items()
    )
    uppers = [one["violation_upper"] for one in measured.values()]
    verdict = degraded_words(uppers, entry["alpha"], over=not entry["feasible"])
    return (
        f"{name}{': ' if name else ''}{shares} degraded by more than {entry['tau']:g} ({entry['unit']});"
        f" at most {exact_percent(entry['alpha'])} allowed: {verdict}"
        f"{'' if entry['feasible'] else ': the constraint does not hold there'}"
    )
