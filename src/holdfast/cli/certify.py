"""`holdfast certify`: compare two models on closed prompts; `holdfast verify`: recompute a certificate."""

from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from holdfast.cli.options import Device, DType, Json, Opt, TrustRemoteCode, given_options, settings_from, written
from holdfast.cli.terminal import note, quiet_libraries, require_verdict, say, say_json
from holdfast.core.errors import ConfigError
from holdfast.defaults import default
from holdfast.records.certificate import FILE_NAME, CertificateRecord

WAYS = {"harm": "a judge", "log": "the logs' score"}
SETTINGS = {
    "unit": str, "first_k": int, "allow_tau_below_noise": bool, "max_new_tokens": int, "template": str,
    "tokenizer": str, "max_length": int, "before_revision": str, "after_revision": str,
    "split": str, "subset": str, "revision": str, "threshold": float, "epochs": str,
}  # fmt: skip
"""What `--set` knows; columns are set by `columns.prompt=NAME` and the like."""
KINDS = {"anytime": "sequential", "per_category": "per_category", "strength": "strength", "pool": "finite_pool"}
OF_RUN = {  # what a run settles itself
    "before", "after", "prompts", "train_data", "train_columns", "openings", "score", "alpha",
}  # fmt: skip
NOT_OF_LOGS = {
    "prompts", "by", "also", "judge", "pool", "anytime", "strength", "train_data", "train_columns", "trust_remote_code",
    "tau", "dtype", "device",
}  # fmt: skip
_TrainColumns = Annotated[list[str] | None, Opt(help="Of --train-data: ours=theirs, such as prompt=question.")]
_By = Annotated[str, Opt(help="What is compared: behaviour, kl or likelihood (the last two are steering figures).")]
_Also = Annotated[list[str] | None, Opt(help="answers: claim the same for prompts that the model before answered.")]
_JUDGE = "Count replies that this judge finds more harmful: NAME, NAME:option=value,... or a judge's folder."
_TAU = (
    "By kl and likelihood, in nats; with a judge, of its probability: what may be lost. "
    f"[default: {default('constraint.tau')}]"
)
_ALPHA = f"The share that may be lost. [default: {default('constraint.alpha')}]"
_Drawn = Annotated[str, Opt(help="groups of near-duplicates, or rows: you assert that prompts were drawn one by one.")]
_Weight = Annotated[int | None, Opt(help="Claim a share of prompts, a group of near-duplicates weighing at most this.")]
_Strength = Annotated[bool, Opt("--strength", help="Find the largest adapter strength that certifies, and write it.")]
_SET = "KEY=VALUE, repeatable: " + ", ".join([*SETTINGS, "columns.prompt=NAME"]) + "."


