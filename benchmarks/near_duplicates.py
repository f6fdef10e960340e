"""Splitting 1e5 prompts with one shared prefix against 1e5 random ones: `python benchmarks/near_duplicates.py`.

Each case runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time

PREFIX = 60
VOCABULARY = 20_000
CASES = {
    "random": (0, 80),
    "prefix + 20 words": (PREFIX, 20),
    "random, 65 words": (0, 65),
    "prefix + 5 words": (PREFIX, 5),
}


def prompts(count: int, shared: int, own: int) -> list[str]:
    """Prompts of `shared` words that all have in common and `own` random ones."""
    draw = random.Random(0)  # noqa: S311
    vocabulary = [f"word{number}" for number in range(VOCABULARY)]
    prefix = draw.choices(vocabulary, k=shared)
    return [" ".join([*prefix, *draw.choices(vocabulary, k=own)]) for _ in range(count)]


def measure(case: str, count: int) -> None:
    """Print CPU seconds of splitting and of the leak search, groups and peak memory of one case."""
    from holdfast.data.examples import make_example
    from holdfast.data.splits import require_unseen, split_examples

    texts = prompts(count, *CASES[case])
    examples = [make_example(text, "no") for text in texts]
    before = time.process_time()
    split = split_examples(examples, seed=0)
    middle = time.process_time()
    seen = {example.prompt for example in split.certify}
    require_unseen(split.certify, [text for text in texts if text not in seen])
    after = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{case:<20} split {middle - before:7.1f} s   leak search {after - middle:7.1f} s   "
        f"{split.record.n_clusters:>7} groups   peak {peak:.2f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--case", choices=CASES)
    given = parser.parse_args()
    if given.case is not None:
        measure(given.case, given.prompts)
        return
    for case in CASES:
        again = [sys.executable, __file__, "--prompts", str(given.prompts), "--case", case]
        subprocess.run(again, check=True)  # noqa: S603


if __name__ == "__main__":
    main()
