"""Axolotl's rows as conversations: what was asked and what was replied, in the order of its tokenised data set.

Axolotl hands the trainer tokens. Its own loader reads the files again, its own strategy tokenises each row again, and
the tokens tell which row became which: shuffling, filtering, deduplication and a validation split change nothing then.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from axolotl.prompt_strategies import load as load_strategy
from axolotl.prompt_strategies.alpaca_w_system import InstructionWSystemPromptTokenizingStrategy
from axolotl.prompt_strategies.chat_template import ChatTemplateStrategy
from axolotl.prompt_strategies.completion import CompletionPromptTokenizingStrategy
from axolotl.prompt_tokenizers import AlpacaPromptTokenizingStrategy, InstructionPromptTokenizingStrategy
from axolotl.prompters import AlpacaPrompter
from axolotl.utils.data.shared import datasets_with_name_generator, load_dataset_with_config

from holdfast.core.errors import DataError, UnsupportedError
from holdfast.core.library_types import Tokenizer

if TYPE_CHECKING:
    from axolotl.utils.dict import DictDefault
    from datasets import Dataset

Conversation = list[dict[str, str]]
KNOWN = (
    ChatTemplateStrategy,
    InstructionPromptTokenizingStrategy,
    InstructionWSystemPromptTokenizingStrategy,  # mappings of the user's own, too
)
"""Strategies that know what is prompt and what is reply."""


def conversations(cfg: DictDefault, tokenizer: Tokenizer, dataset: Dataset) -> list[Conversation]:
    """The conversation behind every row of Axolotl's training set.

    Raises:
        UnsupportedError: rows of a type that has no prompt to ask.
        DataError: rows of the training set that the files do not hold (any more).
    """
    length = int(cfg.sequence_len)
    known: dict[bytes, Conversation] = {}
    for config in datasets_with_name_generator(cfg.datasets):
        strategy = _strategy(config, cfg, tokenizer)
        for row in _raw(config, cfg):
            key = _key(strategy.tokenize_prompt(row), length)
            known[key] = _turns(strategy, row)
    found = [known.get(_key(row, length)) for row in dataset]
    if lost := [number for number, turns in enumerate(found) if turns is None]:
        what = f"{len(lost)} of {len(found)} rows that Axolotl trains on are not in its data files as they are now"
        remedy = "remove the folder dataset_prepared_path, so that Axolotl reads the files again"
        raise DataError(f"{what} (the first is row {lost[0]})", remedy=remedy)
    return [turns for turns in found if turns is not None]


def _key(row: Mapping[str, Any], length: int) -> bytes:
    """A hash of a row's tokens and labels, as far as they fit."""
    digest = hashlib.sha256()
    for name in ("input_ids", "labels"):
        digest.update(array("q", row[name][:length]).tobytes())
        digest.update(b"|")
    return digest.digest()


def _raw(config: Any, cfg: DictDefault) -> Any:
    """The rows of one data set, as Axolotl reads them; shards are left out, since only rows that are found count."""
    dataset = load_dataset_with_config(config, cfg.hf_use_auth_token, streaming=False)
    if not isinstance(dataset, dict):
        return dataset
    return dataset[config.split if config.split in dataset else "train"]


def _strategy(config: Any, cfg: DictDefault, tokenizer: Tokenizer) -> Any:
    """What tokenises the rows of one data set, where it knows what is prompt and what is reply."""
    kind = config.type
    if isinstance(kind, Mapping):
        made = load_strategy("user_defined", tokenizer, cfg, dict(kind))
    else:
        made = load_strategy(kind, tokenizer, cfg, config)
        if made is None and str(kind).split(":")[0] == "alpaca":
            style = str(kind).partition(":")[2] or None
            made = AlpacaPromptTokenizingStrategy(
                AlpacaPrompter(style), tokenizer, cfg.train_on_inputs, cfg.sequence_len
            )
    if isinstance(made, KNOWN) and not isinstance(made, CompletionPromptTokenizingStrategy):
        return made
    what = f"datasets: type {kind!r} of {config.path} with the holdfast plugin: its rows have no prompt to ask"
    remedy = "use type: chat_template, alpaca, or a mapping with field_instruction and field_output"
    raise UnsupportedError(what, remedy=remedy)


def _turns(strategy: Any, row: Mapping[str, object]) -> Conversation:
    """Role and content of every turn; of an instruction, with its input below it, a question and its reply."""
    if isinstance(strategy, ChatTemplateStrategy):
        return [_turn(turn) for turn in strategy.get_conversation_thread(row)]
    instruction, given, reply, *system = strategy.parse_instruction_fields(row)
    turns = [{"role": "system", "content": system[0]}] if system and system[0] else []
    asked = f"{instruction}\n\n{given}" if given else str(instruction)
    return [*turns, {"role": "user", "content": asked}, {"role": "assistant", "content": str(reply)}]


def _turn(turn: Mapping[str, Any]) -> dict[str, str]:
    """A turn with nothing beside its text but what only says which tokens are trained on."""
    ours = ("role", "content", "training", "training_detail", "reasoning_training_detail")
    extra = [key for key, value in turn.items() if key not in ours and value]
    extra += [] if isinstance(turn.get("content"), str) else ["content that is not text"]
    if extra:
        what = f"a turn with {', '.join(extra)}: holdfast asks and holds plain text"
        raise UnsupportedError(what, remedy="leave such rows out of the data set")
    return {"role": str(turn["role"]), "content": turn["content"]}
