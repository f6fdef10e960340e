"""Greedy replies by transformers' own `generate`: every model it knows, batched by length; and decoding in general."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from holdfast.core.errors import ConfigError, ResourceError
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.data.examples import Example
from holdfast.data.templates import Template
from holdfast.judging.engines import BATCH_SIZE, ENGINES
from holdfast.judging.prompts import by_length, decodable
from holdfast.judging.reply import Progress, Reply
from holdfast.models.library_errors import fitting_batches


@dataclass(kw_only=True)
class LoadedModelEngine:
    """What engines share that run a model in memory."""

    name: ClassVar[str]
    model: Any = field(repr=False)  # a causal language model of transformers, or a PEFT model around one
    tokenizer: Any = field(repr=False)
    batch_size: int = BATCH_SIZE  # prompts decoded together at most
    template: Template = "chat"

    def __post_init__(self) -> None:
        for part, value in (("model", self.model), ("tokenizer", self.tokenizer)):
            if value is None or isinstance(value, str):
                found = f"no {part}" if value is None else f"a name as its {part}"
                what = f"engine {self.name!r} got {found}, expected a loaded {part}"
                raise ConfigError(what, remedy="load it first, or use the engine vllm or endpoint")


@ENGINES.register("transformers")
class TransformersEngine(LoadedModelEngine):
    """The most likely token at every place until an end token, prompts of like length in a batch.

    Decoding is greedy whatever the model's own generation settings say (sampling, penalties, stop strings): two
    models are compared under the same rule. End tokens are the tokenizer's and those of the model's generation
    settings. Batches are padded on the left; one that does not fit in memory is halved. Model and tokenizer are left as
    they were, except that a tokenizer without a pad token gets one.
    """

    name = "transformers"

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        """Replies batch by batch, shortest prompts first."""
        model, sizes = self.model, {"max_new_tokens": max_new_tokens, "batch_size": self.batch_size}
        prompts, ends = decodable(model, self.tokenizer, examples, self.template, **sizes)
        with decoding(model, max_new_tokens, self.tokenizer.pad_token_id, ends) as settings:

            def new_tokens(chosen: list[int]) -> list[list[int]]:
                padded = left_padded([prompts[i] for i in chosen], settings.pad_token_id)
                ids, mask = (part.to(model.device) for part in padded)
                with torch.no_grad():
                    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
                rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
                return rows

            order, alone = by_length(examples), lambda i: too_large(len(prompts[i]))
            for chosen, rows in fitting_batches(order, self.batch_size, new_tokens, alone):
                yield [reply(examples[i].id, row, self.tokenizer, ends) for i, row in zip(chosen, rows, strict=True)]


def generate(
    model: LanguageModel, tokenizer: Tokenizer, examples: Sequence[Example], *, max_new_tokens: int,
    batch_size: int = BATCH_SIZE, template: Template = "chat", progress: Progress | None = None,
) -> list[Reply]:  # fmt: skip
    """One reply per example, in order, by the engine `transformers`; `progress` is told how many are finished."""
    engine = TransformersEngine(model=model, tokenizer=tokenizer, batch_size=batch_size, template=template)
    replies: dict[str, Reply] = {}
    for batch in engine.generate(examples, max_new_tokens=max_new_tokens):
        replies |= {made.id: made for made in batch}
        if progress is not None:
            progress(len(replies))
    return [replies[example.id] for example in examples]


@contextmanager
def decoding(model: LanguageModel, max_new_tokens: int, pad: int | None, ends: list[int]) -> Iterator[LanguageModel]:
    """Evaluation mode, greedy settings and a contiguous input of the head; all put back afterwards."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, use_cache=True,
        pad_token_id=pad, eos_token_id=ends or None,
    )  # fmt: skip
    # Settings that are given are filled up from the model's own, so those have to go as well.
    own = [(module, module.generation_config) for module in model.modules() if "generation_config" in vars(module)]
    modes = [(module, module.training) for module in model.modules()]
    head = model.get_output_embeddings()
    # The prefill hands the head a strided slice, for which torch copies the whole head once per row.
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(), *inputs[1:]))
    try:
        model.eval()
        for module, _ in own:
            module.generation_config = settings
        yield settings
    finally:
        hook.remove()
        for module, config in own:
            module.generation_config = config
        for module, mode in modes:
            module.training = mode


def too_large(tokens: int) -> ResourceError:
    """The refusal of a single prompt that does not fit."""
    what = f"replying to a single prompt of {tokens} tokens does not fit in memory"
    return ResourceError(what, remedy="load the model in bfloat16, use a larger device, or ask for fewer new tokens")


def left_padded(prompts: Sequence[Sequence[int]], pad: int | None) -> tuple[Tensor, Tensor]:
    """Ids and attention mask; the padding token is never attended to, so that any id serves."""
    rows = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad or 0, padding_side="left")
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")


def reply(example_id: str, row: list[int], tokenizer: Tokenizer, ends: Sequence[int]) -> Reply:
    """New tokens up to the first end token, as text; truncated where there is none."""
    end = next((place for place, token in enumerate(row) if token in ends), None)
    text = tokenizer.decode(row[:end], skip_special_tokens=True).strip()
    return Reply(example_id, text, truncated=end is None, tokens=len(row[:end]))
