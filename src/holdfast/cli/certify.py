"""`holdfast certify`: open a certify split, verify a certificate, or test bare counts; the exit code is the verdict."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import column_mapping, given_options, option_name
from holdfast.cli.terminal import note, quiet_libraries, say, say_json
from holdfast.core.errors import ConfigError, InfeasibleError
from holdfast.core.files import require_writable

if TYPE_CHECKING:
    from holdfast.certification.record import CertificateRecord
    from holdfast.constraint.chance import ChanceConstraint

INTERRUPTED = 130
_Flag = typer.Option
_Tau = Annotated[
    float | None,
    _Flag(help="The largest acceptable degradation: nats of --unit, with --judge a probability. [default: 0.1]"),
]
_Alpha = Annotated[float | None, _Flag(help="The share of prompts that may exceed it. [default: 0.05]")]
_Unit = Annotated[str | None, _Flag(help="nll_token, nll_sum, nll_first or kl_token. [default: nll_token]")]
_Openings = Annotated[int | None, _Flag(help="How often these prompts may ever be opened; declared once. [default: 1]")]
_Columns = Annotated[list[str] | None, _Flag("--columns", help="ours=theirs, e.g. prompt=question; may be repeated.")]
_TrainData = Annotated[list[str] | None, _Flag("--train-data", help="Training data the prompts must not be in.")]
_Tokenizer = Annotated[str, _Flag(help="Whose tokenizer reads the data: same, before, after or own.")]
_Strength = Annotated[bool, _Flag("--strength", help="Find the largest adapter strength that certifies, and write it.")]
_Pool = Annotated[int | None, _Flag(help="The prompts are a sample from a known list of this size.")]
_Judge = Annotated[
    str | None,
    _Flag(
        help="Count replies that it finds worse, not likelihoods that fell: NAME, NAME:option=value,... or the folder "
        "of a trained judge; `holdfast ls judges`."
    ),
]
_Noise = Annotated[bool, _Flag("--allow-tau-below-noise", help="Accept a tau inside the numerical noise.")]
_Trust = Annotated[bool, _Flag("--trust-remote-code", help="Run the repositories' code; needs pinned revisions.")]


def certify(
    context: typer.Context,
    run: Annotated[Path | None, typer.Argument(help="A finished run's folder.", metavar="[RUN]")] = None,
    before: Annotated[str | None, _Flag(help="Model before: hub id, folder, adapter or embedded.")] = None,
    after: Annotated[str | None, _Flag(help="Model after: the same.")] = None,
    safety: Annotated[str | None, _Flag(help="Certify prompts: a file or hub data set.")] = None,
    tau: _Tau = None,
    alpha: _Alpha = None,
    unit: _Unit = None,
    first_k: Annotated[int | None, _Flag(help="Tokens that nll_first looks at. [default: 8]")] = None,
    confidence: Annotated[float, _Flag(help="1 - delta, over all openings together.")] = 0.95,
    openings: _Openings = None,
    pool: _Pool = None,
    anytime: Annotated[bool, _Flag("--anytime", help="Prompts arrive in sequence; the file may grow.")] = False,
    per_category: Annotated[bool, _Flag("--per-category", help="Certify every category, with Holm.")] = False,
    strength: _Strength = False,
    train_data: _TrainData = None,
    output: Annotated[Path | None, _Flag(help="Folder for the certificate. [default: the run, or certificate]")] = None,
    ledger: Annotated[Path | None, _Flag(help="File of the openings. [default: beside the safety file]")] = None,
    columns: _Columns = None,
    template: Annotated[str, _Flag(help="chat, or none for plain text.")] = "chat",
    tokenizer: _Tokenizer = "same",
    max_length: Annotated[int | None, _Flag(help="Tokens after which an example is cut.")] = None,
    dtype: Annotated[str, _Flag(help="auto, bfloat16 or float32.")] = "auto",
    device: Annotated[str | None, _Flag(help="cuda, cpu, ... [default: a GPU where there is one]")] = None,
    before_revision: Annotated[str | None, _Flag(help="Commit, tag or branch of a hub id.")] = None,
    after_revision: Annotated[str | None, _Flag(help="Commit, tag or branch of a hub id.")] = None,
    safety_revision: Annotated[str | None, _Flag(help="Of a hub data set.")] = None,
    split: Annotated[str | None, _Flag(help="Of a hub data set.")] = None,
    subset: Annotated[str | None, _Flag(help="Of a hub data set.")] = None,
    judge: _Judge = None,
    max_new_tokens: Annotated[int, _Flag(help="Length of the longest reply that is judged.")] = 128,
    allow_tau_below_noise: _Noise = False,
    trust_remote_code: _Trust = False,
    verify: Annotated[Path | None, _Flag("--verify", help="Recompute this certificate.json and all it names.")] = None,
    expect: Annotated[str | None, _Flag(help="With --verify: the sha256 printed at issue, of the content.")] = None,
    regressions: Annotated[int | None, _Flag(help="With --n: test a bare count.")] = None,
    n: Annotated[int | None, _Flag("--n", help="With --regressions: prompts measured.")] = None,
    json: Annotated[bool, _Flag("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Certify that at most alpha of prompts like these degrade by more than tau. Exit code 0: certified, 4: not.

    \b
    Example: a gate in CI for a model that someone else trained
      holdfast certify --before base-model --after their-adapter --safety held-out.jsonl \\
        --train-data train.jsonl --output evidence && deploy their-adapter
      holdfast certify --verify evidence/certificate.json --expect SHA256   # 6: something was changed
    \b
    Further examples:
      holdfast certify runs/first
      holdfast certify --before A --after B --safety F --strength
      holdfast certify --regressions 3 --n 200
    """
    values = dict(context.params)
    _WAYS[_way(given_options(context))](values)


