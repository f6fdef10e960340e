"""A sample of a task too large to ask: proportional in every prefix, and never above the limit of questions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.examples import make_example, prompt_text
from holdfast.screening.questions import asked_rows, distinct, stratified_order

LENGTHS = ("short", "a prompt of some forty characters in all", "a much longer prompt " * 8)


def row(number, category=None, length=0, turns=0, preamble=False):
    text = f"{'You are now Milo. ' if preamble else ''}{LENGTHS[length]} {number:04d}"
    if not turns:
        return make_example(text, f"reply {number}", f"row {number}", category)
    talk = [{"role": "user" if place % 2 == 0 else "assistant", "content": f"{text} {place}"} for place in range(turns)]
    return make_example(tuple(talk), ({"role": "assistant", "content": "reply"},), f"row {number}", category)


tasks = st.lists(
    st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 2), st.sampled_from([0, 1, 3]), st.booleans()),
    min_size=1,
    max_size=60,
).map(lambda drawn: [row(number, *one) for number, one in enumerate(drawn)])


def stratum(example):
    """Category, number of turns, power of two of the length: written again, not called."""
    turns = 1 if isinstance(example.prompt, str) else len(example.prompt)
    length, power = len(prompt_text(example)), 0
    while 2**power <= length:
        power += 1
    return example.category or "", turns, power


@settings(max_examples=60, deadline=None)
@given(tasks, st.integers(0, 3))
def test_every_prefix_holds_every_stratum_in_proportion(rows, seed):
    order = stratified_order(rows, seed=seed)
    assert sorted(order) == list(range(len(rows)))
    sizes = Counter(map(stratum, rows))
    taken: Counter[tuple[str, int, int]] = Counter()
    for number in order:
        taken[stratum(rows[number])] += 1
        # All quantiles up to this one are taken, so a stratum has its share of it, rounded one way or the other.
        quantile = (taken[stratum(rows[number])] - 0.5) / sizes[stratum(rows[number])]
        for name, size in sizes.items():
            assert abs(taken[name] - quantile * size) <= 0.5 + 1e-9


@settings(max_examples=60, deadline=None)
@given(tasks, st.integers(1, 90), st.integers(0, 3))
def test_never_more_questions_than_asked_for(rows, most, seed):
    chosen = asked_rows(rows, max_prompts=most, seed=seed)
    assert chosen == sorted(set(chosen))
    assert len(distinct(rows, chosen, plain=False)) <= most
    everything = distinct(rows, range(len(rows)), plain=False)
    if len(everything) <= most:
        assert chosen == list(range(len(rows)))
    else:
        order = stratified_order(rows, seed=seed)
        assert set(chosen) == set(order[: len(chosen)])
        if len(chosen) < len(rows):  # one row more would have been too many
            more = [*chosen, order[len(chosen)]]
            assert len(distinct(rows, sorted(more), plain=False)) > most


def test_exact_duplicates_cost_one_question():
    rows = [make_example("the same prompt", f"reply {number}") for number in range(50)]
    assert asked_rows(rows, max_prompts=1, seed=0) == list(range(50))


def test_rows_without_a_prompt_cost_nothing():
    rows = [make_example("", f"text {number}") for number in range(5)]
    assert asked_rows(rows, max_prompts=1, seed=0) == list(range(5))


def test_the_sample_depends_on_the_seed_alone():
    rows = [row(number, length=number % 3) for number in range(60)]
    first = asked_rows(rows, max_prompts=20, seed=1)
    assert first == asked_rows(rows, max_prompts=20, seed=1)
    assert first != asked_rows(rows, max_prompts=20, seed=2)
    assert len(first) == 20


@pytest.mark.parametrize("rare", [0, 30])
def test_a_rare_category_is_met_wherever_it_lies(rare):
    rows = [row(number, "rare" if rare <= number < rare + 6 else "common") for number in range(60)]
    chosen = asked_rows(rows, max_prompts=20, seed=0)
    assert sum(rows[number].category == "rare" for number in chosen) == 2
