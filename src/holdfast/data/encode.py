"""Token ids and labels, exactly as TRL's `SFTTrainer` makes them for prompt-completion rows.

The completion starts where the tokens of the prompt and of prompt + completion part; everything before is labelled
-100. Two differences to TRL are deliberate: `messages` rows score their last reply only (TRL scores every token), and a
safety example without a scored token is an error, where TRL drops it: dropping would change the denominator of alpha.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.hashing import sha256_json
from holdfast.core.library_types import Tokenizer
from holdfast.data.examples import Example, as_turns, completion_text, to_utf8, to_utf8_turns
from holdfast.data.templates import rendered

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
MAX_LISTED = 20
MAX_TASK_SHARE_UNSCORED = 0.05
WINDOW = 10_000  # examples whose tokens exist at one time, where they are only counted
# What makes ids of texts in a fast tokenizer; a subclass with one of its own is asked as a whole.
_FAST = ("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding", "apply_chat_template")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and labels (-100 on the prompt) of one example."""

    id: str
    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    truncated: bool

    @property
    def n_labels(self) -> int:
        """How many labels are scored: the first token has no prediction, so `labels[1:]` counts."""
        scored = len(self.labels) - self.labels.count(IGNORE)
        return scored - (scored > 0 and self.labels[0] != IGNORE)


def first_tokens(row: Encoded, k: int) -> Encoded:
    """The row up to its k-th scored token."""
    scored = [i for i, label in enumerate(row.labels) if i > 0 and label != IGNORE]
    if len(scored) <= k:
        return row
    end = scored[k - 1] + 1
    return replace(row, input_ids=row.input_ids[:end], labels=row.labels[:end])


class EncodedSet(NamedTuple):
    """Encoded examples, and how many of them were cut at `max_length`."""

    examples: list[Encoded]
    n_truncated: int


def encode(example: Example, tokenizer: Tokenizer, *, max_length: int | None) -> Encoded:
    """Encode one example, in any of the three formats; keeps the first `max_length` tokens, all where it is None."""
    return _encode_together([example], tokenizer, max_length)[0]


def _encode_together(examples: Sequence[Example], tokenizer: Tokenizer, max_length: int | None) -> list[Encoded]:
    """Encode examples with one call of the tokenizer for each of their parts, which is several times faster."""
    plain = [e for e in examples if e.kind != "chat"]
    chat = [e for e in examples if e.kind == "chat"]
    of_plain, of_chat = iter(_plain_ids(plain, tokenizer)), iter(_chat_ids(chat, tokenizer))
    return [_labelled(e.id, *next(of_chat if e.kind == "chat" else of_plain), max_length) for e in examples]


def _labelled(example_id: str, prompt_ids: list[int], ids: list[int], max_length: int | None) -> Encoded:
    start = len(prompt_ids)
    if ids[:start] != prompt_ids:  # rare; otherwise one comparison for all of it
        pairs = zip(prompt_ids, ids, strict=False)
        start = next((place for place, (a, b) in enumerate(pairs) if a != b), len(ids))
    labels = [IGNORE] * start + ids[start:]
    truncated = max_length is not None and len(ids) > max_length
    return Encoded(example_id, tuple(ids[:max_length]), tuple(labels[:max_length]), truncated)


