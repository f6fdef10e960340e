"""Blanking secrets in what is stored or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"
SECRET_KEY = re.compile(r"(^|_)(token|secret|password|passwd|key)$", re.IGNORECASE)
NOT_SECRET = {"pad_token", "eos_token"}
SECRET_VALUE = re.compile(r"\bhf_\w{8,}|\bsk-[\w-]{8,}|\bAKIA[0-9A-Z]{12,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def redact(value: Any, key: str = "") -> Any:
    """Blank every secret: text under a key such as `api_key`, and what looks like an access token."""
    if isinstance(value, Mapping):
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [redact(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    if SECRET_KEY.search(key) and key not in NOT_SECRET:
        return REDACTED
    return SECRET_VALUE.sub(REDACTED, value)
