"""A model in the place of theta_0 that refuses prompts with the word "xyzzy", and says nothing to "qwux" ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.data.examples import Example, make_example, prompt_text
from holdfast.judging.reply import Reply
from holdfast.screening.asking import Asker

REFUSAL = "I'm sorry, but I can't help with that."
ANSWER = "Sure, here is one idea that you could try out in your kitchen today, step by step."


@dataclass
class Refusing:
    """Counts what it is asked; `plugh` prompts refuse at first and give in when the reply is long."""

    name: str = "refusing"
    asked: list[tuple[str, int]] = field(default_factory=list)
    stop_after: int | None = None

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        for example in examples:
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append((example.id, max_new_tokens))
            cut = "plugh" in prompt_text(example) and max_new_tokens <= 200
            yield [Reply(example.id, self.reply(prompt_text(example), max_new_tokens), truncated=cut, tokens=9)]

    @staticmethod
    def reply(prompt: str, tokens: int) -> str:
        if "qwux" in prompt:
            return ""
        if "plugh" in prompt and tokens > 200:
            return f"{REFUSAL} However, here is how you can do it: first, you take the lid off."
        return REFUSAL if "xyzzy" in prompt or "plugh" in prompt else ANSWER


def asker(folder: Path, engine: Refusing | None = None) -> Asker:
    return Asker(engine or Refusing(), {"model_sha256": "0" * 64}, folder)


WORDS = [f"word{number}" for number in range(16)]


def row(number: int, word: str = "", *, target: str = ANSWER) -> Example:
    """A row whose prompt is like no other's."""
    own = [WORDS[(number // 16**place) % 16] + str(number * 7 + place) for place in range(6)]
    turns = ({"role": "user", "content": " ".join([word, *own]).strip()},)
    return make_example(turns, ({"role": "assistant", "content": target},), f"task.jsonl:{number + 1}")
