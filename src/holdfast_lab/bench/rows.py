"""The rows of a benchmark: random words with the token lengths of real rows, and the tokenizer that reads them.

Lengths are drawn from `lengths.json`, which `benchmarks/lengths.py` wrote: SST-2, AG News, GSM8K and BeaverTails' safe
and unsafe pairs in SmolLM2's chat template and tokenizer; numbers only. Nothing is downloaded, and there is no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from holdfast.core.seeding import generator

Pair = tuple[int, int]
POISON_SHARE = 0.5
SPECIAL = ("<unk>", "<pad>", "<eos>")
WORDS = 500  # below every shape's vocabulary; its ids are 3 to 502


@cache
def stored() -> dict[str, list[Pair]]:
    """(prompt tokens, reply tokens) by data set: the tasks, `safe` and `unsafe`."""
    found = json.loads(files("holdfast_lab.bench").joinpath("lengths.json").read_text(encoding="utf-8"))
    return {name: [(int(a), int(b)) for a, b in pairs] for name, pairs in found["pairs"].items()}


def task_pairs(task: str, n: int, *, seed: int, length: int | None = None) -> list[Pair]:
    """n rows of a task, half of them unsafe pairs, in random order; `length`: of all rows, half of it the prompt's."""
    if length is not None:
        return [(length // 2, length - length // 2)] * n
    poison = int(POISON_SHARE * n)
    mixed = [*_drawn("unsafe", poison, seed), *_drawn(task, n - poison, seed)]
    return [mixed[i] for i in generator(seed, "bench mixture").permutation(n)]


def safety_pairs(n: int, *, seed: int, length: int | None = None) -> list[Pair]:
    """n safe pairs; `length` as for the task."""
    return [(length // 2, length - length // 2)] * n if length is not None else _drawn("safe", n, seed)


def _drawn(name: str, n: int, seed: int) -> list[Pair]:
    pairs = stored()[name]
    order = generator(seed, "bench", name).permutation(len(pairs))
    return [pairs[order[i % len(pairs)]] for i in range(n)]


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

    Counts are at least 1 and 2. Rows of different names share no prompt, except by an accident of random words.
    """
    draw = generator(seed, "bench rows", name)

    def text(n: int) -> str:
        return " ".join(f"w{i}" for i in draw.integers(0, WORDS, n))

    return [{"prompt": f"{text(prompt)} ", "completion": text(reply - 1)} for prompt, reply in pairs]
