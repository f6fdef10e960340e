"""Generic refusals, and their tokens after any prompt.

A refusal of `GENERIC` fits every prompt, so that it can stand in for a reply that a model should prefer.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import takewhile

from holdfast.core.errors import DataError, UnsupportedError
from holdfast.core.hashing import sha256_json
from holdfast.core.library_types import Tokenizer
from holdfast.data.encode import IGNORE, Encoded, encode_all
from holdfast.data.examples import Example, as_chat, make_example

GENERIC: tuple[str, ...] = tuple(files("holdfast").joinpath("prompts", "refusals.txt").read_text("utf-8").splitlines())

# Prompts of different last characters: a tokenizer may join those with what a template puts behind them.
_PROMPTS = ("a", "Is it so?", "One (or 2)", "The end.", "Next:\n", "Say 'x'", "w0 w1")
_BEFORE = {" ": "Reply:", "": "Reply:\n"}
JOINED = 2  # tokens of blanks that may stand between a template's opening of a reply and the reply


def refused(example: Example, number: int) -> Example:
    """The example with refusal `number` (counted around the list) in the place of its reply.

    Blanks before a plain reply are kept: they belong to the way prompts are joined with replies.
    """
    refusal = GENERIC[number % len(GENERIC)]
    if example.kind == "text":
        raise DataError(f"{example.where}: no prompt to refuse", remedy="give prompt and completion, or messages")
    if isinstance(example.completion, str):
        blanks = example.completion[: len(example.completion) - len(example.completion.lstrip())]
        return replace(example, completion=blanks + refusal)
    return replace(example, completion=({"role": "assistant", "content": refusal},))


class RefusalTokens:
    """Token ids of every refusal as a reply to a prompt of which only the ids are known.

    A chat template renders a reply in the same way after every prompt, and a plain reply is a string put behind the
    prompt, so a reply's ids depend only on which of three forms the prompt has. It is conversational if it ends with
    what the template puts before a reply; otherwise plain, and the reply begins with a blank or not, like the row's
    own. Where a reply begins with blanks, a tokenizer may join them with the end of what the template puts there; a
    token of it may then be missing, or blanks may follow, and it is put right first.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.opening: list[int] = []
        self._without_blank: list[int] = []
        self._chat: list[tuple[int, ...]] = []
        if tokenizer.chat_template:
            self.opening = self._common_opening()
            if tokenizer.decode(self.opening[-1:])[-1:].isspace() and tokenizer.decode(self.opening[:-1]).strip():
                self._without_blank = self.opening[:-1]
            self._chat = [reply for _, reply in self._split([as_chat(make_example("a", text)) for text in GENERIC])]
        self._plain = {
            blank: [reply for _, reply in self._split([make_example(before, blank + text) for text in GENERIC])]
            for blank, before in (_BEFORE.items() if tokenizer.eos_token else ())
        }

    def _split(self, examples: Sequence[Example]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        rows = encode_all(examples, self.tokenizer, max_length=None, role="safety").examples
        starts = [row.labels.count(IGNORE) for row in rows]
        return [(row.input_ids[:start], row.input_ids[start:]) for row, start in zip(rows, starts, strict=True)]

    def _common_opening(self) -> list[int]:
        rendered = self._split([as_chat(make_example(prompt, GENERIC[0])) for prompt in _PROMPTS])
        if len({reply for _, reply in rendered}) > 1:
            raise UnsupportedError(
                "a chat template that renders the same reply differently after different prompts",
                remedy="use another template (template: alpaca), or plain prompts and completions",
            )
        backwards = zip(*(reversed(prompt) for prompt, _ in rendered), strict=False)
        same = len(list(takewhile(lambda tokens: len(set(tokens)) == 1, backwards)))
        return list(rendered[0][0][len(rendered[0][0]) - same :])

    def after(self, prompt: Sequence[int], first: int, max_length: int | None) -> Encoded:
        """The prompt with its refusal, fixed by the sha256 of the prompt's ids; `first` begins the row's own reply."""
        number = int(sha256_json(list(prompt)), 16) % len(GENERIC)
        if (settled := self._conversation(prompt)) is not None:
            prompt, ids = settled, self._chat[number]
        else:
            before, behind = (
                self.tokenizer.decode(own, clean_up_tokenization_spaces=False) for own in (prompt, [*prompt, first])
            )
            ids = self._plain[" " if behind[len(before) :].startswith(" ") else ""][number]
        full = (*prompt, *ids)
        # An opening that was put right may fill `max_length`; one token must be scored all the same.
        start = len(prompt) if max_length is None else min(len(prompt), max_length - 1)
        labels = (*[IGNORE] * start, *full[start:])
        return Encoded("", full[:max_length], labels[:max_length], len(full[:max_length]) < len(full))

    def _conversation(self, prompt: Sequence[int]) -> Sequence[int] | None:
        """The prompt with the template's opening of a reply at its end; None if it is plain."""
        if not self._chat or not self.opening:
            return None if self._plain else prompt
        for end in range(len(prompt), max(len(prompt) - JOINED, 0) - 1, -1):
            if self.tokenizer.decode(prompt[end:]).strip():
                break
            for opening in (self.opening, self._without_blank):
                start = end - len(opening)
                if opening and start >= 0 and list(prompt[start:end]) == opening:
                    return (*prompt[:start], *self.opening)
        return None if self._plain else prompt
