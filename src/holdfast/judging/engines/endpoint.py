"""A model behind an OpenAI-compatible server (vLLM, llama.cpp, TGI, a vendor's): `POST <base_url>/chat/completions`.

The server renders the prompts with its own chat template. Its messages may quote prompts and replies, so its status is
all that an error tells.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import ConfigError, DataError, ResourceError, UnsupportedError
from holdfast.core.redaction import redact
from holdfast.core.registry import require_number
from holdfast.data.examples import Example, as_chat, has_tools, to_utf8_turns
from holdfast.data.templates import Template
from holdfast.judging.engines import BATCH_SIZE, ENGINES
from holdfast.judging.exchange import Exchange, completions, in_flight, post_json, read_key, require_address
from holdfast.judging.prompts import require_prompts, require_sizes
from holdfast.judging.reply import Reply

WHO = "engine 'endpoint'"
LONGEST_ANSWER = 16 * 2**20


@ENGINES.register("endpoint")
@dataclass(frozen=True, kw_only=True)
class EndpointEngine:
    """Replies of an OpenAI-compatible server at temperature 0."""

    base_url: str  # up to `/v1`; http or https
    model_name: str  # the model's name on that server
    # environment variable that holds the API key; it is read for each generation and never stored
    key_env: str | None = None
    workers: int = 8  # requests in flight
    # further attempts after a time-out, a broken connection, or the statuses 408, 409, 425, 429 and 5xx
    retries: int = 5
    timeout: float = 300.0  # seconds for one request, from connecting to the answer's last byte
    pause: float = 1.0  # seconds before the first retry, doubled for each further one; a server's Retry-After wins
    # further fields of the request, `{"chat_template_kwargs": {"enable_thinking": false}}` say
    extra: Mapping[str, Any] = field(default_factory=dict)
    template: Template = "chat"
    model: Any = field(default=None, repr=False)  # model, tokenizer, batch_size: not used; every engine takes them
    tokenizer: Any = field(default=None, repr=False)
    batch_size: int = BATCH_SIZE
    name: str = field(default="endpoint", init=False)

    def __post_init__(self) -> None:
        require_address(WHO, "base_url", self.base_url)
        require_number(WHO, "workers", self.workers, 1)
        require_number(WHO, "retries", self.retries, 0)
        require_number(WHO, "timeout", self.timeout, 0.01, int | float)
        require_number(WHO, "pause", self.pause, 0, int | float)
        if self.template != "chat":
            what = f"{WHO} with template {self.template!r}: the server renders prompts with its own"
            raise UnsupportedError(what, remedy="use template chat, or another engine")
        if reserved := {"model", "messages", "max_tokens", "temperature", "stream", "n"} & set(self.extra):
            what = f"{WHO}: extra has {', '.join(sorted(reserved))}, which the engine sets itself"
            raise ConfigError(what, remedy="remove it from extra")

    @property
    def identity(self) -> dict[str, object]:
        """What decides the replies, as far as it can be told from here: for the header of stored replies."""
        extra = redact(dict(self.extra))
        return {"base_url": self.base_url.rstrip("/"), "model_name": self.model_name, "extra": extra}

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        require_sizes(max_new_tokens=max_new_tokens)
        require_prompts(examples)
        if any(has_tools(example.prompt) for example in examples if not isinstance(example.prompt, str)):
            what = f"{WHO}: prompts with tools: a server hands back calls in a form of its own, not as the model's text"
            raise DataError(what, remedy="use the engine transformers or vllm, or leave these prompts out")
        exchange = self.exchange(completions(self.base_url))

        def ask(example: Example, stop: threading.Event) -> list[Reply]:
            return [self._reply(example, exchange, max_new_tokens, stop)]

        yield from in_flight(ask, examples, self.workers)

    def exchange(self, url: str) -> Exchange:
        """How to ask an address of this server; the key is read here."""
        key = None if self.key_env is None else read_key(WHO, self.key_env, self.base_url)
        return Exchange(url, key, self.timeout, self.retries, self.pause, LONGEST_ANSWER)

    def _reply(self, example: Example, exchange: Exchange, max_new_tokens: int, stop: threading.Event) -> Reply:
        turns = as_chat(example).prompt
        assert not isinstance(turns, str)
        body = {
            **self.extra, "model": self.model_name, "messages": to_utf8_turns(turns),
            "max_tokens": max_new_tokens, "temperature": 0, "stream": False,
        }  # fmt: skip
        answer, problem = post_json(exchange, body, stop)
        if problem:
            raise self._failure(problem)
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            content, refusal = message.get("content"), message.get("refusal")
            # No content at all is no empty reply: a server may put what the model said elsewhere (reasoning, tools).
            text = refusal if refusal and not content else content
            tokens = (answer.get("usage") or {}).get("completion_tokens") or 0
            if not isinstance(text, str) or isinstance(tokens, bool) or not isinstance(tokens, int):
                raise TypeError
        except (LookupError, TypeError, AttributeError):
            raise self._failure("the answer has not the fields of a chat completion") from None
        if reason not in ("stop", "length"):
            # A reply that the server withheld is not what the model said.
            raise self._failure(f"finish_reason {str(reason)[:40]!r}, expected 'stop' or 'length'")
        return Reply(example.id, text.strip(), truncated=reason == "length", tokens=tokens)

    def _failure(self, problem: str) -> ResourceError:
        remedy = "check the server, model_name and key_env; replies that arrived are kept, so start again"
        what = f"{WHO}: {completions(self.base_url)} with model {self.model_name!r}: {problem}"
        return ResourceError(what, remedy=remedy)
