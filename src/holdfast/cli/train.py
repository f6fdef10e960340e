"""`holdfast train`: run a run file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.certification.kept import failures, stored_figures, way_back
from holdfast.cli.left_out import left_out
from holdfast.cli.progress import show_progress
from holdfast.cli.terminal import duration, note, quiet_libraries, say, say_json
from holdfast.core.errors import InfeasibleError
from holdfast.core.percent import exact_percent, percent, percent_up

if TYPE_CHECKING:
    from holdfast.pipeline import RunResult

INTERRUPTED = 130


def train(
    run: Annotated[Path, typer.Argument(help="The run file (YAML).", metavar="RUN.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values put over the file.", metavar="[key=value ...]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Let the model repository run its code; needs a pinned revision."),
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out malformed rows, a few, named and counted; default: refuse.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fine-tune under the safety constraint and write the run folder.

    \b
    Example:
      holdfast train run.yaml train.learning_rate=1e-4 output_dir=runs/second
    """
    from holdfast.config import load_config

    config = load_config(run, overrides or ())
    config = config.skipping_bad_rows() if skip_bad else config
    from holdfast.trainers.hooks import DEFENSES

    constrains = DEFENSES[config.defense.name].constrains
    # Only now the slow part: a mistake in the file is reported before torch's models and TRL are loaded.
    from holdfast.pipeline import run as run_pipeline

    quiet_libraries()
    try:
        with show_progress() as progress:
            result = run_pipeline(config, resume=resume, listeners=[progress], trust_remote_code=trust_remote_code)
    except KeyboardInterrupt as error:
        note("interrupted: `--resume` continues from the newest checkpoint, or starts anew where none was saved")
        raise typer.Exit(INTERRUPTED) from error
    if os.environ.get("RANK", "0") != "0":  # one of several processes: the first speaks for all
        return
    if json:
        say_json({"folder": str(result.folder), **result.values})
        _finish(result, constrains)
        return
    for name, figure in stored_figures(result.values).items():
        say(figure.line(name))
    if led := way_back(result.values):
        say(led)
    written = "model" if config.lora is None else "adapter"
    say(f"{result.values['steps']} steps in {duration(result.values['seconds'])}; {result.folder / written}")
    if discarded := result.values.get("spikes", {}).get("discarded"):
        say(f"{discarded} steps discarded as loss spikes (`event: spike` in events.jsonl)")
    for line in left_out(result.values["data"]) if "data" in result.values else ():  # of this version's runs
        say(line)
    for line in screening_lines(result.values.get("screening")):
        say(line)
    for name, entry in result.values["safety"].items():
        say(describe_entry(entry, name if config.named else ""))
    if result.values["safety"] and not constrains:
        say(f"{config.defense.name} does not enforce this limit: the model was only measured by it")
    _finish(result, constrains)


def screening_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What asking the model found: conflicts and what became of them, and what is held."""
    if found is None:
        return []
    lines = []
    if found["asked_rows"]:
        fate = {"keep": "trained on", "learn": f"{found['dropped']} left out"}.get(found["rule"], "left out")
        lines.append(
            f"screening: {found['conflicts']} of {found['rows']} rows teach what the model refuses"
            + (f" ({found['groups']} groups): {fate}" if found["conflicts"] else "")
        )
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


def _finish(result: RunResult, constrains: bool) -> None:
    """Exit with the code for "infeasible" where the model lost its behaviour, whatever the defense.

    The same when a defense that promises the constraint ended outside it.
    """
    held = all(entry["feasible"] for entry in result.values["safety"].values())
    lost = list(failures(stored_figures(result.values)))
    for cause, remedy in lost:
        note(f"{'the constraint holds, but ' if held and constrains else ''}{cause}\n  What to do: {remedy}")
    if lost or (constrains and not result.feasible):
        raise typer.Exit(InfeasibleError.exit_code)


def describe_entry(entry: Mapping[str, Any], name: str = "") -> str:
    """The verdict on one safety set in one line."""
    prefix = f"{name}: " if name else ""
    shares = " and ".join(
        f"{percent(entry[role]['violation_rate'])} of {entry[role]['n']:.0f} {role} examples"
        f" (95 % upper bound {percent_up(entry[role]['violation_upper'])})"
        for role in ("constraint", "monitor")
        if entry[role] is not None
    )
    verdict = "within the limit" if entry["feasible"] else "OVER the limit: the constraint does not hold there"
    return (
        f"{prefix}{shares} degraded by more than {entry['tau']:g} ({entry['unit']});"
        f" at most {exact_percent(entry['alpha'])} allowed: {verdict}"
    )
