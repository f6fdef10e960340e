"""`holdfast audit`: how much worse one model is than another on safety data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.counting import FORWARD, show_count
from holdfast.cli.options import column_mapping, given_options, option_name
from holdfast.cli.terminal import note, quiet_libraries, say, say_json
from holdfast.core.errors import ConfigError, InfeasibleError
from holdfast.core.percent import percent_up

if TYPE_CHECKING:
    from holdfast.auditing.result import Audit
    from holdfast.constraint.chance import ChanceConstraint

INTERRUPTED = 130
DEFAULT_OUTPUT = "audit"
PAIR = ("before", "after", "safety")
READING = (
    "dtype", "max_length", "template", "tokenizer", "columns", "split", "subset", "safety_revision",
    "before_revision", "after_revision", "ledger", "open_closed",
)  # fmt: skip
_Judge = Annotated[
    str | None,
    typer.Option(
        help="Judge replies too: NAME, NAME:option=value,... or a trained judge's folder; `holdfast ls judges`."
    ),
]
_Open = Annotated[
    bool, typer.Option("--open", "--open-closed", help="Audit what is closed for a run too: spends an opening.")
]
_Ledger = Annotated[Path | None, typer.Option(help="File of the looks. [default: beside the safety file]")]
_Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let repositories run their code; needs pinned revisions.")
]


def audit(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(help="A finished run, instead of --before, --after and --safety.", metavar="[RUN]")
    ] = None,
    before: Annotated[str | None, typer.Option(help="The model to compare with: hub id, folder, adapter.")] = None,
    after: Annotated[str | None, typer.Option(help="The model to judge: hub id, folder, adapter.")] = None,
    safety: Annotated[str | None, typer.Option(help="The safety examples: a data file or a hub id.")] = None,
    tau: Annotated[float | None, typer.Option(help="Largest acceptable degradation. [default: 0.1]")] = None,
    alpha: Annotated[float | None, typer.Option(help="Tolerated share beyond tau. [default: 0.05]")] = None,
    unit: Annotated[str | None, typer.Option(help="nll_token (default), nll_sum, nll_first or kl_token.")] = None,
    first_k: Annotated[int | None, typer.Option(help="Tokens that nll_first looks at. [default: 8]")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the results. [default: audit, or the run's folder /audit]")
    ] = None,
    ledger: _Ledger = None,
    open_closed: _Open = False,
    template: Annotated[str, typer.Option(help="chat, or none for plain text.")] = "chat",
    tokenizer: Annotated[str, typer.Option(help="same, before, after or own.")] = "same",
    kl: Annotated[bool | None, typer.Option("--kl/--no-kl", help="Measure KL. [default: with adapters]")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: a GPU where there is one]")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens after which an example is cut.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Padded tokens a batch. [default: from memory]")] = None,
    columns: Annotated[list[str] | None, typer.Option(help="ours=theirs, such as prompt=question.")] = None,
    judge: _Judge = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the longest reply that is judged.")] = 128,
    harm_tau: Annotated[float, typer.Option(help="Largest acceptable rise of the judge's probability.")] = 0.1,
    before_revision: Annotated[str | None, typer.Option(help="Of a hub id.")] = None,
    after_revision: Annotated[str | None, typer.Option(help="Of a hub id.")] = None,
    safety_revision: Annotated[str | None, typer.Option(help="Of a hub data set.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a hub data set.")] = None,
    subset: Annotated[str | None, typer.Option(help="Of a hub data set.")] = None,
    trust_remote_code: _Trust = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure how much worse one model is than another on safety examples; exit code 4 when over the limit.

    \b
    Example:
      holdfast audit --before embedded --after runs/first/adapter --safety safety.jsonl --tau 0.1 --alpha 0.05
      holdfast audit runs/first
    """
    _require_one_way(given_options(context))
    wanted = {"tau": tau, "alpha": alpha, "unit": unit, "first_k": first_k}
    limits = {name: value for name, value in wanted.items() if value is not None}
    shared: dict[str, Any] = {"kl": kl, "batch_tokens": batch_tokens, "judge": judge, "device": device}
    shared |= {"max_new_tokens": max_new_tokens, "harm_tau": harm_tau}
    reading: dict[str, Any] = {
        "dtype": dtype, "max_length": max_length, "template": template, "tokenizer": tokenizer,
        "columns": column_mapping(columns), "split": split, "subset": subset, "safety_revision": safety_revision,
        "before_revision": before_revision, "after_revision": after_revision, "ledger": ledger,
        "open_closed": open_closed,
    }  # fmt: skip
    quiet_libraries()
    try:
        with show_count("audit", FORWARD if judge is None else f"{FORWARD}, then replies") as progress:
            shared |= {"output": output, "progress": progress, "trust_remote_code": trust_remote_code}
            found = (
                _audit_run(run, limits, **shared)
                if run
                else _audit_two((before, after, safety), limits, **shared, **reading)
            )
    except KeyboardInterrupt as error:
        note("interrupted: the same command continues after the last measured window")
        raise typer.Exit(INTERRUPTED) from error
    _report(found, json)


