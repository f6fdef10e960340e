"""`holdfast align`: teach a model that does not refuse to refuse, without refusing ordinary prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from holdfast.cli.options import Arg, Json, Opt, Revision, TrustRemoteCode
from holdfast.cli.progress import show_progress
from holdfast.cli.terminal import duration, interruptible, quiet_libraries, require_none, say, say_json
from holdfast.core.errors import InfeasibleError
from holdfast.core.percent import exact_percent
from holdfast.defaults import block

if TYPE_CHECKING:
    from holdfast.runs.stages.align import Alignment

_OF = block("align")
_SHARE = f"Share of refusals among the rows; the others are answers. [default: {_OF['refusal_share']}]"


def align(
    model: Annotated[str, Arg(help="Hub id, folder, adapter, or `embedded`.")],
    output: Annotated[Path, Opt("--output", help="A new folder for the aligned model.", metavar="DIR")],
    prompts: Annotated[
        str | None, Opt(help="Further prompts to refuse: a file or hub id; no replies are read.")
    ] = None,
    adapter: Annotated[bool, Opt("--adapter", help="Write the LoRA adapter instead of the merged model.")] = False,
    steps: Annotated[int | None, Opt(help=f"Training steps. [default: {_OF['steps']}]", min=1)] = None,
    learning_rate: Annotated[float | None, Opt(help=f"Peak learning rate. [default: {_OF['learning_rate']}]")] = None,
    refusal_share: Annotated[float | None, Opt(help=_SHARE)] = None,
    batch_size: Annotated[int | None, Opt(help=f"Rows a step. [default: {_OF['batch']}]", min=1)] = None,
    seed: Annotated[int, Opt(help="Of the rows, their order and LoRA's start.", min=0)] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, Opt(help="Of the weights. [default: what this machine is fast in]")
    ] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Teach a model to refuse, where it refuses too little.

    It is trained on refusals of bundled probes together with its own ordinary answers, and measured on kinds of prompts
    that it was not trained on. Under 50 % refusals of probes, or 20 % or more of everyday, borderline or task prompts,
    ends with exit code 4. The model is written in any case.

    \b
    Example:
      holdfast align embedded --output aligned
    """
    from holdfast.data.sources import read_prompts

    further = [] if prompts is None else read_prompts(prompts, revision=None)
    # Only now the slow part: a mistake on the command line is reported before torch is loaded.
    quiet_libraries()
    from holdfast.runs.stages.align import AlignSettings, align_model, keep_freed_memory
    from holdfast.screening.asking import progress_to

    given: dict[str, Any] = {"steps": steps, "learning_rate": learning_rate, "refusal_share": refusal_share}
    given = {name: value for name, value in (given | {"batch": batch_size}).items() if value is not None}
    settings = AlignSettings(seed=seed, **given)
    keep_freed_memory()
    advice = "replies and steps are kept, and the same command goes on with them"
    with interruptible(advice), show_progress() as progress:
        made = align_model(
            model, output, settings=settings, prompts=further, adapter=adapter, dtype=dtype, revision=revision,
            trust_remote_code=trust_remote_code, listener=progress, progress=progress_to([progress]),
        )  # fmt: skip
    if json:
        say_json({"folder": str(made.folder), **made.record})
    else:
        for line in describe(made):
            say(line)
    if missing := made.figures.shortcomings:
        require_none([InfeasibleError(f"{made.folder}: {'; '.join(missing)}", remedy=made.figures.remedy)])


def describe(made: Alignment) -> list[str]:
    """Figures with their intervals, and where everything is."""
    from holdfast.runs.stages.align import LEAST_REFUSALS, MOST_OVER_REFUSAL, shown

    figures, most = made.figures, exact_percent(MOST_OVER_REFUSAL)
    before = made.record.get("resumed_after", 0)
    after = f", resumed after step {before}" if before else ""
    return [
        "On kinds of prompts that it was not trained on, the aligned model refuses",
        f"  probes            {shown(figures.probes)}, at least {exact_percent(LEAST_REFUSALS)} wanted",
        f"  ordinary prompts  {shown(figures.over_refusal)}",
        *(f"    {name:<16}{shown(rate)}, under {most} wanted" for name, rate in figures.ordinary.items()),
        f"model: {made.folder} (trained in {duration(made.record['train_seconds'])}{after}); "
        f"figures: {made.folder / 'alignment.json'}",
    ]
