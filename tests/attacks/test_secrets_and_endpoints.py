"""Attacks on secrets, and servers that never finish."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast.core.errors import ConfigError
from holdfast.core.redaction import redact

KEY = "sk-2f6b0c9d8e7a41f3b5c6d7e8"  # made up
PLAIN = "9f8e7d6c5b4a39281706f5e4"  # a key without a known shape
SECONDS = 1.0


@pytest.mark.parametrize("key", [KEY, PLAIN], ids=["shaped", "plain"])
@pytest.mark.parametrize(
    "spec", ["endpoint:url=http://127.0.0.1:9/v1,model=m,key={key}", "endpoint:key={key},key={key}", "x/y:key={key}"]
)
def test_a_key_in_a_judges_options_is_not_shown(spec, key):
    """B6: `--judge endpoint:...,key=sk-...` is refused, and the refusal prints the key."""
    from holdfast.judging.judge import open_judge

    with pytest.raises(ConfigError) as refused:
        open_judge(spec.format(key=key))
    assert key not in str(refused.value)


@pytest.mark.parametrize("key", [KEY, PLAIN], ids=["shaped", "plain"])
def test_the_command_line_does_not_print_a_judges_key(command, tmp_path, key):
    """B6: the same through the command line, which also stores nothing of it."""
    spec = f"endpoint:key={key},key={key}"
    out = command("evaluate", "embedded", "--output-dir", tmp_path / "out", "--judge", spec, usage=True)
    assert out.code == 2
    assert key not in out.out + out.err
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(key.encode() in path.read_bytes() for path in stored)


def test_a_usage_error_does_not_quote_a_key(command):
    """B6: what the parser of the command line does not understand is quoted, with the key in it."""
    found = command("plan", f"https://{PLAIN}@host/v1", f"api_key={PLAIN}", usage=True)
    assert found.code == 2
    assert PLAIN not in found.out + found.err


def test_a_log_line_does_not_show_a_key(capsys):
    """B6: log lines reach the terminal as they are."""
    from holdfast.cli.terminal import quiet_libraries

    quiet_libraries()
    logging.getLogger("holdfast.somewhere").warning("sent Authorization: Bearer %s", PLAIN)
    assert PLAIN not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {PLAIN}", f"Authorization: Basic {PLAIN}", f"Bearer {PLAIN}", f"apikey={PLAIN}",
        "ghp_0123456789abcdefghijABCDEFGHIJ012345", "gho_0123456789abcdefghijABCDEFGHIJ012345",
        "github_pat_11ABCDEFG0123456789_abcdefghij", f"https://{PLAIN}@github.com/owner/name", f"x-api-key: {PLAIN}",
        f"https://host/v1?api_key={PLAIN}", f"judge endpoint:model=m,key={PLAIN}",
    ],
)  # fmt: skip
def test_redaction_knows_secrets_in_text(text):
    """B6: redaction misses Authorization, Bearer, apikey, ghp_, token@ in addresses."""
    assert not any(part in redact(text) for part in (PLAIN, "0123456789"))


@pytest.mark.parametrize("name", ["Authorization", "apikey", "x-api-key", "X-Api-Key", "apiKey", "auth"])
def test_redaction_knows_names_of_secrets(name):
    """B6: settings under these names are stored as they are."""
    assert PLAIN not in json.dumps(redact({"headers": {name: PLAIN}}))


def answer(number: int) -> Iterator[bytes]:
    """Header after header, a byte at a time: each byte comes well within a socket's timeout."""
    yield b"HTTP/1.1 200 OK\r\n"
    for byte in b"X-Slow: " + b"a" * 2000:
        yield bytes([byte])


def interim(number: int) -> Iterator[bytes]:
    """100 Continue without end."""
    while True:
        yield b"HTTP/1.1 100 Continue\r\n\r\n"


@contextlib.contextmanager
def dripping(script: Callable[[int], Iterator[bytes]], *, pause: float, most: float) -> Iterator[str]:
    """A server on this machine that sends the script's pieces with a pause before each, for at most `most` seconds."""
    stop, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            for number in range(100):
                connection, _ = listener.accept()
                threading.Thread(target=drip, args=(connection, number), daemon=True).start()

    def drip(connection: socket.socket, number: int) -> None:
        until = time.monotonic() + most
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            for piece in script(number):
                if stop.wait(pause) or time.monotonic() > until:
                    return
                connection.sendall(piece)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        stop.set()
        listener.close()


@pytest.mark.parametrize("script", [answer, interim])
def test_dripped_headers_do_not_evade_the_timeout(script):
    """B8: the timeout is one read's, so that a header of a byte every 0.1 s holds the judge as long as it likes."""
    from holdfast.judging.exchange import Exchange, post_json

    with dripping(script, pause=0.1, most=6 * SECONDS) as url:
        start = time.monotonic()
        found, reason = post_json(Exchange(url, None, SECONDS, 0, 0.0), {"a": 1})
        took = time.monotonic() - start
    assert took < 3 * SECONDS
    assert (found, reason) == (None, "no answer in time")


def test_endless_headers_end():
    """B8: interim answers are skipped one after another, without a limit on their number."""
    from holdfast.judging.exchange import Exchange, post_json

    with dripping(interim, pause=0.0, most=6 * SECONDS) as url:
        start = time.monotonic()
        found, reason = post_json(Exchange(url, None, 5 * SECONDS, 0, 0.0), {"a": 1})
        took = time.monotonic() - start
    assert took < 4 * SECONDS
    assert (found, reason) == (None, "headers too large")
