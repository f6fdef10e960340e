"""`holdfast check`: everything about a run that can be known without its weights."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli.options import Json, Opt, Overrides, RunFile, SkipBad, TrustRemoteCode
from holdfast.cli.terminal import (
    counted,
    duration,
    note,
    quiet_libraries,
    refusal_json,
    require_none,
    say,
    say_json,
    size,
)
from holdfast.core.errors import HoldfastError
from holdfast.core.percent import percent

if TYPE_CHECKING:
    from holdfast.runs.config.resolve import ResolvedRun
    from holdfast.runs.stages.run_folder import RunFolder


def check(
    run: RunFile,
    overrides: Overrides = None,
    reveal: Annotated[bool, Opt("--reveal", help="Show the tokens of the sample examples.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    skip_bad: SkipBad = False,
    json: Json = False,
) -> None:
    """Check settings, data, size of a run: no GPU, no weights.

    Ends with the command that trains it, or with what `train` would refuse and that exit code.

    \b
    Example:
      holdfast check run.yaml --reveal
    """
    from holdfast.runs.config import load_config

    config = load_config(run, overrides or ())
    config = config.skipping_bad_rows() if skip_bad else config
    from holdfast.cli.survey import survey
    from holdfast.constraint.feasibility import likelihood_note, warn_of_free_degradation
    from holdfast.runs.config.resolve import resolve
    from holdfast.runs.stages.run_folder import RunFolder

    quiet_libraries()
    plan = resolve(config, elsewhere=True)
    findings = survey(plan, reveal=reveal, trust_remote_code=trust_remote_code)
    folder = RunFolder(plan.folder)
    goes_on = folder.started and not folder.result.exists()
    problems = list(_problems(plan, folder, goes_on=goes_on))
    if json:
        say_json({**findings, "problems": [refusal_json(problem) for problem in problems]})
    else:
        _show(findings, reveal)
    for name, limit in plan.constraints.items() if findings["defense"]["constrains"] else ():
        warn_of_free_degradation(limit, name)
        if (remark := likelihood_note(limit)) is not None:
            note(f"{name}: {remark}")
    require_none(problems)
    if not json:
        given = {"--resume": goes_on, "--trust-remote-code": trust_remote_code, "--skip-bad": skip_bad}
        options = [name for name, wanted in given.items() if wanted]
        say(f"ready: holdfast train {shlex.join([str(run), *(overrides or ()), *options])}")


def _problems(plan: ResolvedRun, folder: RunFolder, *, goes_on: bool) -> Iterator[HoldfastError]:
    """What `train` would refuse besides what has been read so far: the start, the model, the folder."""
    from holdfast.constraint.feasibility import require_feasible_start
    from holdfast.demo.starter import require_refusals

    reserve = getattr(plan.defense.config, "reserve", 0.0)
    limits = plan.constraints.values() if plan.defense.constrains else ()
    for require in (
        *(partial(require_feasible_start, limit, reserve) for limit in limits),
        partial(require_refusals, plan.config.model, plan.config.refusal_prompts),
        partial(folder.require_usable, plan.values, resume=goes_on),
    ):
        try:
            require()
        except HoldfastError as error:
            yield error


def _show(findings: dict[str, Any], reveal: bool) -> None:
    for entry in findings["preset"]:
        say(f"preset  {entry['key']} = {entry['value']}  ({entry['source']})")
    _show_examples("task", f"{findings['task']['rows']} examples", findings["task"], reveal)
    for name, entry in findings["safety"].items():
        roles = ", ".join(f"{entry[role]} {role}" for role in ("constraint", "monitor", "certify"))
        _show_examples(name, roles, entry, reveal)
        say(f"  {entry['constraint_text']}")
        start = "holds" if entry["feasible_start"] else "does NOT hold"
        say(f"  feasible start: phi - alpha + buffer = {entry['start_value']:+.4f} at the unchanged model: it {start}")
        if not findings["defense"]["constrains"]:
            say(f"  {findings['defense']['name']} does not enforce this limit: the run is only measured by it")
        say("  not checked here: tau against the model's numerical noise, which is measured when training begins")
        _say_notes(entry["certify_note"], entry["openings_note"])
        if entry["batch_times_alpha"] < 1 and findings["defense"]["estimator"] == "batch":
            why = "below 1, a single batch cannot resolve the limit"
            say(f"  note: a safety batch times alpha is {entry['batch_times_alpha']:.2g}: {why}")
    if (asking := findings["asking"]) is not None:
        from holdfast.screening.asking import AskingPlan

        say(f"before training the model is asked: {AskingPlan(**asking).sentence()}")
        say("  how long that takes is measured on the first of them, and said before the others are asked")
    for name, entry in findings["asked"].items():
        say(f"{name}: the model's own {entry['keep']} of {', '.join(entry['prompts'])}, asked when training begins")
        _say_notes(entry["constraint_text"], entry["certify_note"], entry["openings_note"])
    for line in left_out(findings["data"]):
        say(line)
    if (harmful := findings["harmful"]) is not None:
        _show_examples("harmful", f"{harmful['rows']} pairs to train against", harmful, reveal)
    if findings["unaligned"] is not None:
        say(f"before alignment: {findings['unaligned']}")
    _show_size(findings)


def left_out(counts: Mapping[str, Any]) -> list[str]:
    """Rows that a run does not use (`row_counts`), as lines: malformed, duplicates; and those kept in contradiction."""
    lines = []
    harmful = [("harmful", counts["harmful"])] if "harmful" in counts else []
    for name, entry in [("task", counts["task"]), *counts["safety"].items(), *harmful]:
        if skipped := entry["skipped"]:
            named = entry.get("skipped_rows", [])
            more = f", the first {len(named)}" if len(named) < skipped else ""
            lines += [f"{name}: {counted(skipped, 'malformed row')} skipped{more}:", *(f"  {row}" for row in named)]
        if dropped := entry.get("duplicates_dropped", 0):
            same = "prompt and completion of an earlier row"
            lines.append(f"{name}: {counted(dropped, 'duplicate row')} dropped ({same})")
        if prompts := entry.get("contradictory_prompts", 0):
            lines.append(f"{name}: {counted(prompts, 'prompt')} with more than one completion; all are kept")
    return lines


def _say_notes(*notes: str | None) -> None:
    for line in filter(None, notes):
        say(f"  {line}")


def _show_examples(title: str, what: str, entry: dict[str, Any], reveal: bool) -> None:
    lengths = f"{entry['tokens_median']} tokens in the middle, {entry['tokens_max']} at most"
    say(f"{title}: {what}; {lengths}, {entry['truncated']} cut at max_length")
    for example in entry["examples"]:
        say(f"  {example['mask']}  {example['tokens']} tokens, {example['scored']} scored  {example['where']}")
        if reveal:
            say(f"    {' '.join(example['pieces'])}")


def _show_size(findings: dict[str, Any]) -> None:
    model, memory, steps = findings["model"], findings["memory"], findings["steps"]
    share = percent(model["trainable"] / model["parameters"])
    say(f"model: {model['parameters']:,} parameters ({model['dtype']}), {model['trainable']:,} trained ({share})")
    parts = ("weights", "training_state", "activations")
    sizes = " + ".join(f"{name.replace('_', ' ')} {size(memory[name])}" for name in parts)
    say(f"memory per device, estimated: {size(memory['total'])} = {sizes}")
    say(f"memory of the host: {size(findings['host_memory'])} for this check, all rows loaded; training takes more")
    say(f"disk for the task's rows while it trains, estimated: {size(findings['disk'])} a process")
    side = findings["defense"]["side_batch"]
    beside = f" + {side['rows']} {side['kind']}" if side else ""
    known = "safety" in beside and steps["safety_epochs"]  # what asking will give is not known yet
    passed = f"; the constraint set is passed {steps['safety_epochs']:.1f} times" if known else ""
    rate = f"learning rate {findings['learning_rate']:g}"
    say(f"{steps['steps']} steps of {steps['task_batch']} task{beside} examples, {rate}{passed}")
    work = findings["work"]
    time = f"{duration(work['seconds_at_100_tflops'])} at 100 TFLOP/s (a large GPU)"
    if not work["gpu_here"]:
        time = "there is no GPU here: asking and training say the time left once they have begun"
    say(f"work, estimated: {work['flop'] / 1e15:.3g} PFLOP without asking, evaluation and saving; {time}")
    say(f"defense: {findings['defense']['name']}, passes per step: {findings['defense']['passes']}")
