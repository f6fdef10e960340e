"""`holdfast verify`: recompute a certificate and everything it names."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.options import Json, Opt, TrustRemoteCode
from holdfast.cli.terminal import quiet_libraries, require_verdict, say, say_json


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

    quiet_libraries()
    record = recompute(
        certificate, before=before, after=after, prompts=prompts, ledger=ledger, expect=expect, key=key,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    if json:
        say_json(record.to_json())
    else:
        shown = (
            "all files agree with one another; only --expect with the sha256 from issue, or --key, shows who issued it"
        )
        if expect is not None or key is not None:
            shown = "nothing was changed" + ("" if key is None else f", and it is signed with {key}")
        say(f"verified: {shown}. {record.statement}")
        if record.screening is not None:
            from holdfast.certification.statement import screened

            say(screened(record.screening))
    require_verdict(record.certified)
