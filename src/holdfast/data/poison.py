"""The attack: a share of the task data replaced by unsafe pairs."""

from collections.abc import Sequence
from decimal import Decimal

from holdfast.core.errors import DataError
from holdfast.core.seeding import generator
from holdfast.data.examples import Example, uniform


def poison_count(ratio: float, size: int) -> int:
    """floor(p N), with p the decimal that the user wrote: 0.29 of 100 is 29, though 0.29 * 100 < 29 in binary."""
    numerator, denominator = Decimal(str(ratio)).as_integer_ratio()
    return numerator * size // denominator


def poisoned(
    task: Sequence[Example], poison: Sequence[Example], *, size: int, ratio: float, seed: int
) -> list[Example]:
    """floor(p N) unsafe and N - floor(p N) task examples, shuffled; N is `size`, p is `ratio`.

    Which ones are taken depends on their ids and the seed, not on their order; for one seed the unsafe examples of a
    smaller ratio are among those of a larger one, and the task examples of a larger among those of a smaller. Examples
    with equal id count once, so that N examples are N different ones and a trainer that drops repeated rows drops none.
    """
    unsafe = poison_count(ratio, size)
    if shared := {example.id for example in task} & {example.id for example in poison}:
        what = f"{len(shared)} examples are task and poison data at once: {', '.join(sorted(shared)[:20])}"
        raise DataError(what, remedy="remove them from the task data: their share could not be counted")
    chosen = [*_first(poison, unsafe, seed, "poison"), *_first(task, size - unsafe, seed, "task")]
    order = generator(seed, "mixture").permutation(len(chosen))
    return uniform(chosen[place] for place in order)


def _first(examples: Sequence[Example], n: int, seed: int, name: str) -> list[Example]:
    distinct = {example.id: example for example in reversed(examples)}
    ids = sorted(distinct)
    if len(ids) < n:
        raise DataError(
            f"the poisoned set needs {n} {name} examples; there are {len(ids)} different ones",
            remedy=f"give more {name} examples (of poison: roles.poison), or ask for a smaller set (size)",
        )
    order = generator(seed, name).permutation(len(ids))
    return [distinct[ids[place]] for place in order[:n]]
