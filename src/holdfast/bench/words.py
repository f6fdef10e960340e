"""Rows of random words with exact token lengths, and the tokenizer that reads them: nothing to download, no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.bench.lengths import Pair
from holdfast.core.seeding import generator

SPECIAL = ("<unk>", "<pad>", "<eos>")
WORDS = 500
"""Below every shape's vocabulary; its ids are 3 to 502."""


def word_tokenizer() -> Any:
    """One word is one token; plain text alone, without a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  (a token of text)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"  # noqa: S106
    )  # fmt: skip


def rows(pairs: Sequence[Pair], *, seed: int, name: str) -> list[dict[str, str]]:
    """A prompt/completion row for each pair, with exactly these token counts once EOS is added to the completion.

    Args:
        pairs: prompt and completion tokens, at least 1 and 2: the last token of a completion is EOS.
        seed: of the run.
        name: rows of different names share no prompt, except by an accident of random words.
    """
    draw = generator(seed, "bench rows", name)

    def text(n: int) -> str:
        return " ".join(f"w{i}" for i in draw.integers(0, WORDS, n))

    return [{"prompt": f"{text(prompt)} ", "completion": text(reply - 1)} for prompt, reply in pairs]
