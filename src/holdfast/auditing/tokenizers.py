"""Which tokenizer reads the data for which model.

Degradations compare the two models on the same tokens. Where their tokenizers differ, that is a choice to be made and
recorded, or the comparison shrinks to the one unit that does not count tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from holdfast.auditing.model_ref import ModelRef
from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.core.registry import nearest
from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.models.handle import load_tokenizer

Choice = Literal["same", "before", "after", "own"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizer of each side; one object for both unless each has its own.

    Attributes:
        choice: how they were chosen.
    """

    before: Any
    after: Any
    choice: Choice

    @property
    def own(self) -> bool:
        """Whether the two sides read different tokens."""
        return self.before is not self.after

    def of(self, name: str) -> Any:
        """The tokenizer that `before` or `after` reads."""
        return self.before if name == "before" else self.after

    def require_unit(self, unit: str) -> None:
        """Refuse a unit that two tokenizers leave undefined."""
        if self.own and unit != "nll_sum":
            raise UnsupportedError(
                f"unit {unit!r} is not defined across tokenizers: it is counted in tokens",
                remedy="use unit nll_sum, or read both models with one tokenizer (tokenizer: before or after)",
            )

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Hash of what turns text into ids; with two tokenizers, both hashes joined by `+`."""
        return self._joined(tokenizer_sha256)

    @cached_property
    def template_sha256(self) -> str:
        """Hash of the chat template; with two tokenizers, both hashes joined by `+`."""
        return self._joined(template_sha256)

    def _joined(self, digest: Callable[[Any], str]) -> str:
        return "+".join(digest(tokenizer) for tokenizer in ((self.before, self.after) if self.own else (self.before,)))


def choose_tokenizers(
    before: ModelRef, after: ModelRef, choice: Choice, *, processing_class: Any = None, trust_remote_code: bool = False
) -> Tokenizers:
    """Load the tokenizers that the choice needs.

    Args:
        choice: `same` demands equal tokenizers and templates; `before` and `after` use that side's for both; `own`
            gives each model its own.
        processing_class: the tokenizer of models in memory; for both sides where both are.

    Raises:
        CheckpointError: `same`, and they differ.
        ConfigError: an unknown choice, or a model in memory without a tokenizer.
    """
    if not isinstance(choice, str):
        raise ConfigError(
            f"tokenizer is a {type(choice).__name__}, expected one of {', '.join(CHOICES)}",
            remedy="pass a tokenizer as processing_class=; tokenizer= says whose is used",
        )
    if choice not in CHOICES:
        raise ConfigError(f"tokenizer {choice!r} is not a choice", remedy=nearest(str(choice), list(CHOICES)))

    def load(side: ModelRef) -> Any:
        if side.loaded is None:
            return load_tokenizer(side.ref, revision=side.revision, trust_remote_code=trust_remote_code)
        if processing_class is None:
            raise ConfigError(
                f"{side.ref}: a model in memory comes without a tokenizer", remedy="pass it as processing_class="
            )
        return processing_class

    if choice in ("before", "after"):
        chosen = load(before if choice == "before" else after)
        return Tokenizers(chosen, chosen, choice)
    first, second = load(before), load(after)
    digests = {"tokenizers": tokenizer_sha256, "chat templates": template_sha256}
    differing = [name for name, digest in digests.items() if digest(first) != digest(second)]
    if differing and choice == "same":
        raise CheckpointError(
            f"before and after have different {' and '.join(differing)}: degradations would compare other tokens",
            remedy="choose the one to read the data with (tokenizer: before or after), or own with unit nll_sum",
        )
    return Tokenizers(first, second if differing else first, choice)
