"""JSON over HTTP to a server that may be slow, wrong or hostile: bounded in time and size, and it quotes nothing.

Every request ends: connecting, sending, headers and body share one deadline, and headers have a limit of their own.
The timeout of a socket is for one operation, so that a server which sends a byte before each can hold a client for
ever; here each operation gets what is left of the request's time. `urllib` does the rest (proxies of the environment,
certificates). Looking up a host's name is the system's and has its own limit.
"""

import functools
import http.client
import io
import json
import logging
import math
import os
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.core.errors import ConfigError, ResourceError

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger(__name__)

KEY_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*_(KEY|TOKEN)")  # what no key looks like
LOCAL = ("localhost", "127.0.0.1", "::1")
LONGEST_ANSWER = 1 << 20
LONGEST_WAIT = 60.0  # seconds between two attempts, whatever the server asks for
REFUSED = {401: "the key was refused", 403: "the key was refused", 404: "there is no such address or model"}
PASSING = frozenset({408, 409, 425, 429, *range(500, 600)})  # worth another attempt
LONGEST_HEADERS = 1 << 16  # bytes of status line and headers together, interim answers included


@dataclass(frozen=True)
class Exchange:
    """Where to send, with which key, and how long to try."""

    url: str
    key: str | None = field(repr=False)
    timeout: float  # seconds for one attempt, from connecting to the answer's last byte
    retries: int  # attempts that follow the first
    pause: float  # seconds before the second attempt, doubled for each further one; a server's Retry-After wins
    longest: int = LONGEST_ANSWER  # bytes of an answer


def completions(base_url: str) -> str:
    """The address of chat completions under an OpenAI-compatible API."""
    return f"{base_url.rstrip('/')}/chat/completions"


def require_address(who: str, option: str, url: object) -> None:
    """Refuse what is not an http or https address and nothing more."""
    try:
        parts = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        usable = usable and not ("@" in parts.netloc or parts.query or parts.fragment)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"{who}: expected {option} to be http://host/path or https://host/path, without user, password, query or "
            "fragment",
            remedy=f"for example {option}=http://localhost:8000/v1; a key goes into an environment variable",
        )


def read_key(who: str, variable: str, url: str) -> str:
    written = isinstance(variable, str) and "\0" not in variable
    key = os.environ.get(variable, "").strip() if written else ""
    # A key with a line break would be quoted by the HTTP library's complaint.
    if not key or not key.isascii() or not key.isprintable():
        named = written and (variable in os.environ or KEY_VARIABLE.fullmatch(variable))
        shown = f"environment variable {variable}" if named else "the environment variable that was named"
        remedy = "set the variable to the key, and give the name of the variable, never the key itself"
        raise ConfigError(f"{who}: {shown} holds no usable API key", remedy=remedy)
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in LOCAL:
        logger.warning("%s: the API key goes to %s unencrypted", who, url)
    return key


def post_json(exchange: Exchange, body: object, stop: threading.Event | None = None) -> tuple[Any, str]:
    """The JSON that the server answers, and ""; or None, and in words that quote nothing why there is none.

    When `stop` is set, nothing is tried again.
    """
    stop = stop or threading.Event()
    nobody, reason = False, ""
    for attempt in range(exchange.retries + 1):
        wait, nobody = exchange.pause * 2**attempt, False
        try:
            return json.loads(_read(exchange, body)), ""
        except (ValueError, RecursionError):
            return None, "not JSON"
        except urllib.error.HTTPError as error:
            with error:
                if error.code in REFUSED:
                    remedy = "check the address, the model's name and the environment variable of the key"
                    what = f"{exchange.url} answers {error.code}: {REFUSED[error.code]}"
                    raise ConfigError(what, remedy=remedy) from None
                reason = f"HTTP {error.code}"
                if error.code not in PASSING:
                    return None, reason
                wait = _asked_wait(error.headers.get("Retry-After"), wait)
        except _TooMuchError as error:
            return None, str(error)
        except (http.client.HTTPException, OSError) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            nobody = isinstance(cause, ConnectionRefusedError | socket.gaierror)  # no connection was made at all
            reason = "no answer in time" if isinstance(cause, TimeoutError) else "connection lost"
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
    data = bytearray()
    with _OPENER.open(request, timeout=exchange.timeout) as answer:
        while piece := answer.read1(1 << 16):
            data += piece
            if len(data) > exchange.longest:
                raise _TooMuchError("too large")
        if answer.length:
            raise http.client.IncompleteRead(b"", answer.length)
    return bytes(data)


