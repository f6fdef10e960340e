"""Groups of prompts that must stay in one role."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.data.containment import contained
from holdfast.data.examples import normalise

GROUP_RULE = "one prompt holds 4/5 of the word 3-shingles of the other; whole words under 5 words, exact under 3"


def groups(texts: Sequence[str]) -> list[int]:
    """A label for each text: equal for texts that a chain of matches connects.

    Two texts match when one occurs in the other, |A and B| / |A| >= 4/5 on word 3-shingles, as near-duplicates do: a
    certify prompt inside a longer poison prompt would be trained on. So prompts of different groups match in no way,
    and which texts are together does not depend on the order of `texts`.
    """
    plain = [normalise(text) for text in texts]
    unique = sorted(set(plain))
    parent = list(range(len(unique)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for needle, haystack in contained(unique, unique, ignore_common=False):
        low, high = sorted((root(needle), root(haystack)))
        parent[high] = low
    label = {text: root(number) for number, text in enumerate(unique)}
    return [label[text] for text in plain]
