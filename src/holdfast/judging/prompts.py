"""Prompts as token ids: the same tokens as `data/encode.py` scores completions after, whichever engine replies."""

from collections.abc import Sequence

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.data.encode import listed, require_usable_tokenizer
from holdfast.data.examples import Example, as_chat, prompt_text, to_utf8, to_utf8_turns, uniform
from holdfast.data.templates import Template, rendered


def require_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"generation: {name} = {size}, expected at least 1", remedy=f"set {name} to 1 or more")


def require_prompts(examples: Sequence[Example]) -> None:
    """Refuse plain text: there is nothing to reply to."""
    if without := [example for example in examples if example.kind == "text"]:
        what = f"{len(without)} of {len(examples)} examples are plain text without a prompt, so there is nothing"
        remedy = "give prompt and completion columns, or messages"
        raise DataError(f"{what} to reply to: {listed(without)}", remedy=remedy)


def prompt_ids(tokenizer: Tokenizer, examples: Sequence[Example], template: Template) -> list[list[int]]:
    """Token ids of every prompt, up to where the reply begins.

    Any template but `none` puts plain prompts into a user turn, which the tokenizer's chat template renders: which
    one that is was settled by `holdfast.data.templates.use_template`.
    """
    require_prompts(examples)
    shaped = uniform(examples) if template == "none" else [as_chat(example) for example in examples]
    if shaped:
        require_usable_tokenizer(tokenizer, needs_chat=shaped[0].kind == "chat")
    as_reply: dict[str, bool] = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    encoded = (
        tokenizer(text=to_utf8(example.prompt))
        if isinstance(example.prompt, str)
        else rendered(tokenizer, to_utf8_turns(example.prompt), **as_reply)
        for example in shaped
    )
    return [list(one["input_ids"]) for one in encoded]


def positions_of(model: LanguageModel) -> int | None:
    """The most tokens that a model has positions for; None where it does not say."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions


def require_room(
    model: LanguageModel, examples: Sequence[Example], prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse prompts that leave less than `max_new_tokens` of the model's positions, before anything is decoded."""
    if (positions := positions_of(model)) is None:
        return
    if long := [e for e, ids in zip(examples, prompts, strict=True) if len(ids) + max_new_tokens > positions]:
        room = f"no room for {max_new_tokens} new tokens in the model's {positions} positions"
        what = f"{len(long)} of {len(examples)} prompts leave {room}: {listed(long)}"
        raise DataError(what, remedy="shorten or remove these prompts, or ask for fewer new tokens")


def by_length(examples: Sequence[Example]) -> list[int]:
    """Places of the examples, shortest prompt first: by characters, so that two tokenizers meet the same batches."""
    return sorted(range(len(examples)), key=lambda i: len(prompt_text(examples[i])))


def end_tokens(model: LanguageModel, tokenizer: Tokenizer) -> list[int]:
    """An adapter's tokenizer may end turns with another token than its base's generation settings."""
    named = model.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return sorted(int(i) for i in ids if i is not None)


def decodable(
    model: LanguageModel, tokenizer: Tokenizer, examples: Sequence[Example], template: Template, *,
    max_new_tokens: int, batch_size: int,
) -> tuple[list[list[int]], list[int]]:  # fmt: skip
    """Token ids of every prompt and the tokens that end a reply, once all sizes are known to fit a loaded model."""
    require_sizes(max_new_tokens=max_new_tokens, batch_size=batch_size)
    prompts = prompt_ids(tokenizer, examples, template)
    require_room(model, examples, prompts, max_new_tokens)
    return prompts, end_tokens(model, tokenizer)
