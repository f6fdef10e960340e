"""transformers' own `generate`: every model it knows, one batch after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.data.examples import Example
from holdfast.data.templates import Template
from holdfast.judging.engines import BATCH_SIZE, ENGINES, require_model
from holdfast.judging.generation import batches
from holdfast.judging.reply import Reply


@ENGINES.register("transformers")
@dataclass(frozen=True, kw_only=True)
class TransformersEngine:
    """See `holdfast.judging.generation.generate`."""

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    batch_size: int = BATCH_SIZE
    template: Template = "chat"
    name: str = field(default="transformers", init=False)

    def __post_init__(self) -> None:
        require_model(self.name, self.model, self.tokenizer)

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        """Replies batch by batch, shortest prompts first."""
        for batch in batches(
            self.model, self.tokenizer, examples,
            max_new_tokens=max_new_tokens, batch_size=self.batch_size, template=self.template,
        ):  # fmt: skip
            yield list(batch.values())
