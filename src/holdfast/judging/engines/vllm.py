"""vLLM, for models whose generation is worth its start-up; the optional package `vllm`.

It loads the weights itself: a folder or hub id, and an adapter as a folder. Prompts are rendered here, as for every
engine that runs the weights, and handed over as token ids.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, ResourceError, UnsupportedError
from holdfast.core.files import read_json
from holdfast.data.examples import Example
from holdfast.data.templates import Template
from holdfast.judging.engines import BATCH_SIZE, ENGINES
from holdfast.judging.prompts import by_length, prompt_ids, require_sizes
from holdfast.judging.reply import Reply

# Enough work between two flushes of the replies for vLLM's own scheduler to stay busy.
PIECES = 16


@ENGINES.register("vllm")
@dataclass(kw_only=True)
class VllmEngine:
    """Greedy replies by vLLM."""

    model: Any = field(default=None, repr=False)  # a folder or hub id; a loaded model is refused
    tokenizer: Any = field(repr=False)
    batch_size: int = BATCH_SIZE  # sequences that vLLM decodes together at most
    template: Template = "chat"
    model_ref: str | Path | None = None  # the same, for callers whose `model` is taken
    adapter: str | Path | None = None  # folder of a LoRA adapter, not merged
    revision: str | None = None  # commit of a hub id
    # further arguments of `vllm.LLM` (`gpu_memory_utilization`, `tensor_parallel_size`, ...)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default="vllm", init=False)

    def __post_init__(self) -> None:
        if self.model_ref is None and isinstance(self.model, str | Path):
            self.model_ref = self.model
        if self.model_ref is None:
            found = type(self.model).__name__
            what = f"engine 'vllm' got {found} as its model, expected a folder or hub id: it loads the weights itself"
            remedy = "give model_ref (and adapter, for a LoRA adapter that is not merged), or use the engine auto"
            raise UnsupportedError(what, remedy=remedy)
        if self.tokenizer is None:
            raise ConfigError("engine 'vllm' got no tokenizer", remedy="load the model's tokenizer first")
        if self.adapter is not None and not (Path(self.adapter) / "adapter_config.json").is_file():
            what = f"engine 'vllm': {self.adapter} holds no adapter_config.json"
            raise ConfigError(what, remedy="name the folder of a LoRA adapter")
        if importlib.util.find_spec("vllm") is None:
            remedy = "pip install 'holdfast-llm[vllm]'"
            raise ResourceError("engine 'vllm': the package vllm is not installed", remedy=remedy)

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        """Replies, some batches' worth at a time."""
        from vllm import SamplingParams

        require_sizes(max_new_tokens=max_new_tokens, batch_size=self.batch_size)
        prompts = prompt_ids(self.tokenizer, examples, self.template)
        end = self.tokenizer.eos_token_id
        stops = None if end is None else [int(end)]
        settings = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=stops)
        lora = None
        if self.adapter is not None:
            from vllm.lora.request import LoRARequest

            lora = LoRARequest("adapter", 1, str(Path(self.adapter).absolute()))
        order = by_length(examples)
        for start in range(0, len(order), PIECES * self.batch_size):
            chosen = order[start : start + PIECES * self.batch_size]
            given = [{"prompt_token_ids": prompts[i]} for i in chosen]
            outputs = self._llm.generate(given, settings, lora_request=lora, use_tqdm=False)
            yield [self._reply(examples[i].id, out.outputs[0]) for i, out in zip(chosen, outputs, strict=True)]

    def _reply(self, example_id: str, made: Any) -> Reply:
        """vLLM ends a row at an end token, which it hands over, or at the longest reply; anything else is no reply."""
        if made.finish_reason not in ("stop", "length"):
            what = f"engine 'vllm': a row ended by {str(made.finish_reason)[:40]!r}, expected 'stop' or 'length'"
            raise ResourceError(what, remedy="start again: the replies that are there are kept")
        tokens, truncated = list(made.token_ids), made.finish_reason == "length"
        kept = tokens if truncated else tokens[:-1]
        text = self.tokenizer.decode(kept, skip_special_tokens=True).strip()
        return Reply(example_id, text, truncated=truncated, tokens=len(kept))

    @cached_property
    def _llm(self) -> Any:
        from vllm import LLM

        given: dict[str, Any] = {"model": str(self.model_ref), "max_num_seqs": self.batch_size}
        if self.revision is not None:
            given["revision"] = self.revision
        if self.adapter is not None:
            rank = int(read_json(Path(self.adapter) / "adapter_config.json").get("r", 16))
            # vLLM knows powers of two from 8 on.
            given |= {"enable_lora": True, "max_lora_rank": max(8, 1 << (rank - 1).bit_length())}
        return LLM(**{**given, **self.options})
