"""The prompts on which harm is measured, without drawing the other roles."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import DataError
from holdfast.core.seeding import generator
from holdfast.data.examples import Example
from holdfast.protocol.pools import read_prompts
from holdfast.protocol.roles import HarmPrompts


def evaluation_prompts(
    source: HarmPrompts, n: int, *, seed: int = 42, folder: Path | None = None
) -> tuple[Example, ...]:
    """The evaluation role of `draw_roles` with these settings: it is drawn first, so the others do not change it.

    Raises:
        DataError: the source has fewer prompts.
    """
    pool = read_prompts(source, folder=folder)
    if len(pool) < n:
        raise DataError(f"{n} prompts of {source} are asked for, there are {len(pool)}", remedy="ask for fewer")
    return tuple(pool[place] for place in generator(seed, "evaluation").permutation(len(pool))[:n])
