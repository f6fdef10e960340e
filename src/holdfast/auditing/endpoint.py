"""A model behind an OpenAI-compatible server, measured without its weights: `POST <base_url>/completions`.

The request holds the tokens of prompt and reply with `echo` and `logprobs`, as vLLM takes them; the answer has, for
each token, its text and its log-probability given the tokens before it. The loss of a reply is

    nll = -sum of logprobs[i] over the reply's tokens i

Nothing else is known of the distribution, so there is no KL. The answer's tokens must be the tokenizer's, one by one:
other tokens, or one more at the start, would move the place where the reply begins. Errors quote no text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from holdfast.auditing.batches import token_counts
from holdfast.core.errors import CheckpointError, ConfigError, ResourceError, UnsupportedError
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.registry import nearest, written_options
from holdfast.data.encode import IGNORE, Encoded
from holdfast.judging.engines import open_engine
from holdfast.judging.engines.endpoint import EndpointEngine
from holdfast.judging.exchange import Exchange, in_flight, post_json

if TYPE_CHECKING:
    from pathlib import Path


NAME = "endpoint"
OPTIONS = ("base_url", "model_name", "key_env", "tokenizer", "workers", "retries", "timeout", "pause")
EXAMPLE = f"{NAME}:base_url=http://localhost:8000/v1,model_name=mine,tokenizer=owner/name"
_SPACES = str.maketrans("▁Ġ", "  ")  # how vocabularies write a space
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # of a token that is a part of a character
ROUNDING = 1e-3  # by which a log-probability may be above 0


GivenModel: TypeAlias = "str | Path | Mapping[str, object] | LanguageModel"
"""A hub id, a folder, `endpoint:...`, the settings of an endpoint, or a loaded model."""


@dataclass(frozen=True)
class Endpoint:
    """A server, the model's name there, and the tokenizer that reads for it; None where the other side's does."""

    engine: EndpointEngine
    tokenizer: str | None = None

    @property
    def identity(self) -> dict[str, str]:
        """What an audit records; no key is among it, and an address with one is refused."""
        return {"base_url": self.engine.base_url.rstrip("/"), "model_name": str(self.engine.model_name)}

    @property
    def ref(self) -> str:
        return f"{self.engine.model_name} at {self.engine.base_url.rstrip('/')} (an endpoint)"

    @property
    def url(self) -> str:
        return f"{self.engine.base_url.rstrip('/')}/completions"

    def losses(
        self, item: Encoded, exchange: Exchange, first_k: int, tokens: Callable[[int], Token], stop: threading.Event
    ) -> tuple[float, float]:
        """The loss of one example's reply, and of its first k tokens, in nats."""
        body = {
            "model": self.engine.model_name, "prompt": list(item.input_ids), "echo": True, "logprobs": 1,
            "max_tokens": 1, "temperature": 0, "stream": False, "return_tokens_as_token_ids": False,
        }  # fmt: skip
        answer, problem = post_json(exchange, body, stop)
        if problem:
            raise ResourceError(
                f"{self.ref}: {problem}",
                remedy="check the server and model_name; it must take `echo` with `logprobs` (vLLM does) and hold an "
                f"example of {len(item.input_ids)} tokens. Windows that are measured are kept, so start again",
            )
        found = self._logprobs(answer, [tokens(i) for i in item.input_ids])
        scored = [-found[i] for i in range(1, len(item.labels)) if item.labels[i] != IGNORE]
        return float(np.sum(scored)), float(np.sum(scored[:first_k]))

    def _logprobs(self, answer: Any, expected: Sequence[Token]) -> list[float]:
        """One number a token of the request; the first has none, and is NaN."""
        try:
            block = answer["choices"][0]["logprobs"]
            names, values = block["tokens"], block["token_logprobs"]
            if len(names) != len(values) or len(values) < len(expected):
                raise TypeError
            found = [float("nan"), *map(_number, values[1 : len(expected)])]
        except (LookupError, TypeError, AttributeError, OverflowError):
            raise UnsupportedError(
                f"{self.ref} does not return the logprobs of a prompt's {len(expected)} tokens",
                remedy="serve the model with a server that takes `echo` with `logprobs`, such as vLLM, or audit its "
                "weights: name a folder or hub id",
            ) from None
        differing = [i for i, token in enumerate(expected) if not token.is_called(names[i])]
        if differing:
            raise CheckpointError(
                f"{self.ref} reads other tokens: {len(differing)} of {len(expected)} differ from the tokenizer's, the "
                f"first at position {differing[0]}, so the start of the reply is unknown",
                remedy="name the tokenizer of the model that is served (tokenizer=FOLDER or hub id)",
            )
        return found


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value > ROUNDING:
        raise TypeError
    return float(value)


