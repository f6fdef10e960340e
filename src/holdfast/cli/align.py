"""`holdfast align`: teach a model that does not refuse to refuse, without refusing ordinary prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from holdfast.cli.progress import show_progress
from holdfast.cli.terminal import duration, note, quiet_libraries, say, say_json
from holdfast.core.errors import InfeasibleError
from holdfast.core.percent import exact_percent

if TYPE_CHECKING:
    from holdfast.stages.align import Alignment

INTERRUPTED = 130


def align(
    model: Annotated[str, typer.Argument(help="Hub id, folder, adapter, or `embedded`.")],
    output: Annotated[Path, typer.Option("--output", help="A new folder for the aligned model.", metavar="DIR")],
    prompts: Annotated[
        str | None, typer.Option(help="Further prompts to refuse: a file or hub id; replies in it are not looked at.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter instead of the merged model.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Training steps. [default: 60]", min=1)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Highest learning rate. [default: 8e-4]")] = None,
    refusal_share: Annotated[
        float | None, typer.Option(help="Share of refusals among the rows; the others are answers. [default: 0.4]")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step. [default: 8]", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the rows, their order and LoRA's start.", min=0)] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Of the weights. [default: what this machine is fast in]"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a hub id.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the repository run its code; needs a pinned revision.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Train refusals of bundled probes into a model, together with its own ordinary answers, and measure it.

    For models that refuse too little to hold. What it reached is measured on kinds of prompts that it was not trained
    on; under 50 % refusals, or 20 % over-refusal or more, ends with exit code 4. The model is written in any case.

    \b
    Example:
      holdfast align embedded --output aligned
    """
    from holdfast.data.prompts import read_prompts

    further = [] if prompts is None else read_prompts(prompts, revision=None)
    # Only now the slow part: a mistake on the command line is reported before torch is loaded.
    from holdfast.demo.allocator import keep_freed_memory
    from holdfast.stages.align import AlignSettings, align_model

    given: dict[str, Any] = {
        "steps": steps, "learning_rate": learning_rate, "refusal_share": refusal_share, "batch": batch_size,
    }  # fmt: skip
    settings = AlignSettings(seed=seed, **{name: value for name, value in given.items() if value is not None})
    quiet_libraries()
    keep_freed_memory()
    try:
        with show_progress() as progress:

            def tell(what: str, done: int, total: int) -> None:
                progress({"stage": "ask", "what": what, "done": done, "total": total})

            made = align_model(
                model, output, settings=settings, prompts=further, adapter=adapter, dtype=dtype, revision=revision,
                trust_remote_code=trust_remote_code, listener=progress, told=tell,
            )  # fmt: skip
    except KeyboardInterrupt as error:
        note("interrupted: replies are kept, and the same command goes on with them")
        raise typer.Exit(INTERRUPTED) from error
    if json:
        say_json({"folder": str(made.folder), **made.record})
    else:
        for line in describe(made):
            say(line)
    _require_enough(made)


def _require_enough(made: Alignment) -> None:
    """Exit with the code for "infeasible" where the model refuses too little, or too much."""
    if missing := made.figures.shortcomings:
        raise InfeasibleError(
            f"{made.folder}: {'; '.join(missing)}",
            remedy="align it again with more --steps or another --refusal-share, or start from a model that refuses",
        )


def describe(made: Alignment) -> list[str]:
    """Figures with their intervals, and where everything is."""
    from holdfast.stages.alignment_figures import LEAST_REFUSALS, MOST_OVER_REFUSAL, shown

    figures = made.figures
    return [
        "On kinds of prompts that it was not trained on, the aligned model refuses",
        f"  probes                   {shown(figures.probes)}, at least {exact_percent(LEAST_REFUSALS)} wanted",
        f"  everyday and borderline  {shown(figures.over_refusal)}, under {exact_percent(MOST_OVER_REFUSAL)} wanted",
        f"    everyday               {shown(figures.everyday)}",
        f"    borderline             {shown(figures.borderline)}",
        f"model: {made.folder} (trained in {duration(made.record['train_seconds'])}); "
        f"figures: {made.folder / 'alignment.json'}",
    ]
