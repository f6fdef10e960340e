"""HTTP whose every request ends: one deadline for connecting, sending, headers and body, and a limit on the headers.

The timeout of a socket is for one operation, so that a server which sends a byte before each timeout can hold a client
for ever. Here each operation gets what is left of the request's own time:

    left = until - now,  until = start + timeout

`urllib` still does the rest (proxies of the environment, certificates). Looking up a host's name is the system's and
has its own limit.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import time
import urllib.request
from typing import Any

LONGEST_HEADERS = 1 << 16  # bytes of status line and headers together, interim answers included


class TooMuchError(Exception):
    """An answer that is too long or takes too long; its text is the reason."""


def open_url(request: urllib.request.Request, timeout: float) -> Any:
    """The answer to a request, to be closed; it, and reading it, ends within `timeout` seconds.

    Raises:
        TooMuchError: the server began to answer, and the time is over; or its headers are too long.
        TimeoutError: it did not begin in time (or within an `urllib.error.URLError`).
    """
    return _OPENER.open(request, timeout=timeout)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the request's time is over")
    return left


class _Reader(io.RawIOBase):
    """The bytes of a socket, until the deadline; of them at most `allowed`, where that is a number."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._raw, self._socket, self._until = sock.makefile("rb", buffering=0), sock, until
        self._received = 0
        self.allowed: int | None = None

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
            raise TooMuchError("no answer in time") from None
        self._received += count or 0
        if self.allowed is not None and self._received > self.allowed:
            raise TooMuchError("headers too large")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that is read through `_Reader`."""

    def __init__(self, sock: socket.socket, *args: Any, until: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp.close()
        self._reader = _Reader(sock, until)
        self.fp = io.BufferedReader(self._reader)

    def begin(self) -> None:
        self._reader.allowed = LONGEST_HEADERS
        super().begin()
        self._reader.allowed = None  # a body has its own limit, the reader of the answer's


class _Bounded(http.client.HTTPConnection):
    """A connection with one deadline, counted from when it is made: urllib makes one for each request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._until = time.monotonic() + float(self.timeout)  # type: ignore[arg-type]
        self._create_connection = self._connected
        self.response_class = functools.partial(_Response, until=self._until)  # type: ignore[assignment]

    def _connected(self, address: tuple[str, int], *_: Any) -> socket.socket:
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


class _BoundedTls(_Bounded, http.client.HTTPSConnection):
    """The same over TLS."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Bounded, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_BoundedTls, req, context=_authorities())


@functools.cache
def _authorities() -> ssl.SSLContext:
    return ssl.create_default_context()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would hand the key and the texts to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect, _Http, _Https)
