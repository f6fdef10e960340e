"""The engine `continuous`: a row that ends makes room for the next prompt, so that few steps go to finished rows.

transformers' own (`generate_batch`) takes CUDA graphs only where an optional flash-attention package is installed. This
is an ordinary loop over a static cache, the same with and without a graph. A small model decodes as fast as its kernels
are launched, so that the graph is what matters.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import LanguageModel
from holdfast.data.examples import Example
from holdfast.judging.engines import ENGINES
from holdfast.judging.engines.transformers import LoadedModelEngine, decoding, reply, too_large
from holdfast.judging.prompts import by_length, decodable
from holdfast.judging.reply import Reply
from holdfast.models.library_errors import free_memory, out_of_memory

logger = logging.getLogger(__name__)

ATTENTION = ("sdpa", "eager")


@ENGINES.register("continuous")
@dataclass(kw_only=True)
class ContinuousEngine(LoadedModelEngine):
    """Greedy decoding by the rule of `holdfast.judging.engines.transformers`, with rows refilled as they end.

    In exact arithmetic the replies are those of the engine `transformers`; in bfloat16 a near tie may fall either way,
    as it does between two batch sizes.
    """

    name = "continuous"
    graph: bool | None = None  # record the step as CUDA graphs; None: where the model is on CUDA
    steps: int = field(default=0, init=False)  # decode steps so far
    fills: int = field(default=0, init=False)  # how often prompts were read

    def __post_init__(self) -> None:
        super().__post_init__()
        if (reason := obstacle(self.model)) is not None:
            raise UnsupportedError(f"engine {self.name!r}: {reason}", remedy="use the engine transformers, or auto")
        on_cuda = self.model.device.type == "cuda"
        if self.graph and not on_cuda:
            what = f"engine {self.name!r}: graph = true with a model on {self.model.device}, expected CUDA"
            raise UnsupportedError(what, remedy="leave graph out, or move the model to a GPU")
        self.graph = on_cuda if self.graph is None else self.graph

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        sizes = {"max_new_tokens": max_new_tokens, "batch_size": self.batch_size}
        prompts, ends = decodable(self.model, self.tokenizer, examples, self.template, **sizes)
        waiting, rows = by_length(examples), self.batch_size
        with decoding(self.model, max_new_tokens, self.tokenizer.pad_token_id, ends):
            while waiting:
                rows = min(rows, len(waiting))
                done: set[int] = set()
                try:
                    for finished in self._decode(prompts, waiting, rows, max_new_tokens, ends):
                        done.update(finished)
                        yield [reply(examples[i].id, row, self.tokenizer, ends) for i, row in finished.items()]
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
        from holdfast.judging.engines.continuous.graph import GraphedStep
        from holdfast.judging.engines.continuous.loop import EVERY_STEP, RECORDED, SlotLoop

        loop = SlotLoop(
            self.model, [prompts[i] for i in waiting], rows=rows, max_new_tokens=max_new_tokens, ends=ends,
            pad=self.tokenizer.pad_token_id, pace=RECORDED if self.graph else EVERY_STEP,
            prepared=GraphedStep if self.graph else None,
        )  # fmt: skip
        try:
            for finished in loop.decode(range(len(waiting))):
                yield {waiting[i]: row for i, row in finished.items()}
        finally:
            self.steps += loop.steps
            self.fills += loop.fills
            loop.close()


def obstacle(model: LanguageModel) -> str | None:
    """Why the slot loop cannot run `model`; None when it can.

    Asked of the cache that transformers itself would build, not of the model's name: every layer has to keep all keys
    and values, and the model has to take positions and a four-dimensional mask as they are given.
    """
    return next(_obstacles(model), None)


def _obstacles(model: LanguageModel) -> Iterator[str]:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    adapters = getattr(model, "peft_config", {})
    base = model.get_base_model() if adapters else model
    kind, config = type(base).__name__, base.config
    for adapter in adapters.values():
        if getattr(adapter, "is_prompt_learning", False):
            yield "the adapter adds virtual tokens to the prompt"
        if getattr(adapter, "alora_invocation_tokens", None):
            yield "the adapter starts in the middle of the prompt"
    if config.is_encoder_decoder:
        yield f"{kind} has an encoder"
    if config.get_text_config() is not config:
        yield f"{kind} is not text alone"
    if not (getattr(base, "_supports_attention_backend", False) and getattr(base, "_can_compile_fullgraph", False)):
        yield f"{kind} cannot run over a static cache"
    if config._attn_implementation not in ATTENTION:
        yield f"attention {config._attn_implementation!r} takes no mask over a static cache"
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    if layers != {DynamicLayer}:
        names = ", ".join(sorted(layer.__name__ for layer in layers - {DynamicLayer})) or "unknown layers"
        yield f"{config.model_type} layers do not keep all keys and values ({names})"
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        encoding = str(rope.get("rope_type", "default"))
        if "dynamic" in encoding or encoding == "longrope":
            yield f"position encoding {encoding!r} depends on the longest row of a batch"
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        yield f"the model is spread over {', '.join(devices)}"
