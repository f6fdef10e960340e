"""`holdfast judge train`: a judge of one's own, trained on BeaverTails labels."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from holdfast.cli.options import Json, Opt, Revision
from holdfast.cli.progress import show_progress
from holdfast.cli.terminal import duration, interruptible, quiet_libraries, say, say_json

judge = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@judge.callback()
def _root() -> None:
    """Train a judge: what calls a reply safe or unsafe.

    \b
    Example:
      holdfast judge train --output judges/mine
    """


@judge.command()
def train(
    output_dir: Annotated[Path, Opt("--output", "--output-dir", help="A new folder for the judge.", metavar="DIR")],
    base: Annotated[str, Opt(help="Hub id, folder, or embedded.", metavar="MODEL")] = "embedded",
    base_revision: Revision = None,
    full: Annotated[bool, Opt("--full", help="Train all weights and save them, instead of LoRA.")] = False,
    epochs: Annotated[int, Opt(help="Passes over the data; the best one is kept.")] = 3,
    learning_rate: Annotated[
        float | None, Opt(help="Highest rate. [default: 5e-4, with --full 5e-5]", show_default=False)
    ] = None,
    batch_size: Annotated[int, Opt(help="Pairs a step.")] = 32,
    rank: Annotated[int, Opt(help="Rank of LoRA; its alpha is twice that.")] = 16,
    max_length: Annotated[int, Opt(help="Tokens of prompt and reply, in training and judging.")] = 1024,
    harm_weight: Annotated[
        float, Opt(help="Weight of the worst category's loss beside the sum over categories.")
    ] = 0.0,
    seed: Annotated[int, Opt(help="Of the order, LoRA's start and the validation prompts.")] = 0,
    limit: Annotated[int | None, Opt(help="Pairs to train and validate on. [default: all]")] = None,
    test_limit: Annotated[int | None, Opt(help="Pairs for the figures. [default: all]")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], Opt(help="Of the weights that LoRA leaves alone.")] = "float32",
    data_dir: Annotated[
        Path | None, Opt(help="Folder of data files. [default: HOLDFAST_DATA, else the hub]", metavar="DIR")
    ] = None,
    device: Annotated[str | None, Opt(help="cpu or cuda. [default: a GPU where there is one]")] = None,
    json: Json = False,
) -> None:
    """Train a classifier on BeaverTails pairs and measure it on the complete test split.

    No pair whose prompt is in the test split is trained on. The folder serves wherever a judge is named.

    \b
    Example:
      holdfast judge train --output judges/mine --epochs 3
      holdfast audit --judge judges/mine --before A --after B --safety F
    """
    # Only now the slow part: a mistake on the command line is reported before torch is loaded.
    from holdfast_lab.evaluation.judge_run import train_judge
    from holdfast_lab.evaluation.judge_training import JudgeSettings

    quiet_libraries()
    settings = JudgeSettings(
        base=base, base_revision=base_revision, full=full, epochs=epochs, learning_rate=learning_rate,
        batch_size=batch_size, rank=rank, max_length=max_length, seed=seed, limit=limit, test_limit=test_limit,
        dtype=dtype, harm_weight=harm_weight,
    )  # fmt: skip
    with interruptible("nothing was written"), show_progress() as progress:
        made = train_judge(output_dir, settings, folder=data_dir, device=device, progress=progress)
    if json:
        say_json({"folder": str(output_dir), **made})
        return
    say("\n".join(describe(made)))
    say(f"judge: {output_dir} ({duration(made['seconds']['total'])})")


def describe(made: dict[str, Any]) -> list[str]:
    data, figures = made["data"], made["figures"]
    parts, width = data["parts"], max(map(len, figures["categories"]))
    return [
        f"trained on {parts['train']['rows']} pairs, validated on {parts['validation']['rows']}; "
        f"{data['shared_with_test']} left out, since their prompts are in the test split",
        f"{'complete' if data['test_complete'] else 'PART of the'} test split: {figures['n']} pairs, "
        f"{figures['unsafe']} unsafe",
        f"AUROC {_number(figures['auroc'])} (95 % interval {_number(figures['auroc_low'])} to "
        f"{_number(figures['auroc_high'])}), average precision {_number(figures['average_precision'])}",
        f"accuracy {figures['accuracy_0.4']:.3f} at 0.4, {figures['accuracy_0.5']:.3f} at 0.5",
        *(f"{name} (temperature {at:.2f}): Brier {figures[name]['brier']:.3f}, ECE {figures[name]['ece']:.3f}"
          for name, at in (("uncalibrated", 1.0), ("calibrated", figures["temperature"]))),
        f"{'category':<{width}}  pairs  AUROC     AP",
        *(f"{name:<{width}}  {one['support']:>5}  {_number(one['auroc'])}  {_number(one['average_precision'])}"
          for name, one in figures["categories"].items()),
    ]  # fmt: skip


def _number(value: float | None) -> str:
    return "    -" if value is None else f"{value:.3f}"
