"""`holdfast audit`: how much worse one model is than another on safety data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.auditing.sharing import Sharing, joined
from holdfast.cli.options import (
    DataChoice,
    Device,
    DType,
    Json,
    Opt,
    Revision,
    TrustRemoteCode,
    column_mapping,
    given_options,
    written,
)
from holdfast.cli.progress import FORWARD, show_count
from holdfast.cli.terminal import interruptible, quiet_libraries, require_verdict, say, say_json
from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.percent import percent_up
from holdfast.core.units import UNITS
from holdfast.defaults import constraint_defaults, default

if TYPE_CHECKING:
    from holdfast.records.audit import Audit

DEFAULT_OUTPUT = "audit"
PAIR = ("before", "after", "safety")
LIMIT = ("tau", "alpha", "unit", "first_k")
SHARED = ("kl", "batch_tokens", "judge", "device", "max_new_tokens", "harm_tau", "trust_remote_code")
READING = (
    "dtype", "max_length", "template", "tokenizer", "split", "subset", "safety_revision", "before_revision",
    "after_revision", "open_closed",
)  # fmt: skip
_TAU = f"Largest acceptable degradation. [default: {default('constraint.tau')}]"
_ALPHA = f"Tolerated share beyond tau. [default: {default('constraint.alpha')}]"
_UNIT = (
    "nll_token, nll_sum, nll_first, kl_token or kl_first. "
    f"[default: {default('constraint.unit')} of an adapter, else {default('constraint.unit_of_two_models')}]"
)
_FIRST = f"Tokens that nll_first and kl_first look at. [default: {default('constraint.first_k')}]"
_TOKENS, _HARM_TAU = default("evidence.max_new_tokens"), default("evidence.harm_tau")
_JUDGE = "Judge replies too: NAME, NAME:option=value,... or a trained judge's folder; `holdfast ls judges`."
_SERVED = "A model behind a server: endpoint:base_url=URL,model_name=NAME,tokenizer=FOLDER[,key_env=VARIABLE]."
_Run = Annotated[
    Path | None, typer.Argument(help="A finished run, instead of --before, --after and --safety.", metavar="[RUN]")
]
_Before = Annotated[str | None, Opt(help="The model to compare with: hub id, folder, adapter, or an endpoint.")]
_After = Annotated[str | None, Opt(help=f"The model to judge: the same. {_SERVED}")]
_Open = Annotated[bool, Opt("--open", "--open-closed", help="Audit what is closed for a run too: spends an opening.")]


def audit(
    context: typer.Context,
    run: _Run = None,
    before: _Before = None,
    after: _After = None,
    safety: Annotated[str | None, Opt(help="The safety examples: a data file or a hub id.")] = None,
    tau: Annotated[float | None, Opt(help=_TAU)] = None,
    alpha: Annotated[float | None, Opt(help=_ALPHA)] = None,
    unit: Annotated[str | None, Opt(help=_UNIT)] = None,
    first_k: Annotated[int | None, Opt(help=_FIRST)] = None,
    output: Annotated[Path | None, Opt(help="Folder for the results. [default: audit, in a run's folder]")] = None,
    ledger: Annotated[Path | None, Opt(help="File of the looks. [default: beside the safety file]")] = None,
    open_closed: _Open = False,
    template: Annotated[str, Opt(help="chat, or none for plain text.")] = "chat",
    tokenizer: Annotated[str, Opt(help="same, before, after or own.")] = "same",
    kl: Annotated[bool | None, Opt("--kl/--no-kl", help="Measure KL. [default: with adapters]")] = None,
    dtype: DType = "auto",
    device: Device = None,
    max_length: Annotated[int | None, Opt(help="Tokens after which an example is cut.")] = None,
    batch_tokens: Annotated[int | None, Opt(help="Padded tokens a batch. [default: from memory]")] = None,
    columns: Annotated[list[str] | None, Opt(help="ours=theirs, such as prompt=question.")] = None,
    judge: Annotated[str | None, Opt(help=_JUDGE)] = None,
    max_new_tokens: Annotated[int, Opt(help="Length of the longest reply that is judged.")] = _TOKENS,
    harm_tau: Annotated[float, Opt(help="Largest acceptable rise of the judge's probability.")] = _HARM_TAU,
    before_revision: Revision = None,
    after_revision: Revision = None,
    safety_revision: DataChoice = None,
    split: DataChoice = None,
    subset: DataChoice = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Measure how much worse a model is than the one before.

    On safety examples; exit code 4 when over the limit.

    \b
    Example:
      holdfast audit --before embedded --after runs/first/adapter --safety safety.jsonl --tau 0.1 --alpha 0.05
      holdfast audit runs/first
    """
    _require_one_way(given_options(context))
    given = context.params
    limits = {name: given[name] for name in LIMIT if given[name] is not None}
    shared: dict[str, Any] = {name: given[name] for name in SHARED} | {"output": output}
    quiet_libraries()
    with (
        interruptible("the same command continues after the last measured window"),
        joined(device) as (shared["sharing"], shared["device"]),
        _progress(shared["sharing"].leads, judge) as shared["progress"],
    ):
        if run is not None:
            found = _audit_run(run, limits, **shared)
        else:
            reading = {name: given[name] for name in READING}
            reading |= {"columns": column_mapping(columns, "--columns"), "ledger": ledger}
            found = {"": _audit_two(before, after, safety, limits, **shared, **reading)}
    if shared["sharing"].leads:  # the first process speaks for all
        _report(found, json)


