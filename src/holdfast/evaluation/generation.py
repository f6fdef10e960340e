"""Greedy replies of a model, batched; the same prompt tokens as `data/encode.py` scores completions after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.core.errors import ConfigError, DataError, ResourceError
from holdfast.data.encode import MAX_LISTED, require_usable_tokenizer
from holdfast.data.examples import Example, as_chat, prompt_text, to_utf8, to_utf8_turns, uniform

BATCH_SIZE = 32

Template = Literal["chat", "none"]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered to one prompt.

    Attributes:
        id: the example's.
        text: without special tokens and outer white space; not in the repr, which may reach a log.
        truncated: no end token within `max_new_tokens`.
        tokens: new tokens, the end token not counted.
    """

    id: str
    text: str = field(repr=False)
    truncated: bool
    tokens: int


@torch.no_grad()
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
        template: `chat` puts plain prompts into a user turn, `none` leaves them as they are.
        progress: called with the number of finished replies after every batch.

    Raises:
        ConfigError: a size below 1, or a tokenizer that cannot encode the prompts.
        DataError: examples without a prompt, or too long for the model's positions, by id and place.
        ResourceError: a single prompt does not fit in memory.
    """
    _require_sizes(max_new_tokens, batch_size)
    prompts = _prompt_ids(tokenizer, examples, template)
    _require_room(model, examples, prompts, max_new_tokens)
    ends = _end_tokens(model, tokenizer)
    # By characters, not tokens: two models with different tokenizers then meet the same batches.
    waiting = sorted(range(len(prompts)), key=lambda i: len(prompt_text(examples[i])))
    found: dict[int, Reply] = {}
    with _decoding(model, max_new_tokens, tokenizer.pad_token_id, ends) as settings:
        while waiting:
            chosen = waiting[:batch_size]
            rows = _decode(model, settings, [prompts[i] for i in chosen])
            if rows is None:
                batch_size = _halved(len(chosen), max(len(prompts[i]) for i in chosen))
                continue
            for i, row in zip(chosen, rows, strict=True):
                found[i] = _reply(examples[i].id, row, tokenizer, ends)
            waiting = waiting[len(chosen) :]
            if progress is not None:
                progress(len(found))
    return [found[i] for i in range(len(prompts))]


def _require_sizes(max_new_tokens: int, batch_size: int) -> None:
    for name, size in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if size < 1:
            raise ConfigError(f"generation: {name} = {size}, expected at least 1", remedy=f"set {name} to 1 or more")


def _prompt_ids(tokenizer: Any, examples: Sequence[Example], template: Template) -> list[list[int]]:
    """Token ids of every prompt, up to where the reply begins."""
    without = [example for example in examples if example.kind == "text"]
    if without:
        raise DataError(
            f"{len(without)} of {len(examples)} examples are plain text without a prompt, so there is nothing to "
            f"reply to: {_listed(without)}",
            remedy="give prompt and completion columns, or messages",
        )
    shaped = uniform(examples) if template == "none" else [as_chat(example) for example in examples]
    if shaped:
        require_usable_tokenizer(tokenizer, needs_chat=shaped[0].kind == "chat")
    return [
        list(
            tokenizer(text=to_utf8(example.prompt))["input_ids"]
            if isinstance(example.prompt, str)
            else tokenizer.apply_chat_template(
                to_utf8_turns(example.prompt), tokenize=True, return_dict=True, add_generation_prompt=True
            )["input_ids"]
        )
        for example in shaped
    ]


def _require_room(
    model: Any, examples: Sequence[Example], prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse prompts that leave less than `max_new_tokens` of the model's positions, before anything is decoded."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return
    long = [e for e, ids in zip(examples, prompts, strict=True) if len(ids) + max_new_tokens > positions]
    if long:
        raise DataError(
            f"{len(long)} of {len(examples)} prompts leave no room for {max_new_tokens} new tokens in the model's "
            f"{positions} positions: {_listed(long)}",
            remedy="shorten or remove these prompts, or ask for fewer new tokens",
        )


def _listed(examples: Sequence[Example]) -> str:
    named = "; ".join(f"{example.id} ({example.where})" for example in examples[:MAX_LISTED])
    return named + ("; ..." if len(examples) > MAX_LISTED else "")


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """An adapter's tokenizer may end turns with another token than its base's generation settings."""
    named = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return sorted(int(i) for i in ids if i is not None)


@contextmanager
def _decoding(model: Any, max_new_tokens: int, pad: int | None, ends: list[int]) -> Iterator[Any]:
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
    ids, mask = _left_padded(prompts, settings.pad_token_id)
    try:
        out = model.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings
        )
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
    else:
        return rows
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _out_of_memory(error: RuntimeError) -> bool:
    # On the CPU torch raises a plain RuntimeError, told apart by its text alone.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _halved(size: int, longest: int) -> int:
    if size == 1:
        raise ResourceError(
            f"replying to a single prompt of {longest} tokens does not fit in memory",
            remedy="load the model in bfloat16, use a larger device, or ask for fewer new tokens",
        )
    return size // 2


def _left_padded(prompts: Sequence[Sequence[int]], pad: int | None) -> tuple[Tensor, Tensor]:
    """Ids and attention mask; the padding token is never attended to, so that any id serves."""
    width = max(len(ids) for ids in prompts)
    ids = torch.full((len(prompts), width), pad or 0, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _reply(example_id: str, row: list[int], tokenizer: Any, ends: list[int]) -> Reply:
    end = next((place for place, token in enumerate(row) if token in ends), None)
    kept = row[:end]
    text = tokenizer.decode(kept, skip_special_tokens=True).strip()
    return Reply(example_id, text, truncated=end is None, tokens=len(kept))