@dataclass(frozen=True)
class Token:
    """The texts by which a server may call a token; None where its text cannot be compared."""

    names: frozenset[str] | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, token_id: int) -> Self:
        text = str(tokenizer.decode([token_id]))
        if _UNREADABLE in text:
            return cls(None)
        names = {_bare(text), _bare(str(tokenizer.convert_ids_to_tokens(token_id)))}
        return cls(frozenset(names | ({""} if token_id in tokenizer.all_special_ids else set())))

    def is_called(self, name: object) -> bool:
        return isinstance(name, str) and (self.names is None or _bare(name) in self.names)


def _bare(text: str) -> str:
    """Without spaces around it: whether a lone token shows its own differs between servers."""
    return text.translate(_SPACES).strip()


class EndpointLaunch:
    """Examples on their way to a server: what `Launch` is for a model in memory."""

    def __init__(
        self, endpoint: Endpoint, tokenizer: Tokenizer, side: str, encoded: Sequence[Encoded], first_k: int
    ) -> None:
        self.endpoint, self.side, self.encoded, self.first_k = endpoint, side, encoded, first_k
        self._tokens = lru_cache(maxsize=None)(lambda token_id: Token.of(tokenizer, token_id))
        self._values = np.empty((2, len(encoded)))

    def step(self) -> int:
        """Nothing is launched ahead of its time: a server is asked in `finish`."""
        return 0

    def finish(self, count: Callable[[int], None] | None = None, gap: object = None) -> Self:
        exchange = self.endpoint.engine.exchange(self.endpoint.url)

        def ask(i: int, stop: threading.Event) -> int:
            self._values[:, i] = self.endpoint.losses(self.encoded[i], exchange, self.first_k, self._tokens, stop)
            return i

        for _ in in_flight(ask, range(len(self.encoded)), self.endpoint.engine.workers):
            if count is not None:
                count(1)
        return self

    def columns(self) -> dict[str, Any]:
        found = {f"nll_{self.side}": self._values[0], f"first_{self.side}": self._values[1]}
        return found if self.side == "after" else found | token_counts(self.encoded, self.first_k)


def endpoint_of(model: object) -> Endpoint | None:
    """The endpoint that `endpoint:option=value,...` or a mapping with `base_url` names; None for any other model."""
    if isinstance(model, str) and model.startswith(f"{NAME}:"):
        options = written_options("a model behind an endpoint", model.removeprefix(f"{NAME}:"), EXAMPLE)
    elif isinstance(model, Mapping):
        options = dict(model)
    else:
        return None
    for option in options:
        if option not in OPTIONS:
            what = f"a model behind an endpoint has no option {option!r}"
            raise ConfigError(what, remedy=nearest(str(option), [*OPTIONS]))
    if "model_name" in options:
        if options["model_name"] is None or not str(options["model_name"]).strip():
            raise ConfigError("a model behind an endpoint needs model_name", remedy=f"for example {EXAMPLE}")
        options["model_name"] = str(options["model_name"])  # a name of digits is read as a number
    tokenizer = options.pop("tokenizer", None)
    engine = open_engine(NAME, **options)
    assert isinstance(engine, EndpointEngine)
    return Endpoint(engine, None if tokenizer is None else str(tokenizer))


def refuse_endpoints(models: Sequence[object], what: str) -> None:
    """Refuse models whose weights nobody sees."""
    for model in models:
        if (found := endpoint_of(model)) is not None:
            raise UnsupportedError(
                f"{what} of {found.ref}: it is bound to the sha256 of weights, and an endpoint shows none",
                remedy="name the folder or hub id of the weights that are served; `holdfast audit` takes endpoints",
            )
