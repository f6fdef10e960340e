"""The engine `continuous`: the slot loop, recorded as CUDA graphs where there is CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from holdfast.core.errors import UnsupportedError
from holdfast.data.examples import Example
from holdfast.data.templates import Template
from holdfast.evaluation.engines import BATCH_SIZE, ENGINES, require_model
from holdfast.evaluation.engines.continuous.support import obstacle
from holdfast.evaluation.generation import decoding, free_memory, halved, out_of_memory, reply
from holdfast.evaluation.prompts import by_length, end_tokens, prompt_ids, require_room, require_sizes
from holdfast.evaluation.reply import Reply

logger = logging.getLogger(__name__)


@ENGINES.register("continuous")
class ContinuousEngine:
    """Greedy decoding by the rule of `holdfast.evaluation.generation.generate`, with rows refilled as they end.

    In exact arithmetic the replies are those of the engine `transformers`; in bfloat16 a near tie may fall either way,
    as it does between two batch sizes.

    Args:
        model: full attention in every layer, on one device; adapters may be attached.
        tokenizer: its tokenizer.
        batch_size: rows.
        template: see `open_engine`.
        graph: record the step as CUDA graphs; None: where the model is on CUDA.

    Attributes:
        steps: decode steps so far, and `fills` how often prompts were read.
        recorded: whether the last generation ran recorded steps to its end.

    Raises:
        UnsupportedError: a model that keeps anything but all keys and values.
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
        self._model, self._tokenizer, self._template = model, tokenizer, template
        self._batch_size = batch_size
        self._graph = on_cuda if graph is None else graph
        self.steps = 0
        self.fills = 0
        self.recorded = False

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        """Replies as they finish.

        Raises:
            ConfigError, DataError: see `holdfast.evaluation.generation.generate`.
            ResourceError: a single prompt does not fit in memory.
        """
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
                    for found in self._decode(prompts, waiting, rows, max_new_tokens, ends):
                        done.update(found)
                        yield [reply(examples[i].id, row, self._tokenizer, ends) for i, row in found.items()]
                except RuntimeError as error:
                    if not out_of_memory(error):
                        raise
                if len(done) < len(waiting):
                    free_memory()
                    rows = halved(rows, max(len(prompts[i]) for i in waiting))
                    logger.info("generation: out of memory, going on with %d rows", rows)
                waiting = [i for i in waiting if i not in done]

    def _decode(
        self, prompts: Sequence[Sequence[int]], waiting: Sequence[int], rows: int, max_new_tokens: int, ends: list[int]
    ) -> Iterator[dict[int, list[int]]]:
        """New tokens by prompt, as they finish."""
        from holdfast.evaluation.engines.continuous.graph import GraphedStep
        from holdfast.evaluation.engines.continuous.loop import EVERY_STEP, RECORDED, SlotLoop

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
            for found in loop.decode(range(len(waiting))):
                yield {waiting[i]: row for i, row in found.items()}
        finally:
            self.steps += loop.steps
            self.fills += loop.fills
            self.recorded = bool(made) and made[0].recording
            loop.close()