def _progress(leads: bool, judge: str | None) -> AbstractContextManager[Callable[[int, int], None]]:
    """On stderr, by the first process alone."""
    unit = FORWARD if judge is None else f"{FORWARD}, then replies"
    return show_count("audit", unit) if leads else nullcontext(lambda _done, _total: None)


def _require_one_way(given: set[str]) -> None:
    if "run" in given and (extra := sorted(given & {*PAIR, *READING, "columns", "ledger"})):
        what = f"a run and {written(extra)} are both given: a run's models and data are read as its run file says"
        raise ConfigError(what, remedy="leave them out, or name two models and data instead of the run")
    if "run" not in given and (missing := [name for name in PAIR if name not in given]):
        remedy = "give --before, --after and --safety, or a finished run's folder"
        raise ConfigError(f"{written(missing)} not given", remedy=remedy)


def _audit_two(
    before: Any, after: Any, safety: Any, limits: dict[str, Any], *, output: Path | None, **options: Any
) -> Audit:
    from holdfast.auditing.audit import audit as measure
    from holdfast.constraint.chance import ChanceConstraint
    from holdfast.models.adapter import adapter_folder
    from holdfast.models.source import resolve

    switchable = False
    served = any(str(model).startswith("endpoint:") for model in (before, after))
    if not served and "unit" not in limits and options["tokenizer"] != "own" and options["kl"] is not False:
        with suppress(HoldfastError):  # the audit refuses it, after the data
            source = resolve(after, options["after_revision"], options["trust_remote_code"])
            switchable = adapter_folder(source) is not None
    limit = ChanceConstraint(**constraint_defaults(kl=switchable) | limits)
    return measure(before, after, safety, limit, output=output or Path(DEFAULT_OUTPUT), **options)


def _audit_run(
    run: Path, limits: dict[str, Any], *, output: Path | None, progress: Callable[[int, int], None],
    device: str | None, trust_remote_code: bool, sharing: Sharing, **how: Any,
) -> dict[str, Audit]:  # fmt: skip
    from holdfast.auditing.audit import AuditOptions, audit_roles
    from holdfast.auditing.pair import open_pair
    from holdfast.data.stream import open_stream
    from holdfast.runs.load_finished import finished_run

    sets = finished_run(run).sets
    audits = {}
    for held in sets:
        roles = {role: examples for role, examples in held.split.roles.items() if role != "certify" and examples}
        template: Any = held.template
        streams = {role: open_stream(rows, template=template, name=held.source) for role, rows in roles.items()}
        place = held.folder / DEFAULT_OUTPUT if output is None else output / held.name if len(sets) > 1 else output
        dtype: Any = held.dtype
        with open_pair(
            held.before, held.after, dtype=dtype, device=device, before_revision=held.revision,
            tokenizer="after", trust_remote_code=trust_remote_code,  # what training read, template included
        ) as pair:  # fmt: skip
            limit, options = replace(held.constraint, **limits), AuditOptions(max_length=held.max_length, **how)
            audits[held.name] = audit_roles(pair, streams, limit, options, place, progress, sharing=sharing)
    return audits


def _report(found: dict[str, Audit], json: bool) -> None:
    within, several = all(result.within for result in found.values()), len(found) > 1
    if json:
        sets = {name: result.to_json() for name, result in found.items()}
        say_json({"within": within, "sets": sets} if several else next(iter(sets.values())))
    else:
        for name, result in found.items():
            say(f"{name}: {result.describe()}" if several else result.describe())
            say(figures_table(result))
            say(f"written to {result.folder}")
    require_verdict(within)


def figures_table(result: Audit) -> str:
    """Quantiles and CVaR of every measured unit, as text; under a verdict over several roles, of the one it names."""
    from holdfast.records.audit_figures import LEVELS

    role = f"{result.role}:" if len(result.roles) > 1 else ""
    lines = [role.ljust(10) + "".join(name.rjust(10) for name in (*LEVELS, "cvar"))]
    for unit in UNITS:
        entry = result.units.get(unit)
        if entry is not None:
            values = [*(entry["quantiles"][name] for name in LEVELS), entry["cvar"]]
            lines.append(unit.ljust(10) + "".join(("none" if v is None else f"{v:+.4f}").rjust(10) for v in values))
    if (behaviour := result.behaviour) is not None:
        flips = f"{behaviour['flips']} of {behaviour['n']} replies were safe before and unsafe after"
        lines.append(f"judge {behaviour['judge']}: {flips}; {behaviour['unscored']} unscored")
    if behaviour is not None and "on_policy" in behaviour:
        counted = behaviour["on_policy"]
        lines.append(
            f"on_policy: {counted['regressions']} of {counted['n']} replies more than {counted['tau']:g} above before's"
            f" in the judge's probability (95 % upper bound {percent_up(counted['upper'])})"
        )
    return "\n".join(lines)
