"""Jailbreak templates: prompts with one long prefix are told apart by their tails (B9)."""

from __future__ import annotations

import random

import pytest

from holdfast.data.examples import make_example
from holdfast.data.near_duplicates import clusters
from holdfast.data.splits import require_unseen, split_examples

PREFIX = " ".join(f"p{i}" for i in range(60))


def tails(n: int, words: int, *, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(f"t{draw.randrange(5000)}" for _ in range(words)) for _ in range(n)]


def test_unlike_tails_of_one_prefix_are_not_one_group():
    """B9: the prefix dominated the ratio, so that all prompts of a jailbreak template were one group."""
    examples = [make_example(f"{PREFIX} {tail}", "no") for tail in tails(300, 5)]
    assert len(set(clusters([str(example.prompt) for example in examples]))) == 300
    split = split_examples(examples, seed=0)
    assert split.record.n_clusters == 300
    require_unseen(split.certify, [str(example.prompt) for example in split.constraint])


def test_a_constant_prefix_does_not_hide_a_leak():
    """B9: certify prompts that all begin with one system prompt were not found in the training data."""
    plain = tails(60, 12)
    certify = [make_example(f"{PREFIX} {tail}", "no") for tail in plain]
    with pytest.raises(ValueError, match="3 of 60 certify prompts occur in the task data"):
        require_unseen(certify, [*tails(500, 13, seed=1), *plain[7:10]])
