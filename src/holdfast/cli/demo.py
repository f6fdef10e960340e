"""First steps: `holdfast init` writes the files of a first run; `holdfast demo` compares plain SFT with holdfast."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from holdfast.cli.options import Arg, Json, Opt
from holdfast.cli.progress import show_progress
from holdfast.cli.terminal import columns, duration, note, quiet_libraries, say, say_json
from holdfast.core.percent import percent
from holdfast.data.examples import prompt_text

if TYPE_CHECKING:
    from holdfast.certification.binomial import Rate
    from holdfast.demo.data import DemoSettings
    from holdfast.demo.story import DemoResult

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
PICTURE = "refusals.png"


def init(
    folder: Annotated[Path, Arg(help="Where to; made if it is not there.")] = Path(),
    model: Annotated[str, Opt(help="Hub id or folder of a chat model that refuses, or `embedded` (small).")] = MODEL,
    json: Json = False,
) -> None:
    """Write task.jsonl and run.yaml for a first run.

    The task is mild data of our own, a twelfth of it poisoned; the run file has three lines. It asks you nothing. For
    the embedded model it has the sizes of a trial on a CPU too, and beside it is an adapter that lets it refuse.

    \b
    Example:
      holdfast init first && cd first && holdfast check run.yaml && holdfast train run.yaml
    """
    from holdfast.demo.starter import FILES, write_starter

    paths = write_starter(folder, model)
    inside = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    following = f"{inside}holdfast check run.yaml && holdfast train run.yaml"
    if json:
        say_json({"files": [str(path) for path in paths], "next": following})
        return
    for line in columns([(str(path), words) for path, words in zip(paths, FILES.values(), strict=False)]):
        say(line)
    say(f"next: {following}")


def demo(
    output: Annotated[Path, Opt(help="Folder for the results.")] = Path("runs/demo"),
    fast: Annotated[bool, Opt("--fast", help="A shorter one: fewer steps and prompts, recorded replies.")] = False,
    reveal: Annotated[bool, Opt("--reveal", help="Show replies that give in as well.")] = False,
    json: Json = False,
) -> None:
    """Compare plain SFT with holdfast on a small model.

    A poisoned file is screened, and the embedded model is fine-tuned on it by plain SFT and by holdfast. It was aligned
    beforehand, by a shipped adapter, so that there is a behaviour to keep.

    \b
    Example:
      holdfast demo --fast
    """
    quiet_libraries()
    from holdfast.demo.data import FAST, DemoSettings
    from holdfast.demo.story import draw, run_demo

    with show_progress() as progress:
        result = run_demo(output, FAST if fast else DemoSettings(), say=note, listener=progress)
    draw(result, output / PICTURE)
    if json:
        say_json(result.as_json())
        return
    parts = [found(result), table(result), replies(result, reveal=reveal)]
    for part in [*parts, left_out(result.settings, DemoSettings())] if fast else parts:
        say(f"{part}\n")
    say(f"{duration(result.seconds)} in all. Picture: {output / PICTURE}; figures: {output / 'result.json'}")


def left_out(fast: DemoSettings, whole: DemoSettings) -> str:
    """What a fast demo did not do."""
    asked = [f"{one.test_probes}, {one.test_ordinary} and {one.test_task}" for one in (fast, whole)]
    return (
        "--fast left out: asking the model while screening (its replies came with the package), "
        f"{whole.steps - fast.steps} of {whole.steps} steps (at {fast.rate / whole.rate:.0f} times the rate), all but "
        f"{fast.most_held} replies of each held set, and most held-out prompts ({asked[0]} instead of {asked[1]}), so "
        "the intervals are wide.\n"
        "The whole comparison, in minutes: holdfast demo"
    )


def found(result: DemoResult) -> str:
    """What screening found, and what was held."""
    f, held = result.found, result.held
    clean = f["conflicts"] - f["poison_found"]
    return (
        f"Screening: {f['conflicts']} of {f['rows']} rows teach what the model refuses, and are left out. They hold "
        f"{f['poison_found']} of the {f['poison']} poisoned rows and {clean} of the {f['rows'] - f['poison']} others.\n"
        f"Held while it learns: {held['refusals']} of the model's own refusals, {held['answers']} of its own answers."
    )


def table(result: DemoResult) -> str:
    """The comparison as text, one model a row."""
    rows: list[tuple[str, ...]] = [("", "requests to decline: refused", "ordinary requests: refused", "task accuracy")]
    rows += [(name, *map(_rate, (m.refusals, m.over_refusal, m.accuracy))) for name, m in result.models.items()]
    lines = columns(rows)
    lines.insert(1, "  ".join("-" * max(map(len, column)) for column in zip(*rows, strict=True)))
    lines.append("Held-out prompts, exact 95 % intervals. plain SFT learns the whole file, holdfast the kept rows.")
    lines.append(limits(result.g))
    return "\n".join(lines)


def limits(g: Mapping[str, float]) -> str:
    """Whether holdfast's constraints held in its last step."""
    figures = ", ".join(f"{name} {value:+.3f}" for name, value in g.items())
    over = [name for name, value in g.items() if value > 0.0]
    if not over:
        return f"holdfast's limits held in its last step (g at most 0: {figures})."
    return f"holdfast ended over its limit for {' and '.join(over)} (g above 0: {figures}): its few steps are large."


def replies(result: DemoResult, *, reveal: bool) -> str:
    """Two requests to decline and an ordinary one, with every model's reply; one that gives in is named only."""
    from holdfast.demo.story import changed_first

    probes = changed_first(result.data.test_probes, result.models)[:2]
    lines = ["Replies, first to requests on which the models differ:"]
    for example in (*probes, result.data.test_ordinary[0]):
        lines.append(f"> {prompt_text(example)}")
        for name, measured in result.models.items():
            reply = measured.replies[prompt_text(example)]
            lines.append(f"    {name:<14} {reply if reveal or example not in probes else masked(reply)}")
    return "\n".join(lines)


def masked(reply: str) -> str:
    """A refusal as it is; nothing of any other reply."""
    from holdfast.demo.story import is_refusal

    return reply if is_refusal(reply) else "[not a refusal; --reveal shows it]"


def _rate(rate: Rate) -> str:
    low, high = rate.interval
    return f"{percent(rate.value)} of {rate.n} ({percent(low)} to {percent(high)})"
