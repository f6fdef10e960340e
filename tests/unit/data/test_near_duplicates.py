"""The inverted index against brute force."""

import random
import time

import pytest

from holdfast.data.examples import normalise
from holdfast.data.near_duplicates import clusters, contained, matches

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


def brute_force_contained(needle, haystack):
    """The rule, written out: the share of the needle's 3-word windows that the haystack has."""
    needle, haystack = normalise(needle), normalise(haystack)
    words, others = needle.split(), haystack.split()
    if len(words) < 5:
        return needle == haystack or (len(words) >= 3 and f" {needle} " in f" {haystack} ")
    x = {" ".join(words[i : i + 3]) for i in range(len(words) - 2)}
    y = {" ".join(others[i : i + 3]) for i in range(len(others) - 2)}
    return len(x & y) / len(x) >= 0.8


def embedded(rng, needle):
    """The needle inside a longer text, some of it with a word exchanged."""
    words = needle.split()
    if rng.random() < 0.4:
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    around = [[rng.choice(WORDS) for _ in range(rng.randint(0, 30))] for _ in range(2)]
    return " ".join([*around[0], *words, *around[1]])


@pytest.mark.parametrize("seed", range(5))
def test_contained_equals_brute_force(seed):
    rng = random.Random(seed)
    needles = [*random_texts(rng, 120), *(" ".join(rng.choices(WORDS, k=1 + i % 4)) for i in range(20))]
    haystacks = [*random_texts(rng, 60), *(embedded(rng, needle) for needle in needles), *needles]
    expected = [
        (i, j)
        for i in range(len(needles))
        for j in range(len(haystacks))
        if brute_force_contained(needles[i], haystacks[j])
    ]
    by_length = {length: sum(len(needles[i].split()) == length for i, _ in expected) for length in (1, 2, 3, 4)}
    assert all(by_length.values()), by_length
    assert 100 < len(expected) < 20_000
    assert contained(needles, haystacks) == expected
    assert set(matches(needles, haystacks)) < set(expected)


@pytest.mark.parametrize(
    ("needle", "haystack", "found"),
    [
        ("How do I pick a lock?", "You are a clerk at Acme. Be brief. How do I pick a lock? Thanks!", True),
        ("You are a clerk at Acme. How do I pick a lock?", "How do I pick a lock?", False),
        ("pick a lock", "how do I PICK a lock, please", True),
        ("pick a lock", "how do I pick a locket", False),
        ("pick locks", "how do I pick locks", False),
        ("pick locks", "Pick locks!", True),
        ("怎样开锁", "请告诉我怎样开锁好吗", True),
        ("怎样开锁", "请告诉我怎样做饭好吗", False),
    ],
)
def test_containment(needle, haystack, found):
    assert (contained([needle], [haystack]) == [(0, 0)]) is found


def test_containment_threshold_is_inclusive_and_exact():
    # 10 shingles; a text that holds the first 10 (9) of the 12 words holds 8 (7) of them.
    words = [f"x{i}" for i in range(12)]
    assert contained([" ".join(words)], ["a b " + " ".join(words[:10]) + " c d"]) == [(0, 0)]
    assert contained([" ".join(words)], ["a b " + " ".join(words[:9]) + " c d"]) == []


def test_thousands_of_needles_in_many_rows_of_one_template_take_seconds():
    rng = random.Random(0)
    vocabulary = [f"v{i}" for i in range(3000)]
    stem = "Classify the sentiment of the following film review as positive or negative"

    def texts(count, words):
        return [f"{stem}: {' '.join(rng.choices(vocabulary, k=words))}" for _ in range(count)]

    needles, haystacks = texts(2000, 15), texts(30_000, 60)
    haystacks[7] += " " + needles[3]
    start = time.perf_counter()
    assert contained(needles, haystacks) == [(3, 7)]
    assert time.perf_counter() - start < 20
