"""What holds for every split, whatever the examples."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.examples import make_example, prompt_text
from holdfast.data.near_duplicates import clusters
from holdfast.data.split_record import SplitRecord
from holdfast.data.splits import require_disjoint, split_examples

WORD = st.sampled_from([f"w{i}" for i in range(6)])
PROMPTS = st.one_of(
    st.lists(WORD, min_size=1, max_size=14).map(" ".join),
    st.text(st.characters(), min_size=1, max_size=12),  # every code point, lone surrogates too
)
EXAMPLES = st.lists(st.builds(make_example, PROMPTS, st.sampled_from(["yes", "no"])), min_size=3, max_size=60).filter(
    lambda examples: len(set(clusters([prompt_text(e) for e in examples]))) >= 3
)
FRACTIONS = st.sampled_from([(0.6, 0.2, 0.2), (0.4, 0.3, 0.3), (0.8, 0.0, 0.2), (0.98, 0.01, 0.01), (1.0, 0.0, 0.0)])
CHECKS = settings(max_examples=60, deadline=None)


@CHECKS
@given(EXAMPLES, FRACTIONS, st.integers(0, 5))
def test_roles_partition_the_distinct_examples(examples, fractions, seed):
    split = split_examples(examples, seed=seed, fractions=fractions)
    ids = Counter(e.id for role in split.roles.values() for e in role)
    assert set(ids) == {e.id for e in examples}
    assert set(ids.values()) == {1}
    assert split.record.duplicates_dropped == len(examples) - len(ids)


@CHECKS
@given(EXAMPLES, FRACTIONS, st.integers(0, 5))
def test_roles_share_no_prompt(examples, fractions, seed):
    split = split_examples(examples, seed=seed, fractions=fractions)
    require_disjoint(split)
    labels = dict(zip((e.id for e in examples), clusters([prompt_text(e) for e in examples]), strict=True))
    homes = {(labels[e.id], name) for name, role in split.roles.items() for e in role}
    assert len(homes) == len({label for label, _ in homes}) == split.record.n_clusters


@CHECKS
@given(EXAMPLES, FRACTIONS, st.integers(0, 5), st.randoms(use_true_random=False))
def test_row_order_does_not_matter(examples, fractions, seed, rng: random.Random):
    shuffled = list(examples)
    rng.shuffle(shuffled)
    first = split_examples(examples, seed=seed, fractions=fractions)
    assert split_examples(shuffled, seed=seed, fractions=fractions) == first


@CHECKS
@given(EXAMPLES, FRACTIONS, st.integers(0, 5))
def test_sizes_are_near_the_fractions_and_no_used_role_is_empty(examples, fractions, seed):
    split = split_examples(examples, seed=seed, fractions=fractions)
    distinct = {e.id: e for e in examples}
    n = len(distinct)
    largest = max(Counter(clusters([prompt_text(e) for e in distinct.values()])).values())
    for fraction, role in zip(fractions, split.roles.values(), strict=True):
        assert bool(role) is (fraction > 0)
        # Two roles may each be overfull by less than one cluster; rounding and the minimum move the aim by 2.
        assert abs(len(role) - fraction * n) < 2 * largest + 2


@CHECKS
@given(EXAMPLES, st.integers(0, 5))
def test_records_survive_json(examples, seed):
    record = split_examples(examples, seed=seed).record
    assert SplitRecord.from_json(record.to_json()) == record
