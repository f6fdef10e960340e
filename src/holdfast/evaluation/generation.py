"""Greedy replies of a model by transformers' own `generate`, batched by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import ResourceError
from holdfast.data.examples import Example
from holdfast.data.templates import Template
from holdfast.evaluation.prompts import by_length, end_tokens, prompt_ids, require_room, require_sizes
from holdfast.evaluation.reply import Progress, Reply

__all__ = ["BATCH_SIZE", "Progress", "Reply", "Template", "generate"]

BATCH_SIZE = 32


def generate(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    max_new_tokens: int,
    batch_size: int = BATCH_SIZE,
    template: Template = "chat",
    progress: Progress | None = None,
) -> list[Reply]:
    """The most likely token at every place until an end token: one reply per example, in order.

    Decoding is greedy whatever the model's own generation settings say (sampling, penalties, stop strings): two
    models are compared under the same rule. End tokens are the tokenizer's and those of the model's generation
    settings. Prompts of like length share a batch, padded on the left; a batch that does not fit in memory is
    halved. Model and tokenizer are left as they were, except that a tokenizer without a pad token gets one.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: its tokenizer.
        examples: with a prompt each; completions are not looked at.
        max_new_tokens: length of the longest reply.
        batch_size: prompts decoded together at most.
        template: `chat` and `alpaca` put plain prompts into a user turn, `none` leaves them as they are.
        progress: called with the number of finished replies after every batch.

    Raises:
        ConfigError: a size below 1, or a tokenizer that cannot encode the prompts.
        DataError: examples without a prompt, or too long for the model's positions, by id and place.
        ResourceError: a single prompt does not fit in memory.
    """
    found: dict[int, Reply] = {}
    for batch in batches(
        model, tokenizer, examples, max_new_tokens=max_new_tokens, batch_size=batch_size, template=template
    ):
        found |= batch
        if progress is not None:
            progress(len(found))
    return [found[i] for i in range(len(examples))]


def batches(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    max_new_tokens: int,
    batch_size: int,
    template: Template,
) -> Iterator[dict[int, Reply]]:
    """`generate`, one batch at a time: replies by the place of their example, shortest prompts first."""
    require_sizes(max_new_tokens=max_new_tokens, batch_size=batch_size)
    prompts = prompt_ids(tokenizer, examples, template)
    require_room(model, examples, prompts, max_new_tokens)
    ends = end_tokens(model, tokenizer)
    waiting = by_length(examples)
    with decoding(model, max_new_tokens, tokenizer.pad_token_id, ends) as settings:
        while waiting:
            chosen = waiting[:batch_size]
            rows = _decode(model, settings, [prompts[i] for i in chosen])
            if rows is None:
                batch_size = halved(len(chosen), max(len(prompts[i]) for i in chosen))
                continue
            waiting = waiting[len(chosen) :]
            yield {i: reply(examples[i].id, row, tokenizer, ends) for i, row in zip(chosen, rows, strict=True)}


@contextmanager
def decoding(model: Any, max_new_tokens: int, pad: int | None, ends: list[int]) -> Iterator[Any]:
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


def _decode(model: Any, settings: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """New token ids of one batch; None when it does not fit in memory."""
    ids, mask = left_padded(prompts, settings.pad_token_id)
    try:
        with torch.no_grad():
            out = model.generate(
                input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings
            )
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    else:
        return rows
    free_memory()
    return None


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory."""
    # On the CPU torch raises a plain RuntimeError, told apart by its text alone.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory() -> None:
    """Hand unused GPU memory back, so that a smaller batch finds it in one piece."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def halved(size: int, longest: int) -> int:
    """The next batch size to try.

    Raises:
        ResourceError: a single prompt did not fit.
    """
    if size == 1:
        raise ResourceError(
            f"replying to a single prompt of {longest} tokens does not fit in memory",
            remedy="load the model in bfloat16, use a larger device, or ask for fewer new tokens",
        )
    return size // 2


def left_padded(prompts: Sequence[Sequence[int]], pad: int | None) -> tuple[Tensor, Tensor]:
    """Ids and attention mask; the padding token is never attended to, so that any id serves."""
    width = max(len(ids) for ids in prompts)
    ids = torch.full((len(prompts), width), pad or 0, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def reply(example_id: str, row: list[int], tokenizer: Any, ends: Sequence[int]) -> Reply:
    """New tokens up to the first end token, as text; truncated where there is none."""
    end = next((place for place, token in enumerate(row) if token in ends), None)
    kept = row[:end]
    text = tokenizer.decode(kept, skip_special_tokens=True).strip()
    return Reply(example_id, text, truncated=end is None, tokens=len(kept))