def _way(given: set[str]) -> str:
    """Which of the four uses is meant; an option of another use is refused."""
    way = next((name for name in ("verify", "regressions", "run") if name in given), "before")
    if way == "before" and "n" in given:
        way = "regressions"
    if strange := sorted(given - _OPTIONS[way]):
        raise ConfigError(
            f"{', '.join(map(option_name, strange))} cannot be given together with {option_name(way)}",
            remedy="holdfast certify --help shows the uses; a run's own settings are those of its run file",
        )
    without = _UNJUDGED if "judge" in given else _JUDGED if way == "run" else _JUDGED - {"tau"}
    if strange := sorted(given & without & _OPTIONS[way]):
        wrongly = "with" if "judge" in given else "without"
        raise ConfigError(
            f"{', '.join(map(option_name, strange))} cannot be given {wrongly} --judge",
            remedy="with --judge replies are compared, otherwise likelihoods; holdfast certify --help",
        )
    if missing := [name for name in _NEEDED[way] if name not in given]:
        raise ConfigError(f"{', '.join(map(option_name, missing))} must be given", remedy="holdfast certify --help")
    return way


def _counts(values: dict[str, Any]) -> None:
    from holdfast.certification.certificate import certify as test

    options = {name: values[name] for name in ("alpha", "openings", "pool") if values[name] is not None}
    made = test(values["regressions"], values["n"], confidence=values["confidence"], **options)
    if values["json"]:
        say_json(made.to_json())
    else:
        say(made.statement())
    _finish(made.certified)


def _verify(values: dict[str, Any]) -> None:
    from holdfast.auditing.verify import verify as recompute

    quiet_libraries()
    moved = {name: values[name] for name in ("before", "after", "safety", "ledger", "expect", "trust_remote_code")}
    record = recompute(values["verify"], **moved)
    if values["json"]:
        say_json(record.to_json())
    else:
        say(f"verified: {_unchanged(values['expect'])}. {record.statement}")
    _finish(record.certified)


def _unchanged(expect: str | None) -> str:
    if expect is not None:
        return "nothing was changed"
    return "all files agree with one another; only --expect with the sha256 from issue shows that it is the one issued"


def _pair(values: dict[str, Any]) -> None:
    from holdfast.auditing.question import Setup
    from holdfast.constraint.chance import ChanceConstraint

    names = ("tau", "alpha", "unit", "first_k")
    limit = ChanceConstraint(
        **{name: values[name] for name in names if values[name] is not None},
        allow_tau_below_noise=values["allow_tau_below_noise"],
    )
    reading = {"columns": column_mapping(values["columns"]), "revision": values["safety_revision"]}
    reading |= {name: values[name] for name in ("split", "subset")}
    shared = ("template", "tokenizer", "max_length", "dtype", "device", "before_revision", "after_revision")
    setup = Setup(
        **{name: values[name] for name in (*shared, "trust_remote_code")},
        reading={name: value for name, value in reading.items() if value is not None},
    )
    place = values["output"] or Path("certificate")
    record = _opened(
        values, values["before"], values["after"], values["safety"], limit,
        output=place, openings=values["openings"],
        train_data=values["train_data"] or (), setup=setup,
    )  # fmt: skip
    _show({"": record}, {"": place}, values)


def _run(values: dict[str, Any]) -> None:
    from holdfast.auditing.certify_prompts import Leakage
    from holdfast.auditing.question import Setup
    from holdfast.config import load_config
    from holdfast.data.split_record import RECORD_NAME
    from holdfast.finished import finished_sets

    sets, config = finished_sets(values["run"]), load_config(values["run"] / "config.yaml")
    records, places = {}, {}
    for one in sets:
        block = config.safety[one.name].model_dump()
        reading = {name: block[name] for name in ("columns", "split", "subset", "limit", "revision") if block[name]}
        setup = Setup(
            template=one.template, max_length=one.max_length, dtype=one.dtype, device=values["device"],
            before_revision=one.revision, tokenizer="after", reading=reading,
            trust_remote_code=values["trust_remote_code"],
        )  # fmt: skip
        place = one.folder if values["output"] is None else values["output"] / (one.name if len(sets) > 1 else "")
        name = one.name if len(sets) > 1 else ""
        places[name] = place
        # Reading a finished run refuses certify prompts that its task data holds, so that search was made.
        searched = Leakage(checked=True, against=f"the task data of {values['run']}", prompts=len(one.split.certify))
        limit = one.constraint if values["judge"] is None else _judged_limit(one.constraint.alpha, values["tau"])
        records[name] = _opened(
            values, one.before, one.after, one.split.certify, limit, output=place, openings=one.openings,
            source=one.source, splits=one.folder / RECORD_NAME, leakage=searched, setup=setup,
            notes=_several(len(sets), values["confidence"]),
        )  # fmt: skip
    _show(records, places, values)


