"""`holdfast bench`: what a training step costs beside TRL's plain SFT."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from holdfast.cli.options import Opt
from holdfast.cli.terminal import interruptible, quiet_libraries, say
from holdfast.core.errors import ConfigError, ResourceError
from holdfast.core.units import UNITS
from holdfast_lab.bench.settings import ADAPTED, BEST, MODULES, PATHS, SHAPES, SWEEPS, TASKS, Settings

COLUMNS = (
    ("median ms", "median_ms", ".1f"), ("p90 ms", "p90_ms", ".1f"), ("× TRL", "x_trl_sft", ".2f"),
    ("peak MiB", "peak_mib", ".0f"), ("× TRL", "x_memory", ".2f"), ("tokens/s", "tokens_per_s", ".0f"),
)  # fmt: skip
DEFAULT_OUTPUT = Path("bench/speed.json")
Checkpointing = Literal["on", "off", "both"]
_MODES: dict[Checkpointing, tuple[bool, ...]] = {"on": (True,), "off": (False,), "both": (True, False)}


def bench(
    shape: Annotated[list[str] | None, Opt(help=f"Repeat for several: {', '.join(SHAPES)}.")] = None,
    task: Annotated[str, Opt(help=f"Whose lengths the rows have: {', '.join(TASKS)}.")] = "sst2",
    paths: Annotated[
        list[str] | None, Opt(help=f"Of {', '.join(PATHS)}, separated by commas. [default: all but {BEST}]")
    ] = None,
    steps: Annotated[int, Opt(help="Measured steps of each path.")] = 25,
    warm_up: Annotated[int, Opt(help="Steps before them that do not count.")] = 5,
    checkpointing: Annotated[Checkpointing, Opt(help="Gradient checkpointing.")] = "both",
    checkpointed_paths: Annotated[
        list[str] | None, Opt(help="Paths to measure with checkpointing. [default: the same]")
    ] = None,
    batch: Annotated[int, Opt(help="Task rows a step.")] = 10,
    safety_batch: Annotated[int, Opt(help="Safety rows a step.")] = 10,
    rank: Annotated[int, Opt(help="Of LoRA.")] = 32,
    target_modules: Annotated[
        list[str] | None, Opt(help=f"What LoRA adapts: {', '.join(MODULES)}. [default: {','.join(ADAPTED)}]")
    ] = None,
    tau: Annotated[float, Opt(help="Of the constraint; 1e-6 makes the filter correct nearly every step.")] = 0.1,
    unit: Annotated[str, Opt(help=f"Of the constraint: {', '.join(UNITS)}.")] = "nll_token",
    options: Annotated[str, Opt(help="Of the filter, and of run_file's sets: 'anchor=true answers.first_k=32'.")] = "",
    sweep: Annotated[
        str | None, Opt(help=f"Vary one setting: {', '.join(SWEEPS)}; three paths unless --paths says.")
    ] = None,
    values: Annotated[str | None, Opt(help="Of the sweep, separated by commas.")] = None,
    reference: Annotated[bool, Opt("--reference/--no-reference", help="Time the pass of reference losses too.")] = True,
    drift: Annotated[bool, Opt("--drift/--no-drift", help="Measure trl_sft again at the end.")] = True,
    cudnn: Annotated[bool, Opt("--cudnn", help="Leave cuDNN's attention on.")] = False,
    output: Annotated[Path, Opt(help="The result (JSON).")] = DEFAULT_OUTPUT,
) -> None:
    """Measure a training step beside TRL's plain SFT.

    In one process, with random weights at a published shape.

    \b
    Example:
      holdfast bench --shape llama-3.1-8b --shape smollm2-135m --task sst2 --output out/speed.json
    """
    settings = Settings(
        shapes=tuple(_parts(shape or [])), task=task, paths=tuple(_parts(paths or [])), steps=steps, warm_up=warm_up,
        checkpointing=_MODES[checkpointing], checkpointed_paths=tuple(_parts(checkpointed_paths or [])),
        batch=batch, safety_batch=safety_batch, rank=rank, tau=tau, unit=unit, options=options,
        target_modules=tuple(_parts(target_modules or [])) or ADAPTED, sweep=sweep or "",
        values=tuple(_numbers(values)), reference=reference, drift=drift, cudnn=cudnn,
    )  # fmt: skip
    if output.suffix != ".json":
        raise ConfigError(f"--output {output}: expected a .json file", remedy="for example out/speed.json")
    quiet_libraries()
    from holdfast_lab.bench.run import run

    swept = f" {settings.sweep:>12s}" if settings.sweep else ""
    say(f"{'shape':14s} {'path':9s} {'checkpt.':8s}{swept}" + "".join(f"{name:>11s}" for name, _, _ in COLUMNS))
    with interruptible(f"what was measured is in {output}"):
        record = run(settings, output, _show)
    say(f"written to {output}")
    if all("error" in row for row in record.rows):
        raise ResourceError("nothing could be measured: every path failed", remedy="see the errors above")


def _parts(given: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(part.strip() for text in given for part in text.split(",") if part.strip()))


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(part) for part in _parts([text or ""])]
    except ValueError as error:
        raise ConfigError(f"--values {text}: expected whole numbers", remedy="for example --values 5,10,20") from error


def _show(kind: str, found: dict[str, Any]) -> None:
    if kind == "reference":
        figures = f"failed: {found['error']}" if "error" in found else (
            f"{found['tokens_per_s']:.0f} tokens/s, {100 * found['share']:.0f} % of the bare forward pass"
        )  # fmt: skip
        say(f"{found['shape']:14s} reference losses: {figures}")
        return
    mode = "on" if found["checkpointing"] else "off"
    if kind == "drift":
        say(f"{found['shape']:14s} trl_sft measured again, checkpointing {mode}: {found['x_first']:.3f} x its first")
        return
    value = f" {found['value']:12d}" if "sweep" in found else ""
    start = f"{found['shape']:14s} {found['path']:9s} {mode:8s}{value}"
    if "error" in found:
        say(f"{start}  failed: {found['error']}")
        return
    printed = ("-" if found[key] is None else format(found[key], form) for _, key, form in COLUMNS)
    say(start + "".join(f"{figure:>11s}" for figure in printed))
    if "trl" in found:
        say(f"{'':14s} {', '.join([*(f'{name} {value}' for name, value in found['trl'].items()), *found['log']])}")