def certify(
    context: typer.Context,
    run: Annotated[Path | None, typer.Argument(help="A finished run's folder.", metavar="[RUN]")] = None,
    before: Annotated[str | None, Opt(help="Model before: hub id, folder, adapter; or an evaluation log.")] = None,
    after: Annotated[str | None, Opt(help="Model after: the same.")] = None,
    prompts: Annotated[str | None, Opt(help="Prompts that nobody looked at: a file or hub data set.")] = None,
    by: _By = "behaviour",
    also: _Also = None,
    judge: Annotated[str | None, Opt(help=_JUDGE)] = None,
    score: Annotated[str | None, Opt(help="Of two evaluation logs: the score that counts.")] = None,
    alpha: Annotated[float | None, Opt(help=_ALPHA)] = None,
    tau: Annotated[float | None, Opt(help=_TAU)] = None,
    confidence: Annotated[float, Opt(help="1 - delta, over all openings together.")] = default("certify.confidence"),
    drawn: _Drawn = "groups",
    max_weight: _Weight = None,
    per_category: Annotated[bool, Opt("--per-category", help="Certify every category, with Holm.")] = False,
    pool: Annotated[int | None, Opt(help="The prompts are a sample from a known list of this size.")] = None,
    anytime: Annotated[bool, Opt("--anytime", help="Prompts arrive in sequence; the file may grow.")] = False,
    strength: _Strength = False,
    openings: Annotated[int | None, Opt(help="How often these prompts may ever be opened. [default: 1]")] = None,
    train_data: Annotated[list[str] | None, Opt(help="Training data the prompts must not be in.")] = None,
    train_columns: _TrainColumns = None,
    output: Annotated[Path | None, Opt(help="Folder for the certificate. [default: the run, or certificate]")] = None,
    ledger: Annotated[Path | None, Opt(help="File of the openings. [default: beside the prompts]")] = None,
    sign: Annotated[Path | None, Opt(help="Sign the certificate with this OpenSSH ed25519 key.")] = None,
    dtype: DType = "auto",
    device: Device = None,
    settings: Annotated[list[str] | None, Opt("--set", help=_SET)] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Test on closed prompts that refusals were kept.

    Certified: at most alpha of what the model before refused is no longer refused. Exit code 0: certified, 4: not.

    \b
    Example: a gate in CI for a model that someone else trained
      holdfast certify --before base-model --after their-adapter --prompts held-out.jsonl \\
        --train-data train.jsonl --output evidence && deploy their-adapter
      holdfast verify evidence --expect SHA256        # 6: something was changed
    \b
    Further examples:
      holdfast certify runs/first
      holdfast certify --before A --after B --prompts F --also answers --sign ~/.ssh/id_ed25519
      holdfast certify --before A --after B --prompts F --by kl --tau 0.05
      holdfast certify --before before.eval --after after.eval --score includes
    """
    values = dict(context.params)
    values |= {"run": run, "output": output, "ledger": ledger, "sign": sign}  # of older typer, the context has texts
    values["given"] = settings_from(settings, SETTINGS)
    given, kind = given_options(context), _kind(values)
    if {"by", "judge"} <= given and by != "behaviour":
        raise ConfigError(f"--judge with --by {by}: a judge reads replies", remedy="leave out --by, or --judge")
    if sign is not None:
        from holdfast.certification.signing import load_private_key

        load_private_key(sign)  # an unusable key is refused before anything is measured
    logs = "run" not in given and (_is_log(before) or _is_log(after) or "score" in given)
    _require_options(given, logs)
    # Only now the slow part: a mistake on the command line is reported before torch is loaded.
    from holdfast.cli.certificates import of_logs, of_pair, of_run

    _show((of_run if "run" in given else of_logs if logs else of_pair)(values, kind), values)


def _kind(values: dict[str, Any]) -> str:
    kinds = [kind for name, kind in KINDS.items() if values[name]]
    if len(kinds) > 1:
        raise ConfigError(f"one certificate cannot be {' and '.join(kinds)} at once", remedy="choose one of them")
    return kinds[0] if kinds else "fixed"


def _require_options(given: set[str], logs: bool) -> None:
    of_run, needed = "run" in given, {"before", "after"} if logs else {"before", "after", "prompts"}
    excluded, what = (OF_RUN, "a run") if of_run else (NOT_OF_LOGS if logs else set(), "evaluation logs")
    if other := sorted(given & excluded):
        raise ConfigError(
            f"{written(other)} cannot be given together with {what}, which settles that itself",
            remedy="declare openings in the run file (safety: openings:) before the first opening; "
            "other prompts or models: --before MODEL --after ADAPTER --prompts FILE",
        )
    if "train_columns" in given and "train_data" not in given:
        raise ConfigError("--train-columns without --train-data", remedy="name the file with --train-data")
    if missing := sorted(set() if of_run else needed - given):
        remedy = "holdfast certify --before MODEL --after ADAPTER --prompts FILE, or holdfast certify RUN"
        raise ConfigError(f"{written(missing)} must be given", remedy=remedy)


def _is_log(ref: str | None) -> bool:
    """Whether a reference is an evaluation log by its name: inspect's, or lm-eval's samples."""
    name = "" if ref is None else Path(ref).name
    return name.endswith(".eval") or (name.startswith("samples_") and name.endswith(".jsonl"))


def _show(records: dict[str, tuple[Path, CertificateRecord]], values: dict[str, Any]) -> None:
    from holdfast.certification.signing import sign

    certified = all(record.certified for _, record in records.values())
    for place, _ in records.values() if values["sign"] is not None else ():
        note(f"signed: {sign(place / FILE_NAME, values['sign'])}")
    if values["json"]:
        sets = {name: record.to_json() for name, (_, record) in records.items()}
        say_json(sets.get("", {"certified": certified, "sets": sets}))
    else:
        for name, (place, record) in records.items():
            _show_one(name, place, record)
    require_verdict(certified)


def _show_one(name: str, place: Path, record: CertificateRecord) -> None:
    from holdfast.certification.terms import screened

    say(f"{name}: {record.statement}" if name else record.statement)
    if (seen := record.behaviour) is not None:
        for unit, count in seen["counted"].items():
            verb = {"refusals": "refused", "answers": "answered"}[unit]
            say(f"  {verb} before: {count} of {seen['prompts']} prompts, lost: {seen['lost'][unit]}")
    if record.screening is not None:
        say(f"  {screened(record.screening)}")
    say(f"  opening {record.openings['this']} of {record.openings['declared']}, issued {record.made}")
    file = place / FILE_NAME
    say(f"  written to {file} (sha256 {record.sha256})")
    say(f"  check it with: holdfast verify {quote(str(file))} --expect {record.sha256}")
    if record.strength is not None and record.strength["adapter"] is not None:
        say(f"  adapter: {record.strength['adapter']}")
    say(f"  {verdict(record)}")


def verdict(record: CertificateRecord) -> str:
    """What follows for whoever decides: only behaviour says deploy."""
    if record.by in ("kl", "likelihood"):
        return "verdict: none. Certify by behaviour (leave out --by) before you deploy."
    if record.by != "behaviour":
        return f"verdict: {'' if record.certified else 'not '}certified by {WAYS[record.by]}, not by refusals kept"
    return "verdict: deploy" if record.certified else "verdict: do not deploy"


def verify(
    certificate: Annotated[Path, typer.Argument(help="certificate.json, or the folder that holds it.")],
    before: Annotated[str | None, Opt(help="Where the model before is now.")] = None,
    after: Annotated[str | None, Opt(help="Where the model after is now.")] = None,
    prompts: Annotated[str | None, Opt(help="Where the prompts are now.")] = None,
    ledger: Annotated[Path | None, Opt(help="Where the ledger of openings is now.")] = None,
    expect: Annotated[str | None, Opt(help="The sha256 printed at issue, of the content.")] = None,
    key: Annotated[Path | None, Opt(help="The signer's public key, or a file of allowed signers.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Recompute a certificate from the files it names. Exit code 0: sound, 4: sound but not certified, 6: changed.

    \b
    Example:
      holdfast verify evidence --expect SHA256
      holdfast verify evidence --key signer.pub --after where/the/adapter/is/now
    """
    from holdfast.auditing.verify import verify as recompute
    from holdfast.certification.terms import screened

    quiet_libraries()
    record = recompute(
        certificate, before=before, after=after, prompts=prompts, ledger=ledger, expect=expect, key=key,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if json:
        say_json(record.to_json())
    else:
        shown = "all files agree with one another; only --expect with the sha256 at issue, or --key, says who issued it"
        if expect is not None or key is not None:
            shown = "nothing was changed" + ("" if key is None else f", and it is signed with {key}")
        say(f"verified: {shown}. {record.statement}")
        if record.screening is not None:
            say(screened(record.screening))
    require_verdict(record.certified)
