"""Which examples run together: sorted by length, as many as a budget of padded tokens allows."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from holdfast.core.errors import ResourceError
from holdfast.core.seeding import generator
from holdfast.models.library_errors import free_memory, out_of_memory
from holdfast.scoring.head import TOKEN_CHUNK, causal_lm

CPU_TOKENS = 4096
FEWEST_TOKENS, MOST_TOKENS = 512, 131072  # at most: fewer batches are fewer launches, which a small model waits for
_SHARE = 0.5  # of the free memory; the rest is for what the estimate does not know


def batches(lengths: Sequence[int], budget: int, *, even: bool = True) -> list[list[int]]:
    """Positions in batches with rows * longest <= budget, the longest first; a longer example is alone.

    The longest first: what does not fit in memory shows at the start. `even`: as few batches as the budget allows, by
    the smallest budget that gives no more of them; a last batch of a few rows takes as long to launch as a full one.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def starts(budget: int) -> list[int]:
        found, start = [], 0
        while start < len(order):
            found.append(start)
            start += max(1, budget // lengths[order[start]])
        return found

    if even and order:
        most = len(starts(budget))
        budget = bisect_left(range(budget), -most, key=lambda smaller: -len(starts(smaller)))
    return [order[start:stop] for start, stop in pairwise([*starts(budget), len(order)])]


def shuffled_batches(lengths: Sequence[int], budget: int, seed: int) -> list[list[int]]:
    """Another composition: random neighbours, so other padding and other shapes."""
    found: list[list[int]] = []
    widest = 0
    for position in generator(seed, "batch composition").permutation(len(lengths)).tolist():
        if not found or (len(found[-1]) + 1) * max(widest, lengths[position]) > budget:
            found.append([])
            widest = 0
        widest = max(widest, lengths[position])
        found[-1].append(position)
    return found


def token_budget(model: Any, device: torch.device) -> int:
    """Padded tokens a batch: a fixed number on a CPU; on a GPU from the free memory and the model's widths.

    A forward pass without gradients holds, per token, a few vectors of the hidden width and of the MLP's width; the
    head adds its float32 log-probabilities for `TOKEN_CHUNK` tokens at a time.
    """
    if device.type != "cuda":
        return CPU_TOKENS
    config = causal_lm(model).config.get_text_config()
    width = int(getattr(config, "hidden_size", 4096))
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    place = torch.cuda.current_device() if device.index is None else device.index
    unused, total = torch.cuda.mem_get_info(place)
    share = total * torch.cuda.get_per_process_memory_fraction(place)  # what this process may take of the device
    free = min(unused + torch.cuda.memory_reserved(place), share) - torch.cuda.memory_allocated(place)
    head, per_token = 6 * 4 * TOKEN_CHUNK * int(config.vocab_size), 4 * (16 * width + 4 * inner)
    return max(FEWEST_TOKENS, min(MOST_TOKENS, int((_SHARE * free - head) / per_token)))


def smaller_budget(error: RuntimeError, budget: int, *, rows: int) -> int:
    """Half the budget after running out of memory with a batch of `rows`; any other error is raised again."""
    if not out_of_memory(error):
        raise error
    if rows == 1:
        raise ResourceError(
            "out of memory with a single example in the batch",
            remedy="lower max_length, load in bfloat16, or use a larger device",
        ) from error
    free_memory()
    return budget // 2
