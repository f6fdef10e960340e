"""Which rows are asked for where there are more than `max_prompts` questions: a proportional stratified sample.

Strata: the row's category, its number of turns, and the power of two of its prompt's length. Within a stratum of n
rows, rows are ordered by a seeded hash, and the r-th gets the quantile (r + 1/2) / n. Rows are taken by quantile over
all strata, so that every prefix of the order is a stratified sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from holdfast.core.hashing import sha256_text
from holdfast.data.examples import Example, prompt_text
from holdfast.screening.questions import Key, prompt_key, questions_of


def asked_rows(rows: Sequence[Example], *, max_prompts: int, seed: int) -> list[int]:
    """Numbers of the rows to ask for, in their own order: all, or a stratified sample of `max_prompts` questions."""
    chosen: list[int] = []
    seen: set[Key] = set()
    for number in stratified_order(rows, seed=seed) if _many(rows, max_prompts) else range(len(rows)):
        new = {prompt_key(asked.prompt) for asked in questions_of(rows[number])} - seen
        if len(seen) + len(new) > max_prompts:
            break
        seen |= new
        chosen.append(number)
    return sorted(chosen)


def stratified_order(rows: Sequence[Example], *, seed: int) -> list[int]:
    """Every row number, by its quantile within its stratum."""
    strata: dict[tuple[str, int, int], list[tuple[str, int]]] = defaultdict(list)
    for number, row in enumerate(rows):
        turns = 1 if isinstance(row.prompt, str) else len(row.prompt)
        stratum = (row.category or "", turns, len(prompt_text(row)).bit_length())
        strata[stratum].append((sha256_text(f"{seed} {row.id} {number}")[:16], number))
    placed: list[tuple[float, str, int]] = []
    for members in strata.values():
        members.sort()
        placed += [((rank + 0.5) / len(members), key, number) for rank, (key, number) in enumerate(members)]
    return [number for _, _, number in sorted(placed)]


def _many(rows: Sequence[Example], max_prompts: int) -> bool:
    """Whether the rows ask more than `max_prompts` distinct questions; stops counting there."""
    seen: set[Key] = set()
    for row in rows:
        seen.update(prompt_key(asked.prompt) for asked in questions_of(row))
        if len(seen) > max_prompts:
            return True
    return False
