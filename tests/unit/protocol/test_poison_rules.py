"""The poisoned task set: what is refused, and how it is mixed."""

import numpy as np
import pytest

from holdfast.core.errors import DataError
from holdfast.data.examples import as_chat, make_example
from holdfast.data.tasks import poison_count, poisoned

TASK = [make_example(f"task prompt {i}", f"answer {i}") for i in range(100)]
POISON = [make_example(f"mild trick {i}", f"trick {i}") for i in range(100)]


@pytest.mark.parametrize(
    ("ratio", "size", "count"),
    [(0.05, 1000, 50), (0.1, 1000, 100), (0.25, 1000, 250), (0.5, 1000, 500), (0.29, 100, 29), (0.57, 100, 57),
     (0.9, 1000, 900), (0.0, 10, 0), (1, 10, 10), (0.999, 1, 0), (1e-5, 100_000, 1), (np.float64(0.29), 100, 29)],
    ids=str,
)  # fmt: skip
def test_counts(ratio, size, count):
    assert poison_count(ratio, size) == count


def test_seeds_give_other_choices_and_other_orders():
    first, second = (poisoned(TASK, POISON, size=40, ratio=0.5, seed=seed) for seed in (1, 2))
    assert {e.id for e in first} != {e.id for e in second}
    assert first == poisoned(TASK, POISON, size=40, ratio=0.5, seed=1)


def test_unsafe_and_task_examples_are_mixed_evenly():
    mixture = poisoned(TASK, POISON, size=100, ratio=0.5, seed=0)
    places = [place for place, example in enumerate(mixture) if example in POISON]
    assert 35 < np.mean(places) < 65
    assert places != list(range(50))


@pytest.mark.parametrize(
    ("ratio", "kind", "needed"), [(0.8, "poison", 120), (0.2, "task", 120)], ids=["poison", "task"]
)
def test_too_few_examples_are_named_by_kind(ratio, kind, needed):
    with pytest.raises(DataError, match=f"needs {needed} {kind} examples; there are 100 different"):
        poisoned(TASK, POISON, size=150, ratio=ratio, seed=0)


def test_repeated_examples_do_not_stand_for_different_ones():
    with pytest.raises(DataError, match="there are 2 different"):
        poisoned(TASK, POISON[:2] * 20, size=20, ratio=0.5, seed=0)


def test_an_example_of_both_kinds_is_refused_by_id():
    with pytest.raises(DataError, match=f"task and poison data at once: {TASK[0].id}"):
        poisoned(TASK, [*POISON, TASK[0]], size=20, ratio=0.5, seed=0)


def test_a_mixture_of_formats_becomes_one():
    mixture = poisoned([as_chat(example) for example in TASK], POISON, size=20, ratio=0.5, seed=0)
    assert {example.kind for example in mixture} == {"chat"}
