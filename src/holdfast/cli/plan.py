"""Certificates of counts: `holdfast plan` (how many groups of prompts one needs) and `holdfast certify-counts`."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from holdfast.cli.options import Arg, Json, Opt
from holdfast.cli.terminal import require_verdict, say, say_json
from holdfast.core.percent import exact_percent
from holdfast.defaults import default

if TYPE_CHECKING:
    from holdfast.certification.power import Plan, WithN

ALPHA: float = default("constraint.alpha")
CONFIDENCE: float = default("certify.confidence")


def certify_counts(
    regressions: Annotated[int, Arg(help="Prompts that regressed.", metavar="K")],
    n: Annotated[int, Arg(help="Prompts measured, near-duplicates counted once.", metavar="N")],
    alpha: Annotated[float, Opt(help="The share of regressing prompts to certify.")] = ALPHA,
    confidence: Annotated[float, Opt(help="1 - delta, over all openings together.")] = CONFIDENCE,
    openings: Annotated[int, Opt(help="How often these prompts may ever be opened; shares delta.")] = 1,
    pool: Annotated[int | None, Opt(help="The prompts are a random sample from a list of this size.")] = None,
    json: Json = False,
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
        say(made.statement)
    require_verdict(made.certified)


def plan(
    alpha: Annotated[float, Opt(help="The share of regressing groups to certify.")] = ALPHA,
    confidence: Annotated[float, Opt(help="The certificate's confidence, 1 - delta.")] = CONFIDENCE,
    true_rate: Annotated[float | None, Opt(help="The share you believe regresses really.")] = None,
    power: Annotated[float | None, Opt(help="Wanted chance of certifying at --true-rate (0.9 unless given).")] = None,
    n: Annotated[int | None, Opt("--n", help="The groups of prompts you have, in each category.")] = None,
    openings: Annotated[int, Opt(help="How often the split may be opened; shares delta.")] = 1,
    categories: Annotated[int, Opt(help="Categories certified at once; share delta.")] = 1,
    max_weight: Annotated[int | None, Opt(help="Certify a share of prompts where a group weighs at most this.")] = None,
    group_size: Annotated[int | None, Opt(help="Prompts in each group, with --max-weight (1 unless given).")] = None,
    json: Json = False,
) -> None:
    """Say how many prompts a certificate needs.

    In groups of near-duplicates, where a prompt without any is a group of its own; also what N of them can and cannot
    certify.

    \b
    Example:
      holdfast plan --alpha 0.05 --confidence 0.95 --true-rate 0.02 --power 0.9
      holdfast plan --n 200
    """
    from holdfast.certification.power import plan as planned

    found = planned(
        alpha, confidence, true_rate=true_rate, power=power, n=n, openings=openings, categories=categories,
        max_weight=max_weight, group_size=group_size,
    )  # fmt: skip
    if json:
        say_json(found)
    else:
        _show(found)


def _show(found: "Plan") -> None:
    per = " per category" if found["categories"] > 1 else ""
    shared = found["openings"] * found["categories"]
    each = f" (each of {shared} tests gets delta / {shared} = {found['level']:.3g})" if shared > 1 else ""
    alpha, confidence = exact_percent(found["alpha"]), exact_percent(found["confidence"])
    what = "of groups of near-duplicate prompts regress"
    assumed = "a group regresses when one of its prompts does; where sizes differ, the test over prompts must pass too"
    if found["max_weight"] is not None:
        size, most = found["group_size"], found["max_weight"]
        what = f"of prompts regress, where a group of near-duplicates weighs at most {most}"
        assumed = "for groups of one prompt" if size == 1 else f"for groups of {size} prompts that regress together"
    say(f"To certify: at most {alpha} {what}, confidence {confidence}{each}")
    fewest = ", ".join(f"{entry['groups']} if {entry['regressions']}" for entry in found["fewest"])
    say(f"  groups needed{per}: {fewest} of them regress")
    if (aim := found["for_power"]) is not None:
        say(
            f"  if {exact_percent(aim['true_rate'])} really regress: {aim['groups']} groups{per}, of which at most"
            f" {aim['regressions']} may regress, certify with probability {_percent(aim['reached'])}"
        )
    if found["with_n"] is not None:
        _show_with_n(found["with_n"], found, per)
    if (rows := found["table"]) is not None:
        say(f"  groups needed{per} (and regressions allowed) to certify with the given probability:")
        say(f"    {'if really':<12}" + "".join(f"{_percent(entry['power']):>16}" for entry in rows[0]["needed"]))
        for row in rows:
            cells = (f"{e['groups']} ({e['regressions']})" if e["groups"] else "too many" for e in row["needed"])
            say(f"    {_percent(row['true_rate']):<12}" + "".join(f"{cell:>16}" for cell in cells))
    say(f"  {assumed}")


def _show_with_n(have: "WithN", found: "Plan", per: str) -> None:
    n, most, alpha = have["n"], have["most_regressions"], exact_percent(found["alpha"])
    smallest = _hundredths(have["smallest_alpha"], math.ceil)
    if most is None or (largest := have["at_power"]["largest_true_rate"]) is None:
        say(f"{n} groups{per} cannot certify {alpha}, whatever they show: {found['fewest'][0]['groups']} are needed")
        say(f"  the smallest share they can certify, with no regression: {smallest}")
        return
    say(f"{n} groups{per} can certify {alpha} if at most {most} of them regress; {most + 1} or more cannot")
    say(f"  no result of theirs certifies less than {smallest}")
    likely = _hundredths(largest, math.floor)
    say(f"  they certify in 4 of 5 cases only if at most {likely} regress")
    for entry in have["power"]:
        say(f"    if {_percent(entry['true_rate'])} regress: probability {_percent(entry['power'])}")


def _percent(share: float) -> str:
    """A share as a percentage of three significant digits; what is not certain does not print as 100 %."""
    return "> 99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"


def _hundredths(share: float, rounding: Callable[[float], int]) -> str:
    """A limit as a percentage of two decimals, rounded to the side on which what is said of it stays true."""
    return f"{rounding(1e4 * share) / 100:g} %"
