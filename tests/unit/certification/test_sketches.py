"""Prompts that were seen before, nearly: against sets of shingles, and without any text in what is kept."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from holdfast.certification.ledger_state import KEPT, decoded, read_mark, seen, sketch
from holdfast.data.examples import make_example
from holdfast.data.shingles import prompt_marks

WORDS = [f"w{i}" for i in range(12)]


def hashes(texts):
    """Of the texts, by their number; in a set of their own, so that nothing is common to many."""
    found = {}
    for number, text in enumerate(texts):
        (mark,) = prompt_marks([make_example(text, "no")]).values()
        found[str(number)] = read_mark(mark).hashes
    return found


def windows(text):
    words = text.split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


@pytest.mark.parametrize("seed", range(5))
def test_short_prompts_are_compared_by_all_their_shingles(seed):
    rng = random.Random(seed)
    before = [" ".join(rng.choices(WORDS, k=rng.randint(1, 30))) for _ in range(40)]
    now = [" ".join(rng.choices(WORDS, k=rng.randint(1, 30))) for _ in range(30)]
    for text in rng.choices(before, k=40):
        words = text.split()
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        start = rng.randrange(len(words))
        now.append(" ".join([*rng.choices(WORDS, k=rng.randint(0, 3)), *words[start // 4 :]]))

    def near(a, b):
        x, y = windows(a), windows(b)
        return bool(x and y) and 5 * len(x & y) >= 4 * min(len(x), len(y))

    expected = {str(i) for i, text in enumerate(now) if any(near(text, old) for old in before)}
    assert 5 < len(expected) < len(now) - 5
    assert seen(hashes(now), {name: sketch(kept) for name, kept in hashes(before).items()}) == expected


def test_of_a_long_prompt_a_sample_is_kept_and_recognises_it():
    rng = random.Random(0)
    long = [" ".join(f"v{rng.randrange(4000)}" for _ in range(300)) for _ in range(40)]
    kept = {name: sketch(found) for name, found in hashes(long).items()}
    assert {len(decoded(coded)) for coded in kept.values()} == {KEPT}
    assert seen(hashes([f"first {text} last words" for text in long]), kept) == set(map(str, range(40)))
    assert seen(hashes([" ".join(text.split()[10:]) for text in long]), kept) == set(map(str, range(40)))
    halves = [" ".join([*text.split()[:150], *other.split()[:150]]) for text, other in pairwise(long)]
    assert seen(hashes(halves), kept) == set()


def test_what_many_prompts_have_in_common_recognises_none_of_them():
    rng = random.Random(0)
    prefix = " ".join(f"p{i}" for i in range(60))
    tails = [" ".join(f"t{rng.randrange(4000)}" for _ in range(8)) for _ in range(60)]

    def marks(texts):
        return {name: read_mark(mark).hashes for name, mark in prompt_marks(map(example, texts)).items()}

    def example(text):
        return make_example(text, "no")

    kept = {name: sketch(found) for name, found in marks(f"{prefix} {tail}" for tail in tails[:30]).items()}
    assert seen(marks(f"{prefix} {tail}" for tail in tails[30:]), kept) == set()
    assert len(seen(marks(f"{prefix} {tail}" for tail in tails[20:]), kept)) == 10
    assert len(seen(marks(tails[20:]), kept)) == 10


def test_a_mark_holds_no_text_and_is_that_of_the_prompt_alone():
    first, second = (
        make_example("Where is the Blue Lamp now?", "here"),
        make_example("where is the blue lamp now", "there"),
    )
    marks = prompt_marks([first, second])
    assert marks[first.id] == marks[second.id]
    assert not any(word in marks[first.id].lower() for word in ("where", "blue", "lamp"))
    assert prompt_marks([make_example("lamp", "here")])[make_example("lamp", "here").id].count(" ") == 0
    assert prompt_marks([]) == {}


@pytest.mark.parametrize("mark", ["text:x abc", "text:x !!!!", "text:x AAAA"])
def test_what_is_no_mark_is_refused(mark):
    with pytest.raises(ValueError, match=r"not hashes of shingles|buffer size"):
        read_mark(mark)


def test_variants_of_one_template_are_all_decided():
    texts = [f"{' '.join(f's{i}' for i in range(20))} number{i}" for i in range(300)]
    kept = {name: sketch(found) for name, found in hashes(texts[:150]).items()}
    assert seen(hashes(texts[150:]), kept) == set(map(str, range(150)))
