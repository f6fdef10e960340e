"""Blanking secrets in what is stored or shown.

| known by | in a mapping                                | in text                                                   |
|----------|---------------------------------------------|-----------------------------------------------------------|
| name     | `api_key`, `Authorization`, `x-api-key`, .. | the same before `=` or `:`, also in a query or in JSON    |
| shape    |                                             | hf_..., sk-..., ghp_..., AKIA..., JWTs, private keys, ... |
| place    |                                             | after `Bearer`; before the @ of an address                |

Special tokens of a tokenizer (`eos_token`) and counts (`max_tokens`, `token=5`) are no secrets. Redacting twice
changes nothing. It is a last gate and cannot know every secret: settings take the name of an environment variable.
"""

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"

_CERTAIN = (
    r"api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key|subscription[_-]?key|license[_-]?key|signing[_-]?key"
    r"|secret|password|passwd|passphrase|pwd|credentials?|cookie|(?:proxy[_-]?)?authorization"
    r"|(?:access|auth|api|hub|hf|id|refresh|bearer|session|security|github|gitlab)[_-]?token"
)
_SPECIAL = re.compile(
    r"(^|_)(bos|eos|unk|sep|pad|cls|mask|image|audio|video|special|first|last|start|end|stop|per|nll|kl)_token$"
    r"|(^|_)(public|sort|primary|foreign|group|cache|dict)_key$"
)
_NAME = re.compile(rf"(^|[_-])(?:{_CERTAIN}|token|key|auth|apikey)$", re.IGNORECASE)

_SHAPES = (
    r"\bhf_\w{8,}",
    r"\bsk-[\w-]{8,}",
    r"\b(?:sk|pk|rk|gsk|xai|nvapi|glpat|pypi|dop_v1|r8|npm|tgp_v1)[-_](?=[\w-]{0,200}[0-9A-Z])[\w-]{8,}",
    r"\bgh[pousr]_\w{8,}",
    r"\bgithub_pat_\w{8,}",
    r"\bxox[a-z]-[\w-]{8,}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}",
    r"\bAIza[\w-]{30,}",
    r"\beyJ[\w-]{8,2000}\.[\w-]{8,2000}\.[\w-]*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"(?<=://)(?!git@|\[redacted\]@)[^/\s?#]+(?=@)",
)
_SHAPE = re.compile("|".join(_SHAPES), re.DOTALL)

# A value: quoted, or up to what ends one in a query, a list of options or JSON.
_VALUE = r"""(?:"[^"\n]+"|'[^'\n]+'|[^\s,;&"'<>()\[\]{}]+)"""
_UNSAID = r"(?!\[redacted\])"
# `password: expected text` is a sentence, `key=value` and `key=...` are placeholders, `token=5` is a count.
_PROSE = (
    r"(?!\.\.\.|(?:expected|found|unknown|missing|not|is|are|must|should|cannot|may|the|an?|input|extra|field|none|null"
    r"|true|false|value)\b)"
)
_COUNT = r"(?!\d{1,6}(?:\.\d+)?(?!\w))"
_SCHEME = r"(?:(?:bearer|basic|digest|token|apikey|key)\s+)?"
_AUTHORIZATION = re.compile(
    rf"""(\b(?:proxy-)?authorization["']?\s{{0,8}}[:=]\s{{0,8}}["']?){_UNSAID}{_PROSE}{_SCHEME}{_UNSAID}[^\s,;&"'<>()\[\]{{}}]+""",
    re.IGNORECASE,
)
_CERTAIN_PAIR = re.compile(
    rf"""((?<![A-Za-z0-9])(?:{_CERTAIN})["']?\s{{0,8}}[:=]\s{{0,8}}){_UNSAID}{_PROSE}{_VALUE}""", re.IGNORECASE
)
# `missing key: lr` is a sentence, so that the bare words need `=`, or quotes on both sides of the colon.
_BARE_PAIR = re.compile(
    rf"""((?<![\w-])(?:x-)?(?:token|key|auth|sig|signature)(?:=|["']\s*:\s*(?=["'])))"""
    rf"{_UNSAID}{_PROSE}{_COUNT}{_VALUE}",
    re.IGNORECASE,
)
# In small letters it is also a word: there a digit must follow.
_BEARER = re.compile(rf"""(\b(?:B(?i:earer)\s+|bearer\s+(?=\S{{0,200}}\d))){_UNSAID}[^\s,;"'<>]{{6,}}""")


def redact(value: Any, key: str = "") -> Any:
    """Blank every secret in JSON-like values or in text."""
    if isinstance(value, Mapping):
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        blanked = [redact(inner, key) for inner in value]
        return tuple(blanked) if isinstance(value, tuple) else blanked
    if not isinstance(value, str):
        return value
    return REDACTED if value and is_secret_name(key) else redact_text(value)


def is_secret_name(name: str) -> bool:
    """Whether what is stored under this name is a secret: `hub_token`, `X-Api-Key`; `eos_token` is none."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return _NAME.search(plain) is not None and _SPECIAL.search(plain) is None


def redact_text(text: str) -> str:
    """Text without secrets; line breaks and everything else stay."""
    text = _SHAPE.sub(REDACTED, text)
    for pattern in (_AUTHORIZATION, _CERTAIN_PAIR, _BARE_PAIR, _BEARER):
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text