def _judged_limit(alpha: float, tau: float | None) -> ChanceConstraint:
    """The limit of a run for replies: its alpha, and a tau of its own, since the run's is in nats."""
    from holdfast.constraint.chance import ChanceConstraint

    return ChanceConstraint(alpha=alpha) if tau is None else ChanceConstraint(alpha=alpha, tau=tau)


def _several(sets: int, confidence: float) -> list[str]:
    if sets == 1:
        return []
    return [
        f"Each of the {sets} safety sets is certified at confidence {confidence:g} of its own; that all statements "
        "hold together is less certain than that."
    ]


def _opened(values: dict[str, Any], *question: Any, **options: Any) -> CertificateRecord:
    from holdfast.auditing.opening import open_certify
    from holdfast.cli.counting import FORWARD, show_count

    quiet_libraries()
    kinds = {"anytime": "sequential", "per_category": "per_category", "strength": "strength", "pool": "finite_pool"}
    asked = [kind for name, kind in kinds.items() if values[name]]
    if len(asked) > 1:
        raise ConfigError(f"one certificate cannot be {' and '.join(asked)} at once", remedy="choose one of them")
    options |= {name: values[name] for name in ("confidence", "pool", "ledger", "judge", "max_new_tokens")}
    require_writable(options["output"])  # an opening must not be spent on a certificate that cannot be kept
    try:
        with show_count("measured", FORWARD if values["judge"] is None else "replies") as progress:
            return open_certify(*question, kind=asked[0] if asked else "fixed", progress=progress, **options)
    except KeyboardInterrupt as error:
        note("interrupted: the opening stays entered, and the same command continues it")
        raise typer.Exit(INTERRUPTED) from error


def _show(records: dict[str, CertificateRecord], places: dict[str, Path], values: dict[str, Any]) -> None:
    """The verdict and where it lies; nothing of the single prompts."""
    from holdfast.certification.record import FILE_NAME

    certified = all(record.certified for record in records.values())
    if values["json"] and "" in records:
        say_json(records[""].to_json())
    elif values["json"]:
        say_json({"certified": certified, "sets": {name: record.to_json() for name, record in records.items()}})
    else:
        for name, record in records.items():
            say(f"{name}: {record.statement}" if name else record.statement)
            entry = record.openings
            say(f"  opening {entry['this']} of {entry['declared']}, issued {record.made}")
            file = places[name] / FILE_NAME
            say(f"  written to {file} (sha256 {record.sha256})")
            say(f"  check it with: holdfast certify --verify {quote(str(file))} --expect {record.sha256}")
            if record.strength is not None and record.strength["adapter"] is not None:
                say(f"  adapter: {record.strength['adapter']}")
    _finish(certified)


def _finish(certified: bool) -> None:
    if not certified:
        raise typer.Exit(InfeasibleError.exit_code)


_WAYS = {"verify": _verify, "regressions": _counts, "run": _run, "before": _pair}
_NEEDED = {"verify": ("verify",), "regressions": ("regressions", "n"), "run": ("run",)}
_NEEDED["before"] = ("before", "after", "safety")
_JUDGED = {"max_new_tokens", "tau"}  # of replies; two models have a tau of likelihoods too
_UNJUDGED = {"unit", "first_k", "max_length", "allow_tau_below_noise"}
_OPTIONS = {
    "verify": {"verify", "expect", "before", "after", "safety", "ledger", "trust_remote_code", "json"},
    "regressions": {"regressions", "n", "alpha", "confidence", "openings", "pool", "json"},
    "run": {"run", "confidence", "pool", "per_category", "strength", "output", "ledger", "device", "trust_remote_code",
            "json", "judge", "max_new_tokens", "tau"},
    "before": {
        "before", "after", "safety", "tau", "alpha", "unit", "first_k", "confidence", "openings", "pool", "anytime",
        "per_category", "strength", "train_data", "output", "ledger", "columns", "template", "tokenizer", "max_length",
        "dtype", "device", "before_revision", "after_revision", "safety_revision", "split", "subset",
        "allow_tau_below_noise", "trust_remote_code", "json", "judge", "max_new_tokens",
    },
}  # fmt: skip
