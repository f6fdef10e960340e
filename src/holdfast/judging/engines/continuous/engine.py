"""The engine `continuous`: the slot loop, recorded as CUDA graphs where there is CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.core.errors import UnsupportedError
from holdfast.data.examples import Example
from holdfast.data.templates import Template
from holdfast.judging.batches import free_memory
from holdfast.judging.engines import BATCH_SIZE, ENGINES, require_model
from holdfast.judging.generation import decoding, reply, too_large
from holdfast.judging.prompts import by_length, end_tokens, prompt_ids, require_room, require_sizes
from holdfast.judging.reply import Reply
from holdfast.models.library_errors import out_of_memory

logger = logging.getLogger(__name__)


@ENGINES.register("continuous")
class ContinuousEngine:
    """Greedy decoding by the rule of `holdfast.judging.generation.generate`, with rows refilled as they end.

    In exact arithmetic the replies are those of the engine `transformers`; in bfloat16 a near tie may fall either way,
    as it does between two batch sizes.

    Attributes:
        steps: decode steps so far, and `fills` how often prompts were read.
        recorded: whether the last generation ran recorded steps to its end.
    """

    name = "continuous"

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        batch_size: int = BATCH_SIZE,
        template: Template = "chat",
        graph: bool | None = None,
    ) -> None:
        require_model(self.name, model, tokenizer)
        reason = obstacle(model)
        if reason is not None:
            raise UnsupportedError(f"engine {self.name!r}: {reason}", remedy="use the engine transformers, or auto")
        on_cuda = model.device.type == "cuda"
        if graph and not on_cuda:
            raise UnsupportedError(
                f"engine {self.name!r}: graph = true with a model on {model.device}, expected CUDA",
                remedy="leave graph out, or move the model to a GPU",
            )
        self._model, self._tokenizer, self._template, self._batch_size = model, tokenizer, template, batch_size
        self._graph = on_cuda if graph is None else graph
        self.steps = self.fills = 0
        self.recorded = False

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        """Replies as they finish."""
        require_sizes(max_new_tokens=max_new_tokens, batch_size=self._batch_size)
        prompts = prompt_ids(self._tokenizer, examples, self._template)
        require_room(self._model, examples, prompts, max_new_tokens)
        ends, pad = end_tokens(self._model, self._tokenizer), self._tokenizer.pad_token_id
        waiting, rows = by_length(examples), self._batch_size
        with decoding(self._model, max_new_tokens, pad, ends):
            while waiting:
                rows = min(rows, len(waiting))
                done: set[int] = set()
                try:
                    for finished in self._decode(prompts, waiting, rows, max_new_tokens, ends):
                        done.update(finished)
                        yield [reply(examples[i].id, row, self._tokenizer, ends) for i, row in finished.items()]
                except RuntimeError as error:
                    if not out_of_memory(error):
                        raise
                if len(done) < len(waiting):
                    if rows == 1:
                        raise too_large(max(len(prompts[i]) for i in waiting))
                    free_memory()
                    rows //= 2
                    logger.info("generation: out of memory, going on with %d rows", rows)
                waiting = [i for i in waiting if i not in done]

    def _decode(
        self, prompts: Sequence[Sequence[int]], waiting: Sequence[int], rows: int, max_new_tokens: int, ends: list[int]
    ) -> Iterator[dict[int, list[int]]]:
        """New tokens by prompt, as they finish."""
        from holdfast.judging.engines.continuous.graph import GraphedStep
        from holdfast.judging.engines.continuous.loop import EVERY_STEP, RECORDED, SlotLoop

        made: list[GraphedStep] = []

        def prepared(step: Callable[[int], Any], state: Sequence[Any]) -> GraphedStep:
            made.append(GraphedStep(step, state))
            return made[0]

        loop = SlotLoop(
            self._model, [prompts[i] for i in waiting], rows=rows, max_new_tokens=max_new_tokens, ends=ends,
            pad=self._tokenizer.pad_token_id, pace=RECORDED if self._graph else EVERY_STEP,
            prepared=prepared if self._graph else None,
        )  # fmt: skip
        try:
            for finished in loop.decode(range(len(waiting))):
                yield {waiting[i]: row for i, row in finished.items()}
        finally:
            self.steps += loop.steps
            self.fills += loop.fills
            self.recorded = bool(made) and made[0].recording
            loop.close()


ATTENTION = ("sdpa", "eager")


def obstacle(model: Any) -> str | None:
    """Why the slot loop cannot run `model`; None when it can.

    Asked of the cache that transformers itself would build, not of the model's name: every layer has to keep all keys
    and values, and the model has to take positions and a four-dimensional mask as they are given.
    """
    adapters = getattr(model, "peft_config", {})
    base = model.get_base_model() if adapters else model
    for config in adapters.values():
        if getattr(config, "is_prompt_learning", False):
            return "the adapter adds virtual tokens to the prompt"
        if getattr(config, "alora_invocation_tokens", None):
            return "the adapter starts in the middle of the prompt"
    devices = {str(parameter.device) for parameter in model.parameters()}
    spread = f"the model is spread over {', '.join(sorted(devices))}" if len(devices) > 1 else None
    return _of_class(base) or _of_cache(base.config) or spread


def _of_class(base: Any) -> str | None:
    kind, config = type(base).__name__, base.config
    if config.is_encoder_decoder:
        return f"{kind} has an encoder"
    if config.get_text_config() is not config:
        return f"{kind} is not text alone"
    if not (getattr(base, "_supports_attention_backend", False) and getattr(base, "_can_compile_fullgraph", False)):
        return f"{kind} cannot run over a static cache"
    if config._attn_implementation not in ATTENTION:
        return f"attention {config._attn_implementation!r} takes no mask over a static cache"
    return None


def _of_cache(config: Any) -> str | None:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds != {DynamicLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer}))
        return f"{config.model_type} layers do not keep all keys and values ({names or 'unknown layers'})"
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in (parameters, *nested):
        kind = str(rope.get("rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            return f"position encoding {kind!r} depends on the longest row of a batch"
    return None