def _plain_ids(examples: Sequence[Example], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Ids of each prompt, and of prompt + completion + EOS, added only where the text does not end with it."""
    if not examples:
        return []
    prompts = [to_utf8(str(example.prompt)) for example in examples]
    replies = [to_utf8(str(example.completion)) for example in examples]
    eos = tokenizer.eos_token
    # A text example has no prompt, so nothing of it is masked, not even a BOS token.
    texts = [prompt for prompt in prompts if prompt]
    texts += [p + (r if r.endswith(eos) else r + eos) for p, r in zip(prompts, replies, strict=True)]
    backend = _backend(tokenizer)
    ids = iter(tokenizer(text=texts)["input_ids"] if backend is None else _ids(tokenizer, backend, texts, special=True))
    of_prompts = [next(ids) if prompt else [] for prompt in prompts]
    return list(zip(of_prompts, ids, strict=True))


def _ids(tokenizer: Tokenizer, backend: Tokenizer, texts: list[str], *, special: bool) -> list[list[int]]:
    """What `tokenizer(texts)["input_ids"]` would be, without the offsets and masks that it makes for every token."""
    ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    if len(ids[longest]) > tokenizer.model_max_length:
        tokenizer(text=[texts[longest]], add_special_tokens=special)  # where transformers warns that it is too long
    return ids


def _backend(tokenizer: Tokenizer) -> Tokenizer:
    """What a fast tokenizer gets the ids of texts from, where that is all it does; otherwise None.

    A class of its own may do more, or switch languages. Padding, truncation and the splitting of special tokens may be
    left from an earlier call; the tokenizer's own call undoes them.
    """
    from transformers import PreTrainedTokenizerFast as Fast

    cls = type(tokenizer)
    own = (n for n in _FAST if n in vars(tokenizer) or getattr(cls, n, None) is not getattr(Fast, n, None))
    if not isinstance(tokenizer, Fast) or hasattr(tokenizer, "_switch_to_input_mode") or any(own):
        return None
    backend = tokenizer.backend_tokenizer
    plain = backend.padding is None and backend.truncation is None
    return backend if plain and backend.encode_special_tokens == tokenizer.split_special_tokens else None


def _chat_ids(examples: Sequence[Example], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    if not examples:
        return []
    prompts = [to_utf8_turns(as_turns("user", example.prompt)) for example in examples]
    replies = [to_utf8_turns(as_turns("assistant", example.completion)) for example in examples]
    whole = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    if (backend := _backend(tokenizer)) is None:
        # `return_dict` fixes the return type, which changed between transformers releases.
        asked = rendered(tokenizer, prompts, tokenize=True, return_dict=True, add_generation_prompt=True)["input_ids"]
        return list(zip(asked, rendered(tokenizer, whole, tokenize=True, return_dict=True)["input_ids"], strict=True))
    opened = rendered(tokenizer, prompts, tokenize=False, add_generation_prompt=True)
    ids = _ids(tokenizer, backend, [*opened, *rendered(tokenizer, whole, tokenize=False)], special=False)
    return list(zip(ids[: len(prompts)], ids[len(prompts) :], strict=True))


def encode_all(
    examples: Sequence[Example], tokenizer: Tokenizer, *, max_length: int | None, role: Literal["task", "safety"]
) -> EncodedSet:
    """Encode every example; one without a scored token has no token mean.

    For `safety` that is an error; for `task` it is dropped, as TRL does, up to 5 % of the set.
    """
    kept = list(encode_each(examples, tokenizer, max_length=max_length, role=role))
    return EncodedSet(kept, sum(item.truncated for item in kept))


def encode_each(
    examples: Sequence[Example], tokenizer: Tokenizer, *, max_length: int | None, role: Literal["task", "safety"]
) -> Iterator[Encoded]:
    """What `encode_all` keeps, one by one, for sets whose tokens do not fit in memory; refused at the end."""
    eos = tokenizer.eos_token if role == "safety" else None
    unscored: list[Example] = []
    for start in range(0, len(examples), WINDOW):
        window = examples[start : start + WINDOW]
        for example, item in zip(window, _encode_together(window, tokenizer, max_length), strict=True):
            if item.n_labels == 0 or (eos is not None and not completion_text(example).replace(eos, "").strip()):
                unscored.append(example)
            if item.n_labels > 0:
                yield item
    if len(unscored) > (MAX_TASK_SHARE_UNSCORED * len(examples) if role == "task" else 0):
        raise DataError(
            f"{len(unscored)} of {len(examples)} {role} examples have no completion token to score at max_length "
            f"{max_length}: the prompt fills it, the template leaves the reply out, or the reply is only EOS: "
            f"{listed(unscored)}",
            remedy="raise train.max_length, or shorten or remove these examples",
        )


def collate(batch: Sequence[Encoded], pad_token_id: int, pad_to_multiple_of: int | None = None) -> dict[str, Tensor]:
    """Pad on the right to the longest example, rounded up to `pad_to_multiple_of`.

    The mask and labels come from lengths, not from comparing ids with the pad id, so a real EOS keeps its
    label and its attention when it doubles as the pad token.

    Returns:
        `input_ids`, `attention_mask` and `labels` (-100 on padding), each int64 of shape (batch, length).
    """
    import torch

    multiple = pad_to_multiple_of or 1
    width = -(-max(len(item.input_ids) for item in batch) // multiple) * multiple
    input_ids = np.full((len(batch), width), pad_token_id)
    attention_mask = np.zeros((len(batch), width), dtype=np.int64)
    labels = np.full((len(batch), width), IGNORE)
    for row, item in enumerate(batch):
        length = len(item.input_ids)
        input_ids[row, :length] = item.input_ids
        attention_mask[row, :length] = 1
        labels[row, :length] = item.labels
    arrays = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def listed(examples: Sequence[Example]) -> str:
    """Ids and places of the first 20."""
    named = "; ".join(f"{example.id} ({example.where})" for example in examples[:MAX_LISTED])
    return named + ("; ..." if len(examples) > MAX_LISTED else "")


def require_usable_tokenizer(tokenizer: Tokenizer, needs_chat: bool) -> None:
    """Refuse a tokenizer that cannot encode the data; give it a pad token where it has none, as TRL does.

    Padding with EOS is safe here: labels come from lengths, never from the pad id, so EOS stays scored.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    lacking = None
    if needs_chat and not tokenizer.chat_template:
        remedy = "use a chat model, set train.chat_template_path, or `template: none` (in Python: plain strings)"
        lacking = "no chat template, and the data is conversational", remedy
    elif tokenizer.eos_token is None and not needs_chat:
        lacking = "no EOS token, which ends every plain completion", "set train.eos_token to a token of its vocabulary"
    elif tokenizer.eos_token is None and tokenizer.pad_token is None:
        lacking = "neither a pad nor an EOS token", "set train.pad_token to a token of its vocabulary"
    if lacking is not None:
        raise ConfigError(f"the tokenizer {name!r} has {lacking[0]}", remedy=lacking[1])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def template_sha256(tokenizer: Tokenizer) -> str:
    """Hash of the chat template (of all of them, where they are named; of null where there is none)."""
    return sha256_json(tokenizer.chat_template)


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """Hash of what turns text into ids: vocabulary, merges, special tokens; not the chat template.

    The pad token and the padding and truncation state are left out: they change no scored token, and calling
    the tokenizer or `require_usable_tokenizer` changes them.
    """
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"}
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return sha256_json([type(tokenizer).__name__, tokenizer.get_vocab(), special])
    parts = json.loads(backend.to_str())
    rules = {name: value for name, value in parts.items() if name not in {"padding", "truncation"}}
    return sha256_json([rules, special])
