"""What holds for every poisoned set: exact counts, nested choices, nothing repeated."""

import random
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.data.examples import make_example
from holdfast.data.tasks import poison_count, poisoned

TASK = [make_example(f"task prompt {i}", f"answer {i}") for i in range(60)]
POISON = [make_example(f"mild trick {i}", f"trick {i}") for i in range(60)]
TASK_IDS, POISON_IDS = {e.id for e in TASK}, {e.id for e in POISON}
CHECKS = settings(max_examples=100, deadline=None)


@st.composite
def written(draw):
    """A ratio as a user writes it, with its exact value."""
    digits = draw(st.integers(1, 6))
    number = draw(st.integers(0, 10**digits))
    return f"{number / 10**digits:.{digits}f}", Fraction(number, 10**digits)


@settings(max_examples=500, deadline=None)
@given(written(), st.integers(1, 100_000))
@example(("0.29", Fraction(29, 100)), 100)
@example(("0.9", Fraction(9, 10)), 1000)
@example(("0.07", Fraction(7, 100)), 100)
def test_the_count_is_the_floor_of_the_exact_product(ratio, size):
    text, exact = ratio
    assert poison_count(float(text), size) == exact.numerator * size // exact.denominator


def test_every_ratio_of_three_decimals_and_every_small_size_is_exact():
    for thousandths in range(1001):
        for size in (1, 7, 10, 64, 100, 999, 1000):
            count = poison_count(thousandths / 1000, size)
            assert count == thousandths * size // 1000
            assert poison_count(float(f"{thousandths}e-3"), size) == count


def split(mixture):
    return {e.id for e in mixture} & POISON_IDS, {e.id for e in mixture} & TASK_IDS


@CHECKS
@given(st.integers(0, 100), st.integers(1, 60), st.integers(0, 9))
def test_a_mixture_has_exactly_floor_pn_unsafe_examples(hundredths, size, seed):
    mixture = poisoned(TASK, POISON, size=size, ratio=hundredths / 100, seed=seed)
    unsafe, clean = split(mixture)
    assert len(mixture) == size == len({e.id for e in mixture})
    assert len(unsafe) == hundredths * size // 100
    assert len(clean) == size - len(unsafe)


@CHECKS
@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 60), st.integers(0, 9))
def test_the_choices_of_two_ratios_are_nested(first, second, size, seed):
    low, high = sorted((first, second))
    fewer = split(poisoned(TASK, POISON, size=size, ratio=low / 100, seed=seed))
    more = split(poisoned(TASK, POISON, size=size, ratio=high / 100, seed=seed))
    assert fewer[0] <= more[0]
    assert more[1] <= fewer[1]


@CHECKS
@given(st.integers(0, 100), st.integers(1, 60), st.integers(0, 9), st.randoms(use_true_random=False))
def test_the_order_and_repetition_of_the_input_do_not_matter(hundredths, size, seed, rng: random.Random):
    task, poison = [*TASK, *TASK[:20]], [*POISON[:9], *POISON]
    rng.shuffle(task)
    rng.shuffle(poison)
    mixture = poisoned(task, poison, size=size, ratio=hundredths / 100, seed=seed)
    assert mixture == poisoned(TASK, POISON, size=size, ratio=hundredths / 100, seed=seed)
