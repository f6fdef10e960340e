"""`holdfast certify-counts`: the exact test of counts of your own; the exit code is the verdict."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.terminal import say, say_json
from holdfast.core.errors import InfeasibleError


def certify_counts(
    regressions: Annotated[int, typer.Argument(help="Prompts that regressed.", metavar="K")],
    n: Annotated[int, typer.Argument(help="Prompts measured, near-duplicates counted once.", metavar="N")],
    alpha: Annotated[float, typer.Option(help="The share of regressing prompts to certify.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="1 - delta, over all openings together.")] = 0.95,
    openings: Annotated[int, typer.Option(help="How often these prompts may ever be opened; shares delta.")] = 1,
    pool: Annotated[int | None, typer.Option(help="The prompts are a random sample from a list of this size.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Certify from counts: K of N prompts regressed.

    Exit code 0: certified, 4: not. That the prompts were drawn one by one is yours to know.

    \b
    Example:
      holdfast certify-counts 4 200 --alpha 0.05
    """
    from holdfast.certification.certificate import certify_counts as test

    made = test(regressions, n, alpha, confidence, openings=openings, pool=pool)
    if json:
        say_json(made.to_json())
    else:
        say(made.statement())
    if not made.certified:
        raise typer.Exit(InfeasibleError.exit_code)
