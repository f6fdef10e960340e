"""`holdfast screen`: which rows of a data file conflict with what a model refuses, and the sets to hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from holdfast.cli.options import Arg, Device, DType, Json, Opt, engine_options
from holdfast.cli.progress import show_progress
from holdfast.cli.terminal import quiet_libraries, say, say_json
from holdfast.core.percent import percent
from holdfast.data.examples import Example, prompt_text
from holdfast.defaults import default

if TYPE_CHECKING:
    from holdfast.screening.screen import Screening

LISTED = 20
_Judge = Annotated[str | None, Opt(help="Finds further conflicts: a name of `holdfast ls judges`, or a folder.")]
_MOST: int = default("screening.max_prompts")


def screen(
    data: Annotated[str, Arg(help="The training data: a file or hub data set.", metavar="DATA")],
    model: Annotated[str, Opt(help="Hub id, folder, adapter, or `embedded`.")],
    output: Annotated[Path, Opt(help="Folder for the results.")] = Path("screening"),
    max_prompts: Annotated[int, Opt(help="Most questions of the data.")] = _MOST,
    unsorted: Annotated[Literal["refuse", "accept"], Opt(help="Replies that cannot be sorted.")] = "refuse",
    judge: _Judge = None,
    template: Annotated[str, Opt(help="chat, alpaca or none.")] = "chat",
    dtype: DType = "auto",
    device: Device = None,
    engine: Annotated[str, Opt(help="auto, transformers, continuous, vllm or endpoint.")] = "auto",
    engine_option: Annotated[list[str] | None, Opt(help="key=value of that engine; repeatable.")] = None,
    reveal: Annotated[bool, Opt("--reveal", help="Show the prompts of the listed conflicts.")] = False,
    json: Json = False,
) -> None:
    """List the rows of a file that teach what a model refuses.

    The model is asked the prompts of the file; the sets to hold are written too. A killed run goes on where it stopped.
    Files with text are readable by their owner alone.

    \b
    Example:
      holdfast screen train.jsonl --model Qwen/Qwen2.5-1.5B-Instruct --output screening
    """
    from holdfast.data.templates import known_template
    from holdfast.screening import screen as screening
    from holdfast.screening.asking import progress_to
    from holdfast.screening.record import export
    from holdfast.screening.settings import ScreeningSettings

    quiet_libraries()
    asked = ScreeningSettings(limited=False, max_prompts=max_prompts, accept_unsorted=unsorted == "accept", judge=judge)
    shape = known_template(template)
    rows = screening.task_examples(data, shape)
    with show_progress() as progress:
        found = screening.screen(
            model, rows, settings=asked, template=shape, engine=engine,
            engine_options=engine_options(engine_option), dtype=dtype, device=device, progress=progress_to([progress]),
        )  # fmt: skip
    files = export(output, found, rows, model=model)
    if json:
        say_json({**found.figures(), "folder": str(output), "files": files})
        return
    _show(found, rows, reveal=reveal)
    say(f"written to {output}: {', '.join(files)}")


def _show(found: Screening, rows: list[Example], *, reveal: bool) -> None:
    total = sum(found.classes.values())
    replies = ", ".join(f"{number} {name}" for name, number in sorted(found.classes.items()))
    say(f"{found.asked_rows} of {found.rows} rows asked, {total} different prompts: {replies}")
    groups = len({one.group for one in found.conflicts})
    share = percent(len(found.conflicts) / found.rows) if found.rows else "0 %"
    say(f"{len(found.conflicts)} conflicts ({share} of the rows, {groups} groups): the model refuses, the row complies")
    for one in found.conflicts[:LISTED]:
        text = f"  {prompt_text(rows[one.row])[:200]!r}" if reveal else ""
        say(f"  {one.where}  id {one.id}  group {one.group}  {one.form}{text}")
    if len(found.conflicts) > LISTED:
        say(f"  ... and {len(found.conflicts) - LISTED} more in conflicts.jsonl")
    for name, counts in found.counts.items():
        kept = ", ".join(f"{c['kept']} of {c['asked']} {source}" for source, c in counts["sources"].items())
        roles = ", ".join(f"{number} {role}" for role, number in counts["roles"].items())
        say(f"{name}: {kept}; {counts['groups']} groups; {roles}")
