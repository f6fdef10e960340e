"""`holdfast verify`: recompute a certificate and everything it names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.terminal import quiet_libraries, say, say_json
from holdfast.core.errors import InfeasibleError

_Flag = typer.Option


def verify(
    certificate: Annotated[Path, typer.Argument(help="certificate.json, or the folder that holds it.")],
    before: Annotated[str | None, _Flag(help="Where the model before is now.")] = None,
    after: Annotated[str | None, _Flag(help="Where the model after is now.")] = None,
    prompts: Annotated[str | None, _Flag(help="Where the prompts are now.")] = None,
    ledger: Annotated[Path | None, _Flag(help="Where the ledger of openings is now.")] = None,
    expect: Annotated[str | None, _Flag(help="The sha256 printed at issue, of the content.")] = None,
    key: Annotated[Path | None, _Flag(help="The signer's public key, or a file of allowed signers.")] = None,
    trust_remote_code: Annotated[
        bool, _Flag("--trust-remote-code", help="Run the code of the models' repositories.")
    ] = False,
    json: Annotated[bool, _Flag("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Recompute a certificate from the files it names. Exit code 0: sound, 4: sound but not certified, 6: changed.

    \b
    Example:
      holdfast verify evidence --expect SHA256
      holdfast verify evidence --key signer.pub --after where/the/adapter/is/now
    """
    from holdfast.auditing.verify import verify as recompute

    quiet_libraries()
    record = recompute(
        certificate, before=before, after=after, prompts=prompts, ledger=ledger, expect=expect, key=key,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if json:
        say_json(record.to_json())
    else:
        say(f"verified: {_shown(expect, key)}. {record.statement}")
        if record.screening is not None:
            from holdfast.certification.sentence import screened

            say(screened(record.screening))
    if not record.certified:
        raise typer.Exit(InfeasibleError.exit_code)


def _shown(expect: str | None, key: Path | None) -> str:
    if key is not None:
        return f"nothing was changed, and it is signed with {key}"
    if expect is not None:
        return "nothing was changed"
    return "all files agree with one another; only --expect with the sha256 from issue, or --key, shows who issued it"
