"""The prompts on which harm is measured, without drawing the other roles."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.seeding import generator
from holdfast.data.examples import Example
from holdfast.protocol.pools import read_prompts
from holdfast.protocol.roles import HarmPrompts


def evaluation_prompts(
    source: HarmPrompts, n: int, *, seed: int = 42, folder: Path | None = None
) -> tuple[Example, ...]:
    """The evaluation role of `draw_roles` with these settings: it is drawn first, so the others do not change it.

    Only this role is kept apart from what a run trains on. The prompts that another seed, another source or a larger n
    adds may be in the run's poison (harm looks larger) or among those it learned to refuse (harm looks smaller).

    Raises:
        ConfigError: n is under 1.
        DataError: the source has fewer prompts.
    """
    if n < 1:
        raise ConfigError(f"{n} evaluation prompts are asked for; expected at least 1", remedy="for example 700")
    pool = read_prompts(source, folder=folder)
    if len(pool) < n:
        raise DataError(f"{n} prompts of {source} are asked for, there are {len(pool)}", remedy="ask for fewer")
    return tuple(pool[place] for place in generator(seed, "evaluation").permutation(len(pool))[:n])
