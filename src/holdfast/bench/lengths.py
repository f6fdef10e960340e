"""How long real rows are: pairs of prompt and reply tokens, drawn from the distributions in `lengths.json`.

`benchmarks/lengths.py` wrote that file: SST-2, AG News, GSM8K and BeaverTails' safe and unsafe pairs in SmolLM2's chat
template and tokenizer; numbers only.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from holdfast.core.seeding import generator

Pair = tuple[int, int]
POISON_SHARE = 0.5


@cache
def stored() -> dict[str, list[Pair]]:
    """(prompt tokens, reply tokens) by data set: the tasks, `safe` and `unsafe`."""
    found = json.loads(files("holdfast.bench").joinpath("lengths.json").read_text(encoding="utf-8"))
    return {name: [(int(a), int(b)) for a, b in pairs] for name, pairs in found["pairs"].items()}


def task_pairs(task: str, n: int, *, seed: int, length: int | None = None) -> list[Pair]:
    """n rows of a task of which half are unsafe pairs, in random order.

    Args:
        length: tokens of every row, half of them the prompt's, instead of the stored lengths.
    """
    if length is not None:
        return [_halves(length)] * n
    poison = int(POISON_SHARE * n)
    mixed = [*_drawn("unsafe", poison, seed), *_drawn(task, n - poison, seed)]
    return [mixed[i] for i in generator(seed, "bench mixture").permutation(n)]


def safety_pairs(n: int, *, seed: int, length: int | None = None) -> list[Pair]:
    """n safe pairs; `length` as for the task."""
    return [_halves(length)] * n if length is not None else _drawn("safe", n, seed)


def _halves(length: int) -> Pair:
    return length // 2, length - length // 2


def _drawn(name: str, n: int, seed: int) -> list[Pair]:
    """n pairs of a data set in random order, each once before any is used twice."""
    pairs = stored()[name]
    order = generator(seed, "bench", name).permutation(len(pairs))
    return [pairs[order[i % len(pairs)]] for i in range(n)]
