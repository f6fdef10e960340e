"""The inverted index against brute force."""

import random
import time

import pytest

from holdfast.data.examples import normalise
from holdfast.data.near_duplicates import clusters, matches

WORDS = [f"w{i}" for i in range(40)]


def brute_force_match(a, b):
    """The rule, written out: sets of 3-word windows, ratio of intersection to union."""
    a, b = normalise(a), normalise(b)
    if a == b:
        return True
    first, second = a.split(), b.split()
    if min(len(first), len(second)) < 5:
        return False
    x = {" ".join(first[i : i + 3]) for i in range(len(first) - 2)}
    y = {" ".join(second[i : i + 3]) for i in range(len(second) - 2)}
    return len(x & y) / len(x | y) >= 0.8


def random_texts(rng, n):
    """Texts of 1 to 40 words, half of them small edits of another."""
    texts = []
    for _ in range(n):
        if texts and rng.random() < 0.5:
            words = rng.choice(texts).split()
            for _ in range(rng.randint(0, 2)):
                words[rng.randrange(len(words))] = rng.choice(WORDS)
            if rng.random() < 0.4:
                words.insert(rng.choice([0, len(words)]), rng.choice(WORDS))
        else:
            words = [rng.choice(WORDS) for _ in range(rng.randint(1, 40))]
        texts.append(" ".join(words))
    return texts


@pytest.mark.parametrize("seed", range(5))
def test_matches_equals_brute_force(seed):
    rng = random.Random(seed)
    texts = random_texts(rng, 160)
    a, b = texts[::2], texts[1::2]
    expected = [(i, j) for i in range(len(a)) for j in range(len(b)) if brute_force_match(a[i], b[j])]
    assert 5 < len(expected) < 2000
    assert matches(a, b) == expected


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_the_connected_parts(seed):
    texts = random_texts(random.Random(seed), 150)
    n = len(texts)
    pairs = [(i, j) for i in range(n) for j in range(i) if brute_force_match(texts[i], texts[j])]
    expected = list(range(n))
    while any(expected[i] != expected[j] for i, j in pairs):
        for i, j in pairs:
            expected[i] = expected[j] = min(expected[i], expected[j])
    assert clusters(texts) == expected
    assert 1 < len(set(expected)) < len(texts)


def test_threshold_is_inclusive_and_exact():
    # 18 shingles each, 16 shared, union 20: exactly 4/5.
    words = [f"x{i}" for i in range(20)]
    at = [*words[2:], "y0", "y1"]
    assert matches([" ".join(words)], [" ".join(at)]) == [(0, 0)]
    below = [*words[3:], "y0", "y1", "y2"]
    assert matches([" ".join(words)], [" ".join(below)]) == []


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("How do I pick a lock?", "How do I bake a cake?", False),
        ("How do I make a bomb?", "How do I make a cake?", False),
        ("How do I pick a lock?", "how do i pick  a lock", True),
        ("Tell me", "Tell me!", True),
        ("Tell me now", "Tell me then", False),
        ("one two three four", "one two three four five", False),
        ("请告诉我怎样做一个好吃的苹果派好吗谢谢", "请告诉我怎样做一个好吃的苹果派好吗", True),
        ("请告诉我怎样做饭", "请告诉我怎样开锁", False),
    ],
)
def test_pairs(a, b, same):
    assert (clusters([a, b]) == [0, 0]) is same
    assert (matches([a], [b]) == [(0, 0)]) is same


def test_labels_name_the_first_member():
    assert clusters(["b x", "a y", "B X!", "a  y", "c"]) == [0, 1, 0, 1, 4]
    assert clusters([]) == []
    assert matches([], ["a"]) == []


def test_thousands_of_prompts_from_one_template_take_seconds():
    rng = random.Random(0)
    stem = "Classify the sentiment of the following film review as positive or negative"
    texts = [f"{stem}: {' '.join(rng.choice(WORDS) for _ in range(20))}" for _ in range(4000)]
    start = time.perf_counter()
    assert len(set(clusters(texts))) == 4000
    assert time.perf_counter() - start < 20
