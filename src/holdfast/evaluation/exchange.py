"""JSON over HTTP to a server that may be slow, wrong or hostile: bounded in time and size, and it quotes nothing."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException, IncompleteRead
from typing import Any

from holdfast.core.errors import ConfigError, ResourceError
from holdfast.evaluation.bounded_http import TooMuchError, open_url

logger = logging.getLogger(__name__)

KEY_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*_(KEY|TOKEN)")  # what no key looks like
LOCAL = ("localhost", "127.0.0.1", "::1")
LONGEST_ANSWER = 1 << 20
LONGEST_WAIT = 60.0  # seconds between two attempts, whatever the server asks for
REFUSED = {401: "the key was refused", 403: "the key was refused", 404: "there is no such address or model"}
PASSING = frozenset({408, 409, 425, 429, *range(500, 600)})  # worth another attempt


@dataclass(frozen=True)
class Exchange:
    """Where to send, with which key, and how long to try.

    Attributes:
        timeout: seconds for one attempt, from connecting to the answer's last byte.
        retries: attempts that follow the first.
        pause: seconds before the second attempt, doubled for each further one; a server's Retry-After wins.
        longest: bytes of an answer.
    """

    url: str
    key: str | None = field(repr=False)
    timeout: float
    retries: int
    pause: float
    longest: int = LONGEST_ANSWER


def completions(base_url: str) -> str:
    """The address of chat completions under an OpenAI-compatible API."""
    return f"{base_url.rstrip('/')}/chat/completions"


def require_address(who: str, option: str, url: Any) -> None:
    """Refuse what is not an http or https address and nothing more.

    Raises:
        ConfigError: naming who needs it; a password or key inside the address is not shown.
    """
    try:
        parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
        usable = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{who}: expected {option} to be http://host/path or https://host/path, without user, password, query or "
            "fragment",
            remedy=f"for example {option}=http://localhost:8000/v1; a key goes into an environment variable",
        )


def require_number(who: str, option: str, value: Any, least: float, kind: Any = int) -> None:
    """Refuse an option that is not a finite number of this kind, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
        raise ConfigError(f"{who}: {option} {value!r}, expected a number >= {least:g}", remedy=f"leave out {option}")


def read_key(who: str, variable: str, url: str) -> str:
    """The key in an environment variable.

    Raises:
        ConfigError: there is none, or it has characters that no header may hold; it is not shown. The variable's name
            is shown only where it must be one: who writes the key itself there would find it in the message.
    """
    written = isinstance(variable, str) and "\0" not in variable
    key = os.environ.get(variable, "").strip() if written else ""
    # A key with a line break would be quoted by the HTTP library's complaint.
    if not key or not key.isascii() or not key.isprintable():
        named = written and (variable in os.environ or KEY_VARIABLE.fullmatch(variable))
        shown = f"environment variable {variable}" if named else "the environment variable that was named"
        raise ConfigError(
            f"{who}: {shown} holds no usable API key",
            remedy="set the variable to the key, and give the name of the variable, never the key itself",
        )
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in LOCAL:
        logger.warning("%s: the API key goes to %s unencrypted", who, url)
    return key


def post_json(exchange: Exchange, body: Any, stop: threading.Event | None = None) -> tuple[Any, str]:
    """The JSON that the server answers, and ""; or None, and in words that quote nothing why there is none.

    Args:
        exchange: how.
        body: JSON.
        stop: when set, nothing is tried again.

    Raises:
        ConfigError: the server refuses the key, or knows no such address.
        ResourceError: nothing listens there, at the last attempt either.
    """
    stop = stop or threading.Event()
    nobody, reason = False, ""
    for attempt in range(exchange.retries + 1):
        wait = exchange.pause * 2**attempt
        nobody = False
        try:
            return json.loads(_read(exchange, body)), ""
        except (ValueError, RecursionError):
            return None, "not JSON"
        except urllib.error.HTTPError as error:
            with error:
                if error.code in REFUSED:
                    raise ConfigError(
                        f"{exchange.url} answers {error.code}: {REFUSED[error.code]}",
                        remedy="check the address, the model's name and the environment variable of the key",
                    ) from None
                reason = f"HTTP {error.code}"
                if error.code not in PASSING:
                    return None, reason
                wait = _asked_wait(error.headers.get("Retry-After"), wait)
        except TooMuchError as error:
            return None, str(error)
        except (HTTPException, OSError) as error:
            nobody = _nobody(error)
            reason = "no answer in time" if _timed_out(error) else "connection lost"
        if attempt < exchange.retries and stop.wait(min(wait, LONGEST_WAIT)):
            break
    if nobody:
        raise ResourceError(f"nothing answers at {exchange.url}", remedy="start the server, or correct the address")
    return None, reason


def _read(exchange: Exchange, body: Any) -> bytes:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if exchange.key is not None:
        headers["Authorization"] = f"Bearer {exchange.key}"
    request = urllib.request.Request(exchange.url, json.dumps(body).encode(), headers, method="POST")  # noqa: S310
    found = bytearray()
    with open_url(request, exchange.timeout) as answer:
        while piece := answer.read1(1 << 16):
            found += piece
            if len(found) > exchange.longest:
                raise TooMuchError("too large")
        if answer.length:
            raise IncompleteRead(b"", answer.length)
    return bytes(found)


def _asked_wait(asked: str | None, otherwise: float) -> float:
    try:
        seconds = float(asked or "nan")
    except ValueError:  # a date
        return otherwise
    return max(seconds, 0.0) if math.isfinite(seconds) else otherwise


def _nobody(error: BaseException) -> bool:
    """Whether no connection was made at all: refused, or no such host."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(cause, ConnectionRefusedError) or type(cause).__name__ == "gaierror"


def _timed_out(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