def _require_one_way(given: set[str]) -> None:
    """A run, which brings its own models, data and way of reading them; or two models and data."""
    if "run" in given and (extra := sorted(given & {*PAIR, *READING})):
        raise ConfigError(
            f"a run and {', '.join(map(option_name, extra))} are both given: a run's models and data are read as its"
            " run file says",
            remedy="leave them out, or name two models and data instead of the run",
        )
    if "run" not in given and (missing := [name for name in PAIR if name not in given]):
        raise ConfigError(
            f"{', '.join(map(option_name, missing))} not given",
            remedy="give --before, --after and --safety, or a finished run's folder",
        )


def _audit_two(
    question: tuple[Any, Any, Any], limits: dict[str, Any], *, output: Path | None, **options: Any
) -> dict[str, Audit]:
    """Audit two models on a data file."""
    from holdfast.auditing.audit import audit as measure
    from holdfast.constraint.chance import ChanceConstraint

    limit = ChanceConstraint(**limits)
    return {"": measure(*question, limit, output=output or Path(DEFAULT_OUTPUT), **options)}


def _audit_run(
    run: Path,
    limits: dict[str, Any],
    *,
    output: Path | None,
    progress: Callable[[int, int], None],
    device: str | None,
    trust_remote_code: bool,
    **how: Any,
) -> dict[str, Audit]:
    """Audit the constraint and monitor splits of every safety set of a run; the certify split stays closed."""
    from holdfast.finished import finished_sets

    sets = finished_sets(run)
    from holdfast.auditing.audit import How, audit_roles
    from holdfast.auditing.pair import open_pair
    from holdfast.data.stream import open_stream

    found = {}
    for item in sets:
        roles = {role: examples for role, examples in item.split.roles.items() if role != "certify" and examples}
        template: Any = item.template
        streams = {role: open_stream(rows, template=template, name=item.source) for role, rows in roles.items()}
        limit: ChanceConstraint = replace(item.constraint, **limits)
        dtype: Any = item.dtype
        with open_pair(
            item.before, item.after, dtype=dtype, device=device, before_revision=item.revision,
            tokenizer="after", trust_remote_code=trust_remote_code,  # what training read, template included
        ) as pair:  # fmt: skip
            folder = item.folder / DEFAULT_OUTPUT if output is None else output
            folder = folder / item.name if output is not None and len(sets) > 1 else folder
            options = How(max_length=item.max_length, **how)
            found[item.name] = audit_roles(pair, streams, limit, options, folder, progress)
    return found


def _report(found: dict[str, Audit], json: bool) -> None:
    within = all(result.within for result in found.values())
    if json and len(found) == 1:
        say_json(next(iter(found.values())).to_json())
    elif json:
        say_json({"within": within, "sets": {name: result.to_json() for name, result in found.items()}})
    else:
        for name, result in found.items():
            say(f"{name}: {result.describe()}" if len(found) > 1 else result.describe())
            say(figures_table(result))
            say(f"written to {result.folder}")
    if not within:
        raise typer.Exit(InfeasibleError.exit_code)


def figures_table(result: Audit) -> str:
    """Quantiles and CVaR of every measured unit, as text; under a verdict over several roles, of the one it names."""
    from holdfast.records.audit_figures import LEVELS, UNITS

    role = f"{result.role}:" if len(result.roles) > 1 else ""
    lines = [role.ljust(10) + "".join(name.rjust(10) for name in (*LEVELS, "cvar"))]
    for unit in UNITS:
        entry = result.units[unit]
        if entry is not None:
            values = [*(entry["quantiles"][name] for name in LEVELS), entry["cvar"]]
            lines.append(unit.ljust(10) + "".join(("none" if v is None else f"{v:+.4f}").rjust(10) for v in values))
    behaviour = result.behaviour
    if behaviour is not None:
        lines.append(
            f"judge {behaviour['judge']}: {behaviour['flips']} of {behaviour['n']} replies were safe before and unsafe"
            f" after; {behaviour['unscored']} unscored"
        )
    if behaviour is not None and "on_policy" in behaviour:
        counted = behaviour["on_policy"]
        lines.append(
            f"on_policy: {counted['regressions']} of {counted['n']} replies more than {counted['tau']:g} above before's"
            f" in the judge's probability (95 % upper bound {percent_up(counted['upper'])})"
        )
    return "\n".join(lines)
