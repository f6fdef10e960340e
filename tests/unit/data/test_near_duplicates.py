"""Near-duplicates and leak search against the rule, written out for every pair."""

import random
from collections import Counter
from functools import cache

import pytest

from holdfast.data import near_duplicates, shingles
from holdfast.data.examples import normalise
from holdfast.data.near_duplicates import clusters, contained, matches, occurring

WORDS = [f"w{i}" for i in range(40)]


class Rule:
    """The rule of the docstrings, pair by pair, in a collection of texts without scripts that have no spaces."""

    def __init__(self, collection):
        unique = set(map(normalise, collection))
        long = [text for text in unique if len(text.split()) >= 5]
        counts = Counter(shingle for text in long for shingle in set(self.windows(text)))
        self.common = {shingle for shingle, n in counts.items() if n > 10 and n > len(unique) // 100}
        self.core = cache(self._core)

    @staticmethod
    @cache
    def windows(text):
        words = text.split()
        return [tuple(words[i : i + 3]) for i in range(len(words) - 2)]

    def _core(self, text):
        windows = self.windows(text)
        places = {i for i, one in enumerate(windows) if one in self.common}
        return {one for i, one in enumerate(windows) if not places & {i - 2, i - 1, i, i + 1, i + 2}}

    def match(self, a, b):
        """Of normalised texts."""
        if a == b:
            return True
        if min(len(self.windows(a)), len(self.windows(b))) < 3:
            return False
        x, y = set(self.windows(a)), set(self.windows(b))
        if max(len(self.core(a)), len(self.core(b))) < 3:
            return 5 * len(x & y) >= 4 * len(x | y)
        tried = [(x - self.common, y - self.common), (self.core(a), self.core(b))]
        return any(5 * len(x & y) >= 4 * len(x | y) for x, y in tried)

    def contains(self, needle, haystack):
        """Of normalised texts."""
        if len(needle.split()) < 5:
            return needle == haystack or (len(needle.split()) >= 3 and f" {needle} " in f" {haystack} ")
        every, core, held = set(self.windows(needle)), self.core(needle), set(self.windows(haystack))
        wanted = [core, every - self.common] if len(core) >= 3 else [every]
        return any(5 * len(one & held) >= 4 * len(one) for one in wanted)


def templates(rng, n):
    """Texts with prefixes and templates in common: unlike tails, slots, edits of one another, texts of few words."""
    words = [f"w{i}" for i in range(rng.choice([4, 12, 40, 400]))]
    shared = [rng.choices(words, k=rng.randint(3, 40)) for _ in range(3)]
    texts = []
    for _ in range(n):
        kind = rng.random()
        if texts and kind < 0.4:
            made = rng.choice(texts).split()
            for _ in range(rng.randint(0, 2)):
                made[rng.randrange(len(made))] = rng.choice(words)
            if rng.random() < 0.4:
                made.insert(rng.choice([0, len(made)]), rng.choice(words))
        elif kind < 0.8:
            made = [*rng.choice(shared), *(f"z{rng.randrange(50)}" for _ in range(rng.randint(0, 8)))]
            made += rng.choice(shared) if rng.random() < 0.3 else []
        else:
            made = rng.choices(words, k=rng.randint(1, 40))
        texts.append(" ".join(made))
    return texts


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


@pytest.mark.parametrize("make", [random_texts, templates])
@pytest.mark.parametrize("seed", range(3))
def test_matches_and_clusters_are_those_of_the_rule(make, seed):
    texts = make(random.Random(seed), 100)
    rule, n, texts = Rule(texts), len(texts), list(map(normalise, texts))
    pairs = [(i, j) for i in range(n) for j in range(n) if rule.match(texts[i], texts[j])]
    assert n + 5 < len(pairs) < 0.8 * n * n
    assert matches(texts, texts) == pairs
    halves = [(i // 2, j // 2) for i, j in pairs if i % 2 == 0 and j % 2 == 1]
    assert matches(texts[::2], texts[1::2], among=texts) == halves
    expected = list(range(n))
    while any(expected[i] != expected[j] for i, j in pairs):
        for i, j in pairs:
            expected[i] = expected[j] = min(expected[i], expected[j])
    assert clusters(texts) == expected
    assert 1 < len(set(expected)) < n


def test_the_order_of_texts_does_not_matter():
    texts = templates(random.Random(8), 200)
    mixed = random.Random(0).sample(range(200), 200)
    groups, others = clusters(texts), clusters([texts[i] for i in mixed])
    assert Rule(texts).common
    assert {frozenset(i for i in range(200) if groups[i] == label) for label in set(groups)} == {
        frozenset(mixed[i] for i in range(200) if others[i] == label) for label in set(others)
    }


PREFIX = " ".join(f"p{i}" for i in range(60))


def tails(n, words, *, seed=0):
    draw = random.Random(seed)
    return [" ".join(f"t{draw.randrange(5000)}" for _ in range(words)) for _ in range(n)]


@pytest.mark.parametrize("words", [5, 20])
@pytest.mark.parametrize("n", [11, 400, 1500])
def test_unlike_tails_of_one_prefix_are_different_groups(n, words):
    texts = [f"{PREFIX} {tail}" for tail in tails(n, words)]
    assert len(set(clusters(texts))) == n
    assert matches(texts[: n // 2], texts[n // 2 :], among=texts) == []


@pytest.mark.parametrize("words", [8, 20])
def test_the_same_tail_is_found_behind_the_prefix(words):
    plain = tails(300, words)
    texts = [f"{PREFIX} {tail}" for tail in plain]
    again = [f"{PREFIX} so {tail}" for tail in plain[:5]]
    groups = clusters([*texts, *again])
    assert groups[300:] == [0, 1, 2, 3, 4]
    assert clusters([*plain, *(f"so {tail}" for tail in plain[:5])]) == groups, "as without the prefix"


@pytest.mark.parametrize("others", [0, 100, 1500])
@pytest.mark.parametrize("slot", ["middle", "end", "two"])
@pytest.mark.parametrize("variants", [8, 20, 400])
def test_variants_of_one_template_are_one_group_however_many(variants, slot, others):
    stem = " ".join(f"s{i}" for i in range(60))
    made = {
        "middle": [stem.replace("s30", f"number{i}") for i in range(variants)],
        "end": [f"{stem} number{i}" for i in range(variants)],
        "two": [stem.replace("s20", f"a{i}").replace("s41", f"b{i % 7}") for i in range(variants)],
    }[slot]
    groups = clusters([*made, *tails(others, 12)])
    assert groups[:variants] == [0] * variants
    assert len(set(groups)) == 1 + others


@pytest.mark.parametrize("words", [2, 5, 14, 20])
def test_comparisons_grow_with_the_number_of_prompts(monkeypatch, words):
    counted = Counter()
    overlaps = shingles.overlaps

    def count(mine, sets, others):
        counted[n] += len(others)
        return overlaps(mine, sets, others)

    monkeypatch.setattr(shingles, "overlaps", count)
    for n in (500, 2000):
        texts = [f"{PREFIX} {tail}" for tail in tails(n, words)]
        clusters(texts)
        matches(texts[::2], tails(n, words, seed=1))
        occurring(texts[::2], texts[1::2])
    assert counted[2000] < 5 * max(counted[500], 250)


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


def test_thousands_of_prompts_from_one_template_are_told_apart():
    rng = random.Random(0)
    stem = "Classify the sentiment of the following film review as positive or negative"
    texts = [f"{stem}: {' '.join(rng.choice(WORDS) for _ in range(20))}" for _ in range(4000)]
    assert len(set(clusters(texts))) == 4000


def embedded(rng, needle):
    """The needle inside a longer text, some of it with a word exchanged."""
    words = needle.split()
    if rng.random() < 0.4:
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    around = [[rng.choice(WORDS) for _ in range(rng.randint(0, 30))] for _ in range(2)]
    return " ".join([*around[0], *words, *around[1]])


@pytest.mark.parametrize("make", [random_texts, templates])
@pytest.mark.parametrize("seed", range(3))
def test_contained_is_that_of_the_rule(make, seed, monkeypatch):
    rng = random.Random(seed)
    needles = [*make(rng, 60), *(" ".join(rng.choices(WORDS, k=1 + i % 4)) for i in range(20))]
    haystacks = [*make(rng, 30), *(embedded(rng, needle) for needle in needles), *needles]
    rule, plain = Rule(needles), Rule([])
    pairs = [(i, j) for i in range(len(needles)) for j in range(len(haystacks))]
    expected = [(i, j) for i, j in pairs if rule.contains(needles[i], haystacks[j])]
    by_length = {length: sum(len(needles[i].split()) == length for i, _ in expected) for length in (1, 2, 3, 4)}
    assert all(by_length.values()), by_length
    assert 100 < len(expected) < len(pairs) / 2
    assert contained(needles, haystacks) == expected
    assert occurring(needles, haystacks) == sorted({i for i, _ in expected})
    monkeypatch.setattr(near_duplicates, "WINDOW", 7)
    assert occurring(needles, haystacks) == sorted({i for i, _ in expected})
    all_count = [(i, j) for i, j in pairs if plain.contains(needles[i], haystacks[j])]
    assert contained(needles, haystacks, ignore_common=False) == all_count


@pytest.mark.parametrize("words", [5, 8, 20])
def test_a_constant_prefix_neither_hides_a_leak_nor_makes_one(words):
    asked, trained = tails(60, words), tails(500, words, seed=1)
    with_prefix = [f"{PREFIX} {tail}" for tail in asked]
    for before in ("", f"{PREFIX} ", "some other introduction of several words "):
        texts = [f"{before}{tail}" for tail in trained]
        assert occurring(with_prefix, texts) == occurring(asked, texts) == []
        leaking = [*texts, *(f"{before}{tail} and then" for tail in asked[10:13])]
        assert occurring(with_prefix, leaking) == occurring(asked, leaking) == [10, 11, 12]


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


def test_one_needle_of_many_in_many_rows_of_one_template_is_found():
    rng = random.Random(0)
    vocabulary = [f"v{i}" for i in range(3000)]
    stem = "Classify the sentiment of the following film review as positive or negative"

    def texts(count, words):
        return [f"{stem}: {' '.join(rng.choices(vocabulary, k=words))}" for _ in range(count)]

    needles, haystacks = texts(1000, 15), texts(5000, 60)
    haystacks[7] += " " + needles[3]
    assert contained(needles, haystacks) == [(3, 7)]