def _asked_wait(asked: str | None, otherwise: float) -> float:
    try:
        seconds = float(asked or "nan")
    except ValueError:  # a date
        return otherwise
    return max(seconds, 0.0) if math.isfinite(seconds) else otherwise


def in_flight(work: Callable[[T, threading.Event], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Results of requests side by side, `workers` at a time, in the order in which they arrive.

    After a failure what is on its way still counts and what waits is not sent; then the failure is raised. `work` is
    given an event that is set where nothing should be tried again.
    """
    pool, stop = ThreadPoolExecutor(workers, thread_name_prefix="endpoint"), threading.Event()
    try:
        futures = [pool.submit(work, item, stop) for item in items]
        failed: BaseException | None = None
        for future in as_completed(futures):
            if future.cancelled():
                continue
            if (error := future.exception()) is None:
                yield future.result()
            elif failed is None:
                failed = error
                stop.set()
                for waiting in futures:
                    waiting.cancel()
        if failed is not None:
            raise failed
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _TooMuchError(Exception):
    """An answer that is too long or takes too long; its text is the reason."""


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the request's time is over")
    return left


class _Reader(io.RawIOBase):
    """The bytes of a socket, until the deadline; of them at most `allowed`."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._raw, self._socket, self._until = sock.makefile("rb", buffering=0), sock, until
        self._received = 0
        self.allowed: float = LONGEST_HEADERS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            self._socket.settimeout(_left(self._until))
            count: int | None = self._raw.readinto(buffer)
        except TimeoutError:
            if not self._received:
                raise
            # A server that has begun and is slow will be slow again; one that is silent may be starting.
            raise _TooMuchError("no answer in time") from None
        self._received += count or 0
        if self._received > self.allowed:
            raise _TooMuchError("headers too large")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, until: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self._reader = _Reader(sock, until)
        self.fp = io.BufferedReader(self._reader)

    def begin(self) -> None:
        super().begin()
        self._reader.allowed = math.inf  # a body has its own limit, the reader of the answer's


class _Bounded(http.client.HTTPConnection):
    """A connection with one deadline, counted from when it is made: urllib makes one for each request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._until = time.monotonic() + float(self.timeout)  # type: ignore[arg-type]
        self._create_connection = self._connected
        self.response_class = functools.partial(_Response, until=self._until)  # type: ignore[assignment]

    def _connected(self, address: tuple[str, int], *_: object) -> socket.socket:
        """`socket.create_connection` gives every address of a host the whole timeout; here they share it."""
        failed: OSError = OSError("the host has no address")
        for family, kind, protocol, _name, place in socket.getaddrinfo(*address, 0, socket.SOCK_STREAM):
            made = socket.socket(family, kind, protocol)
            try:
                made.settimeout(_left(self._until))
                made.connect(place)
                made.settimeout(_left(self._until))  # for the handshake of TLS
            except OSError as error:
                made.close()
                failed = error
            else:
                return made
        raise failed

    def send(self, data: Any) -> None:
        if self.sock is not None:
            self.sock.settimeout(_left(self._until))
        super().send(data)


class _BoundedTls(_Bounded, http.client.HTTPSConnection): ...


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.HTTPRedirectHandler):
    """Bounded connections, and no redirects: one would hand the key and the texts to another server."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Bounded, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_BoundedTls, req, context=_authorities())

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


@functools.cache
def _authorities() -> ssl.SSLContext:
    return ssl.create_default_context()


_OPENER = urllib.request.build_opener(_Handler)
