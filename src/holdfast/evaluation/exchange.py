"""JSON over HTTP to a server that may be slow, wrong or hostile: bounded in time and size, and it quotes nothing."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException, IncompleteRead
from typing import Any

from holdfast.core.errors import ConfigError, ResourceError

MAX_BYTES = 1 << 20
LONGEST_WAIT = 30.0  # seconds between two attempts, whatever the server asks for
FIRST_WAIT = 0.5
REFUSED = {401: "the key was refused", 403: "the key was refused", 404: "there is no such address or model"}
PASSING = frozenset({408, 409, 425, 429, *range(500, 600)})  # worth another attempt


@dataclass(frozen=True)
class Exchange:
    """Where to send, with which key, how long an attempt may take, and how many follow the first."""

    url: str
    key: str | None = field(repr=False)
    timeout: float
    retries: int


def require_address(who: str, url: Any) -> None:
    """Refuse what is not an http or https address.

    Raises:
        ConfigError: naming who needs it; a password inside the address is not shown.
    """
    parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ConfigError(
            f"{who}: expected url to be http://host/path or https://host/path without user or password",
            remedy="for example url=http://localhost:8000/v1; a key goes into an environment variable",
        )


def post_json(exchange: Exchange, body: Any) -> tuple[Any, str]:
    """The JSON that the server answers, and ""; or None, and in words that quote nothing why there is none.

    Raises:
        ConfigError: the server refuses the key, or knows no such address.
        ResourceError: nothing listens there.
    """
    reason, wait = "", 0.0
    for attempt in range(exchange.retries + 1):
        time.sleep(wait)
        wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT)
        try:
            return json.loads(_read(exchange, body)), ""
        except (ValueError, RecursionError):
            return None, "not JSON"
        except urllib.error.HTTPError as error:
            with error:
                if error.code in REFUSED:
                    raise ConfigError(
                        f"{_place(exchange)} answers {error.code}: {REFUSED[error.code]}",
                        remedy="check the address, the model's name and the environment variable of the key",
                    ) from None
                reason = f"HTTP {error.code}"
                if error.code not in PASSING:
                    return None, reason
                wait = _asked_wait(error.headers.get("Retry-After"), wait)
        except _TooMuchError as error:
            return None, str(error)
        except (TimeoutError, HTTPException, OSError) as error:
            if _nobody(error):
                raise ResourceError(
                    f"nothing answers at {_place(exchange)}", remedy="start the server, or correct the address"
                ) from None
            reason = "no answer in time" if _timed_out(error) else "connection lost"
    return None, reason


class _TooMuchError(Exception):
    """An answer that is too long or takes too long; its text is the reason."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would hand the key and the texts to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _read(exchange: Exchange, body: Any) -> bytes:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if exchange.key is not None:
        headers["Authorization"] = f"Bearer {exchange.key}"
    request = urllib.request.Request(exchange.url, json.dumps(body).encode(), headers, method="POST")  # noqa: S310
    deadline = time.monotonic() + exchange.timeout
    found = b""
    with _OPENER.open(request, timeout=exchange.timeout) as answer:
        # A piece at a time: the timeout is for one read, and a server can send a byte before each.
        while piece := answer.read1(1 << 16):
            found += piece
            if len(found) > MAX_BYTES:
                raise _TooMuchError("too large")
            if time.monotonic() > deadline:
                raise _TooMuchError("no answer in time")
        if answer.length:
            raise IncompleteRead(b"", answer.length)
    return found


def _asked_wait(asked: str | None, otherwise: float) -> float:
    try:
        seconds = float(asked or "nan")
    except ValueError:  # a date
        return otherwise
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else otherwise


def _nobody(error: BaseException) -> bool:
    """Whether no connection was made at all: refused, or no such host."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(cause, ConnectionRefusedError) or type(cause).__name__ == "gaierror"


def _timed_out(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)


def _place(exchange: Exchange) -> str:
    return urllib.parse.urlsplit(exchange.url)._replace(query="", fragment="").geturl()
