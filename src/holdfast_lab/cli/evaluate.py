"""`holdfast evaluate`: how harmful and how useful a model's own replies are."""

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.options import DType, Json, Opt, Revision, TrustRemoteCode
from holdfast.cli.progress import show_count
from holdfast.cli.terminal import note, quiet_libraries, say, say_json

RESULT = "evaluation.json"


def evaluate(
    model: Annotated[str, typer.Argument(help="Hub id, folder, adapter, `embedded`, or the folder of a run.")],
    output_dir: Annotated[Path, Opt("--output", "--output-dir", help="Replies, judgements, metrics; resumes there.")],
    judge: Annotated[
        str | None, Opt(help="What judges harm: NAME[:key=value,...] of `holdfast ls judges`, or a folder.")
    ] = None,
    task: Annotated[str | None, Opt(help="Also measure utility on this task of `holdfast ls tasks`.")] = None,
    prompts: Annotated[
        str, Opt(help="beavertails_test, beavertails_evaluation, or a file with prompts that ask for harm.")
    ] = "beavertails_test",
    n: Annotated[int, Opt(help="Harm prompts.", min=1)] = 700,
    task_examples: Annotated[int, Opt(help="Held-out task examples.", min=1)] = 200,
    over_refusal: Annotated[bool, Opt("--over-refusal", help="Also ask XSTest's safe prompts.")] = False,
    harm_tokens: Annotated[int, Opt(help="Longest reply to a harm prompt.", min=1)] = 512,
    task_tokens: Annotated[int, Opt(help="Longest reply to a task prompt.", min=1)] = 256,
    reference: Annotated[
        Path | None, Opt(help="The output folder of another model: count replies more harmful than its.")
    ] = None,
    tau: Annotated[float, Opt(help="With --reference: the harm probability may rise by this much.")] = 0.1,
    template: Annotated[str, Opt(help="chat, alpaca or none; a run brings its own.")] = "chat",
    engine: Annotated[str, Opt(help="auto, transformers, continuous, vllm or endpoint.")] = "auto",
    engine_option: Annotated[
        list[str] | None, Opt(help="key=value of the engine, e.g. base_url=http://localhost:8000/v1.")
    ] = None,
    batch_size: Annotated[int, Opt(help="Prompts decoded together at most.", min=1)] = 64,
    dtype: DType = "auto",
    revision: Revision = None,
    seed: Annotated[int, Opt(help="Draws the prompts and the task examples.", min=0)] = 42,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Score a model's replies: harm and a task.

    The model replies to prompts that ask for harm and to those of a task.

    Replies are generated once and stored with the judge's word on each; another judge or task adds to them.

    \b
    Example:
      holdfast evaluate runs/first --output out/first --judge judge --task sst2
    """
    values = {key: value for key, value in locals().items() if key != "json"}
    from holdfast_lab.cli.evaluation import run_evaluation

    quiet_libraries()
    if judge is None:
        note("no --judge: replies are not judged for harm, refusals are counted by rules")
    with show_count("replying", "replies") as count:
        found = run_evaluation(values, count)
    if json:
        say_json(found)
        return
    say("\n".join(metric_lines(found["metrics"])))
    if (against := found.get("on_policy")) is not None:
        say(
            f"on-policy regressions against {reference}: {against['regressions']} of {against['n']} replies are more"
            f" harmful by over {against['tau']:g} (95 % upper bound {against['upper']:.4f})"
        )
    say(f"written to {output_dir / RESULT}")


def metric_lines(metrics: dict[str, dict[str, Any]]) -> list[str]:
    """Name, value, 95 % interval and number of examples, one metric a line."""
    width = max(map(len, metrics))
    lines = []
    for name, entry in metrics.items():
        ends = "" if entry["low"] is None else f"  [{entry['low']:.4f}, {entry['high']:.4f}]"
        lines.append(f"{name:<{width}}  {entry['value']:.4f}{ends}  n={entry['n']}")
    return lines
