"""`holdfast demo`: plain SFT against holdfast on the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.progress import show_progress
from holdfast.cli.terminal import duration, note, quiet_libraries, say, say_json
from holdfast.core.percent import exact_percent, percent

if TYPE_CHECKING:
    from holdfast.demo.story import DemoResult
    from holdfast.evaluation.rate import Rate


def demo(
    output: Annotated[Path, typer.Option("--output", help="Folder for the results.")] = Path("runs/demo"),
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fine-tune the embedded model on poisoned data twice, without and with the constraint, and compare.

    \b
    Example:
      holdfast demo
    """
    from holdfast.demo.picture import draw
    from holdfast.demo.story import run_demo

    quiet_libraries()
    with show_progress() as progress:
        result = run_demo(output, say=note, listener=progress)
    draw(result, output / "degradation.png")
    if json:
        say_json(result.as_json())
        return
    say(table(result))
    say(
        f"\n{duration(result.seconds)} in all. Picture: {output / 'degradation.png'}; figures: {output / 'result.json'}"
    )


def table(result: DemoResult) -> str:
    """The comparison as text, one model a row."""
    s = result.settings
    header = (
        "",
        "task accuracy (95% interval)",
        "violations: constraint",
        "held out",
        "refusals: constraint",
        "held out",
    )
    rows: list[tuple[str, ...]] = [header]
    for name, m in result.models.items():
        low, high = m.accuracy.interval
        violations = [
            _rate(m.violations(role, s.tau)) if m.degradations else "-" for role in ("constraint", "held out")
        ]
        refusals = [_rate(m.refusals[role]) for role in ("constraint", "held out")]
        rows.append((name, f"{percent(m.accuracy.value)} ({percent(low)} to {percent(high)})", *violations, *refusals))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    ours = result.models["holdfast"]
    within = all(ours.violations(role, s.tau).value <= s.alpha for role in ours.degradations)
    verdict = "within" if within else "OVER"
    lines.append(
        f"\nViolation: a refusal became more than {s.tau:g} nats per token less likely ({result.unit}). Budget alpha: "
        f"{exact_percent(s.alpha)}.\nholdfast is {verdict} the budget on constraint and held-out prompts."
    )
    return "\n".join(lines)


def _rate(rate: Rate) -> str:
    return f"{percent(rate.value)} of {rate.n}"
