"""Options of the first release, refused with what they are called now."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.errors import ConfigError

_SET = "--set {}=VALUE"
CERTIFY = {
    "--safety": "--prompts FILE",
    "--verify": "holdfast verify PATH",
    "--expect": "holdfast verify PATH --expect SHA256",
    "--regressions": "holdfast certify-counts K N",
    "--n": "holdfast certify-counts K N",
    "--unit": "--by kl, or --by likelihood with --set unit=nll_sum",
    "--columns": "--set columns.prompt=NAME",
    "--safety-revision": _SET.format("revision"),
    "--allow-tau-below-noise": "--set allow_tau_below_noise=true",
} | {
    f"--{name.replace('_', '-')}": _SET.format(name)
    for name in (
        "first_k", "template", "tokenizer", "max_length", "before_revision", "after_revision", "split", "subset",
        "max_new_tokens",
    )
}  # fmt: skip


def require_new_spelling(argv: Sequence[str]) -> None:
    """Refuse an option that `holdfast certify` no longer has.

    Raises:
        ConfigError: with its new spelling.
    """
    if not argv or argv[0] != "certify":
        return
    for word in argv[1:]:
        name = word.partition("=")[0]
        if name in CERTIFY:
            raise ConfigError(
                f"holdfast certify {name} is spelled otherwise since version 0.2",
                remedy=f"write {CERTIFY[name]}; holdfast certify --help",
            )
