"""`holdfast plan`: how many prompts a certificate needs, and what a given number can and cannot certify."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import typer

from holdfast.cli.terminal import say, say_json
from holdfast.core.errors import ConfigError, InfeasibleError
from holdfast.core.percent import exact_percent

DEFAULT_POWER = 0.9
LIKELY = 0.8
POWERS = (0.8, 0.9, 0.95)
SHARES_OF_ALPHA = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)  # true rates worth showing: from a perfect model to a doubtful one


def plan(
    alpha: Annotated[float, typer.Option(help="The share of regressing prompts to certify.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="The certificate's confidence, 1 - delta.")] = 0.95,
    true_rate: Annotated[float | None, typer.Option(help="The share you believe regresses really.")] = None,
    power: Annotated[
        float | None, typer.Option(help="The wanted chance of a certificate at --true-rate (0.9 unless given).")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", help="The prompts you have, in each category.")] = None,
    openings: Annotated[int, typer.Option(help="How often the split may be opened; shares delta.")] = 1,
    categories: Annotated[int, typer.Option(help="Categories certified at once; share delta.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say how many prompts a certificate needs, and what N prompts can and cannot certify.

    \b
    Example:
      holdfast plan --alpha 0.05 --confidence 0.95 --true-rate 0.02 --power 0.9
      holdfast plan --n 200
    """
    from holdfast.certification.arguments import confidence_level, count

    if power is not None and true_rate is None:
        raise ConfigError("--power without --true-rate: power is the chance at a true rate", remedy="add --true-rate")
    parts = count("openings", openings, least=1) * count("categories", categories, least=1)
    wanted = DEFAULT_POWER if power is None else power
    aim = (alpha, confidence, parts)
    found: dict[str, Any] = {
        "alpha": alpha,
        "confidence": confidence,
        "openings": openings,
        "categories": categories,
        "level": confidence_level(confidence, parts),
        "fewest": _fewest(*aim),
        "for_power": None if true_rate is None else _for_power(*aim, true_rate, wanted),
        "with_n": None if n is None else _with_n(*aim, n),
        "table": _table(*aim) if true_rate is None and n is None else None,
    }
    if json:
        say_json(found)
    else:
        _show(found)


def _fewest(alpha: float, confidence: float, parts: int) -> list[dict[str, int]]:
    from holdfast.certification.binomial import fewest_prompts

    return [{"regressions": k, "prompts": fewest_prompts(alpha, confidence, k, parts=parts)} for k in range(4)]


def _for_power(alpha: float, confidence: float, parts: int, true_rate: float, wanted: float) -> dict[str, Any]:
    from holdfast.certification.power import power, prompts_for_power

    prompts, allowed = prompts_for_power(alpha, confidence, true_rate, wanted, parts=parts)
    reached = power(prompts, alpha, confidence, true_rate, parts=parts)
    return {"true_rate": true_rate, "power": wanted, "prompts": prompts, "regressions": allowed, "reached": reached}


def _with_n(alpha: float, confidence: float, parts: int, n: int) -> dict[str, Any]:
    from holdfast.certification.binomial import most_regressions, upper_bound
    from holdfast.certification.power import largest_true_rate, power

    rates = [float(f"{share * alpha:.3g}") for share in SHARES_OF_ALPHA]
    return {
        "n": n,
        "most_regressions": most_regressions(n, alpha, confidence, parts=parts),
        "smallest_alpha": upper_bound(0, n, confidence, parts=parts),
        "at_power": {
            "power": LIKELY,
            "largest_true_rate": largest_true_rate(n, alpha, confidence, LIKELY, parts=parts),
        },
        "power": [{"true_rate": r, "power": power(n, alpha, confidence, r, parts=parts)} for r in rates],
    }


def _table(alpha: float, confidence: float, parts: int) -> list[dict[str, Any]]:
    from holdfast.certification.power import prompts_for_power

    rows: list[dict[str, Any]] = []
    for share in SHARES_OF_ALPHA:
        rate = float(f"{share * alpha:.3g}")
        needed: list[dict[str, Any]] = []
        for wanted in POWERS:
            try:
                prompts, allowed = prompts_for_power(alpha, confidence, rate, wanted, parts=parts)
                needed.append({"power": wanted, "prompts": prompts, "regressions": allowed})
            except InfeasibleError:  # beyond the largest number that is searched
                needed.append({"power": wanted, "prompts": None, "regressions": None})
        rows.append({"true_rate": rate, "needed": needed})
    return rows


def _show(found: dict[str, Any]) -> None:
    per = " per category" if found["categories"] > 1 else ""
    shared = found["openings"] * found["categories"]
    each = f" (each of {shared} tests gets delta / {shared} = {found['level']:.3g})" if shared > 1 else ""
    alpha, confidence = exact_percent(found["alpha"]), exact_percent(found["confidence"])
    say(f"To certify: at most {alpha} regress, confidence {confidence}{each}")
    fewest = ", ".join(f"{entry['prompts']} if {entry['regressions']}" for entry in found["fewest"])
    say(f"  prompts needed{per}: {fewest} of them regress")
    if (aim := found["for_power"]) is not None:
        say(
            f"  if {exact_percent(aim['true_rate'])} really regress: {aim['prompts']} prompts{per}, of which at most"
            f" {aim['regressions']} may regress, certify with probability {_percent(aim['reached'])}"
        )
    if found["with_n"] is not None:
        _show_with_n(found["with_n"], found, per)
    if found["table"] is not None:
        _show_table(found["table"], per)


def _show_with_n(have: dict[str, Any], found: dict[str, Any], per: str) -> None:
    n, most, alpha = have["n"], have["most_regressions"], exact_percent(found["alpha"])
    smallest = _hundredths(have["smallest_alpha"], math.ceil)
    if most is None:
        say(f"{n} prompts{per} cannot certify {alpha}, whatever they show: {found['fewest'][0]['prompts']} are needed")
        say(f"  the smallest share they can certify, with no regression: {smallest}")
        return
    say(f"{n} prompts{per} can certify {alpha} if at most {most} of them regress; {most + 1} or more cannot")
    say(f"  no result of theirs certifies less than {smallest}")
    likely = _hundredths(have["at_power"]["largest_true_rate"], math.floor)
    say(f"  they certify in 4 of 5 cases only if at most {likely} regress")
    for entry in have["power"]:
        say(f"    if {_percent(entry['true_rate'])} regress: probability {_percent(entry['power'])}")


def _show_table(rows: list[dict[str, Any]], per: str) -> None:
    say(f"  prompts needed{per} (and regressions allowed) to certify with the given probability:")
    say(f"    {'if really':<12}" + "".join(f"{_percent(power):>16}" for power in POWERS))
    for row in rows:
        cells = (f"{e['prompts']} ({e['regressions']})" if e["prompts"] else "too many" for e in row["needed"])
        say(f"    {_percent(row['true_rate']):<12}" + "".join(f"{cell:>16}" for cell in cells))


def _percent(share: float) -> str:
    """A share as a percentage of three significant digits; what is not certain does not print as 100 %."""
    return "> 99.9 %" if 0.999 < share < 1 else f"{100 * share:.3g} %"


def _hundredths(share: float, rounding: Callable[[float], int]) -> str:
    """A limit as a percentage of two decimals, rounded to the side on which what is said of it stays true."""
    return f"{rounding(1e4 * share) / 100:g} %"
