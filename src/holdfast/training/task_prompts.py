"""The prompts of a task data set as text, to prove that no certify prompt is among them."""

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.data.encode import require_usable_tokenizer
from holdfast.data.examples import searchable_texts
from holdfast.training.safety import as_examples

CONVERSATIONS = ("messages", "conversations")


def task_prompts(dataset: Any, formatting: Callable[[Any], str] | None, text_field: str) -> list[str] | None:
    """One or several strings per row: where a certify prompt could be.

    Of a conversation these are all turns that are not the assistant's, joined, and each of them alone (as
    `searchable_texts` does for examples); otherwise the prompt, or the whole text where there is no prompt.

    Lenient where the safety set is strict: a task row may hold anything that TRL accepts (tools, a last turn that is
    not the assistant's), and only its prompt's text matters here. None when rows cannot be read as text: a stream, or
    tokens.
    """
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "column_names"):
        return None
    if formatting is not None:
        return [str(formatting(row)) for row in dataset]
    column = next((name for name in ("prompt", *CONVERSATIONS, text_field) if name in dataset.column_names), None)
    if column is None:
        return None
    found = [text for value in dataset[column] for text in _texts(value)]
    if column == "prompt" and "completion" in dataset.column_names:
        found += [turn for value in dataset["completion"] for turn in _asked(value)]
    return found


def trained_texts(given: Mapping[str, Any], args: Any, harmful: Any) -> list[str] | None:
    """What a run trains on, as `task_prompts` gives it, harmful pairs included.

    Args:
        given: the trainer's keyword arguments.
        args: `SafeSFTConfig`.
        harmful: pairs that some defenses train against.
    """
    found = task_prompts(given.get("train_dataset"), given.get("formatting_func"), args.dataset_text_field)
    if found is None or harmful is None:
        return found
    return found + [text for example in as_examples(harmful, "harmful") for text in searchable_texts(example)]


def _texts(value: Any) -> list[str]:
    """A string as it is; of a conversation, what was not said by the assistant, one turn a line, and turn by turn."""
    if not isinstance(value, list | tuple):
        return [str(value)]
    asked = _asked(value)
    return list(dict.fromkeys(["\n".join(asked), *asked]))


def _asked(value: Any) -> list[str]:
    """The turns of a conversation that are not the assistant's; none of a string."""
    turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list | tuple) else []
    asked = [turn for turn in turns if turn.get("role", turn.get("from")) not in ("assistant", "gpt")]
    return [str(turn.get("content", turn.get("value", ""))) for turn in asked]


def require_task_tokenizer(args: Any, given: Mapping[str, Any]) -> None:
    """Refuse a tokenizer that cannot encode the task data, in our words and before TRL meets it."""
    tokenizer = given.get("processing_class")
    if tokenizer is not None and not (args.chat_template_path or args.eos_token or args.pad_token):
        first = next(iter(given["train_dataset"]))
        chat = "messages" in first or "conversations" in first or isinstance(first.get("prompt"), list)
        require_usable_tokenizer(tokenizer, needs_chat=chat)
