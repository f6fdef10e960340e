"""A model behind an OpenAI-compatible server (vLLM, llama.cpp, TGI, a vendor's): `POST <base_url>/chat/completions`.

The server renders the prompts with its own chat template. Neither prompts nor replies enter an error: the server's own
messages may quote them, so its status is all that is told.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from holdfast.core.errors import ConfigError, ResourceError, UnsupportedError
from holdfast.data.examples import Example, as_chat, to_utf8_turns
from holdfast.data.templates import Template
from holdfast.evaluation.engines import BATCH_SIZE, ENGINES
from holdfast.evaluation.prompts import require_prompts, require_sizes
from holdfast.evaluation.reply import Reply

logger = logging.getLogger(__name__)

LOCAL = ("localhost", "127.0.0.1", "::1")
LONGEST_ANSWER = 16 * 2**20
LONGEST_WAIT = 60.0
_TRY_AGAIN = (408, 409, 425, 429)


@ENGINES.register("endpoint")
@dataclass(frozen=True, kw_only=True)
class EndpointEngine:
    """Replies of an OpenAI-compatible server at temperature 0.

    Attributes:
        base_url: up to `/v1`; http or https.
        model_name: the model's name on that server.
        key_env: environment variable that holds the API key; it is read for each generation and never stored.
        workers: requests in flight.
        retries: further attempts after a time-out, a broken connection, or the statuses 408, 409, 425, 429 and 5xx.
        timeout: seconds for one request.
        pause: seconds before the first retry, doubled for each further one; a server's Retry-After wins.
        extra: further fields of the request, `{"chat_template_kwargs": {"enable_thinking": false}}` say.
        model, tokenizer, batch_size: not used; every engine takes them.
    """

    base_url: str
    model_name: str
    key_env: str | None = None
    workers: int = 8
    retries: int = 5
    timeout: float = 300.0
    pause: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    template: Template = "chat"
    model: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)
    batch_size: int = BATCH_SIZE
    name: str = field(default="endpoint", init=False)

    def __post_init__(self) -> None:
        _require_url(self.base_url)
        require_sizes(workers=self.workers)
        if self.template != "chat":
            raise UnsupportedError(
                f"engine 'endpoint' with template {self.template!r}: the server renders prompts with its own",
                remedy="use template chat, or another engine",
            )
        reserved = {"model", "messages", "max_tokens", "temperature", "stream", "n"} & set(self.extra)
        if reserved:
            raise ConfigError(
                f"engine 'endpoint': extra has {', '.join(sorted(reserved))}, which the engine sets itself",
                remedy="remove it from extra",
            )

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url.rstrip("/") + "/chat/completions"

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        """Replies one by one, as they arrive.

        Raises:
            ConfigError: a missing key or a bad size.
            DataError: examples without a prompt.
            ResourceError: a request failed for good; the address is named, the text is not.
        """
        require_sizes(max_new_tokens=max_new_tokens)
        require_prompts(examples)
        headers = self._headers()
        pool, stop = ThreadPoolExecutor(self.workers, thread_name_prefix="endpoint"), threading.Event()
        try:
            futures = [pool.submit(self._reply, example, headers, max_new_tokens, stop) for example in examples]
            failed: BaseException | None = None
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                error = future.exception()
                if error is None:
                    yield [future.result()]
                elif failed is None:  # what is on its way still counts, what waits is not sent
                    failed = error
                    stop.set()
                    for waiting in futures:
                        waiting.cancel()
            if failed is not None:
                raise failed
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_env is None:
            return headers
        key = os.environ.get(self.key_env, "").strip()
        # A key with a line break would be quoted by the HTTP library's complaint.
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"engine 'endpoint': environment variable {self.key_env} holds no usable API key",
                remedy=f"set {self.key_env}",
            )
        if urlsplit(self.base_url).scheme == "http" and urlsplit(self.base_url).hostname not in LOCAL:
            logger.warning("generation: the API key goes to %s unencrypted", self.base_url)
        return {**headers, "Authorization": f"Bearer {key}"}

    def _reply(self, example: Example, headers: Mapping[str, str], max_new_tokens: int, stop: threading.Event) -> Reply:
        turns = as_chat(example).prompt
        assert not isinstance(turns, str)
        body = {
            **self.extra, "model": self.model_name, "messages": to_utf8_turns(turns),
            "max_tokens": max_new_tokens, "temperature": 0, "stream": False,
        }  # fmt: skip
        answer = self._post(json.dumps(body).encode("utf-8"), headers, stop)
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            text = message.get("content") or message.get("refusal") or ""
            tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
            if not isinstance(text, str) or isinstance(tokens, bool) or not isinstance(tokens, int):
                raise TypeError
        except (LookupError, TypeError, AttributeError):
            raise self._failure("the answer has not the fields of a chat completion") from None
        if reason not in ("stop", "length"):
            # A reply that the server withheld is not what the model said.
            raise self._failure(f"finish_reason {str(reason)[:40]!r}, expected 'stop' or 'length'")
        return Reply(example.id, text.strip(), truncated=reason == "length", tokens=tokens)

    def _post(self, body: bytes, headers: Mapping[str, str], stop: threading.Event) -> Any:
        """The JSON answer to one request, tried again while that may help and nobody said stop."""
        request = urllib.request.Request(self.url, data=body, headers=dict(headers), method="POST")  # noqa: S310  (checked)
        opener = urllib.request.build_opener(_NoRedirect)
        for attempt in range(self.retries + 1):
            wait = self.pause * 2**attempt
            try:
                with opener.open(request, timeout=self.timeout) as answer:
                    data = answer.read(LONGEST_ANSWER + 1)
                if len(data) > LONGEST_ANSWER:
                    raise self._failure(f"the answer is longer than {LONGEST_ANSWER} bytes")
                return json.loads(data)
            except urllib.error.HTTPError as error:
                problem, status = f"status {error.code}", error.code
                wait = _retry_after(error.headers.get("Retry-After"), wait)
                error.close()
                if status not in _TRY_AGAIN and status < 500:
                    break
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                problem = _plain(error)
            if attempt < self.retries and stop.wait(min(wait, LONGEST_WAIT)):
                break
        raise self._failure(problem)

    def _failure(self, problem: str) -> ResourceError:
        return ResourceError(
            f"engine 'endpoint': {self.url} with model {self.model_name!r}: {problem}",
            remedy="check the server, model_name and key_env; replies that arrived are kept, so start again",
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the prompts, and the key, to an address that nobody named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _require_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"engine 'endpoint': base_url {url!r} is not an http or https address",
            remedy="give the server's address up to /v1, https://host/v1 say",
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            "engine 'endpoint': base_url holds more than an address (user, password, query or fragment)",
            remedy="put the key into an environment variable and name it in key_env",
        )


def _retry_after(value: str | None, otherwise: float) -> float:
    """Seconds of a Retry-After header; its other form, a date, is left aside."""
    return float(value) if value is not None and value.isdecimal() else otherwise


def _plain(error: Exception) -> str:
    """What broke, without anything that was sent or received."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return "the answer is not JSON" if isinstance(error, ValueError) else type(reason).__name__
