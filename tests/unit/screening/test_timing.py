"""How long asking takes is measured on its own prompts, and said before the others are asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.unit.screening.asked import Refusing, asker, row

from holdfast.data.examples import Example, make_example, prompt_text
from holdfast.judging.reply import Reply
from holdfast.screening.asking import AskingTime, measured, of_average_length, plan_asking
from holdfast.screening.screen import screen_examples
from holdfast.screening.settings import ScreeningSettings

OPEN = ScreeningSettings(limited=False)


@dataclass
class Slow(Refusing):
    """Takes 2 seconds a prompt by the test's clock; the first 32 prompts take 50 each."""

    now: float = 0.0

    def generate(self, examples: Sequence[Example], *, max_new_tokens: int) -> Iterator[list[Reply]]:
        for replies in super().generate(examples, max_new_tokens=max_new_tokens):
            self.now += 50.0 if len(self.asked) <= 32 else 2.0
            yield replies


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    engine = Slow()
    monkeypatch.setattr("holdfast.screening.asking.time.monotonic", lambda: engine.now)
    return engine


def prompts(count: int) -> list[Example]:
    return [row(number) for number in range(count)]


def test_a_batch_is_timed_after_one_to_warm_up(slow: Slow, tmp_path: Path) -> None:
    found = measured(asker(tmp_path, slow), prompts(1000))
    assert found == AskingTime(timed=32, seconds=64.0, left=936)
    assert found.sorting == 2 * 936
    assert found.holding == 2 * 936 * 256 / 4 / 32
    assert found.sentence() == (
        "estimated 0:31:12 to sort the replies to 936 more prompts, and at most about 1:02:24 for the whole replies "
        "that are held (32 prompts took 64.0 s)"
    )


def test_of_few_prompts_few_are_timed(slow: Slow, tmp_path: Path) -> None:
    found = measured(asker(tmp_path, slow), prompts(80))
    assert found is not None
    assert (found.timed, found.left) == (10, 60)
    assert measured(asker(tmp_path / "other", slow), prompts(7)) is None


def test_what_is_stored_is_not_counted(slow: Slow, tmp_path: Path) -> None:
    own, every = asker(tmp_path, slow), prompts(500)
    own.sort(every[:300], what="some")
    found = measured(own, [*every, *every])
    assert found is not None
    assert found.timed + found.left == 200 - 25
    own.sort(every, what="all")
    before = len(slow.asked)
    assert measured(own, every) is None
    assert len(slow.asked) == before


def test_prompts_of_average_length_stand_for_all() -> None:
    """A few long prompts move the average above the middle, and none of them is timed."""
    lengths = [*range(10, 190), *([2000] * 20)]
    examples = [make_example("a" * length, "", str(length)) for length in lengths]
    average = sum(lengths) / len(lengths)
    assert average > 250
    chosen = [len(prompt_text(example)) for example in of_average_length(examples, 40)]
    assert chosen == lengths[160:]
    even = [make_example("a" * length, "", str(length)) for length in range(1, 101)]
    chosen = [len(prompt_text(example)) for example in of_average_length(even, 10)]
    assert chosen == list(range(46, 56))


def test_it_is_said_before_the_others_are_asked_and_nothing_is_asked_twice(
    slow: Slow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = [*(row(n, "xyzzy") for n in range(150)), *(row(1000 + n) for n in range(200))]
    slow.stop_after = 64
    with caplog.at_level("INFO", "holdfast.screening"), pytest.raises(KeyboardInterrupt):
        screen_examples(task, asker(tmp_path, slow), OPEN)
    plan = plan_asking(task, OPEN)
    left = plan.task_prompts + plan.bundled_prompts - 64
    assert caplog.messages[1].startswith("asking the model: estimated ")
    assert f" {left:,} more prompts" in caplog.messages[1]
    slow.stop_after = None
    found = screen_examples(task, asker(tmp_path, slow), OPEN)
    assert max(Counter(slow.asked).values()) == 1
    assert found.counts == screen_examples(task, asker(tmp_path / "other"), OPEN).counts


def test_a_judge_is_not_in_the_estimate(slow: Slow, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow.stop_after = 64
    settings = ScreeningSettings(limited=False, judge="refusal")
    with caplog.at_level("INFO", "holdfast.screening"), pytest.raises(KeyboardInterrupt):
        screen_examples([row(n) for n in range(100)], asker(tmp_path, slow), settings)
    assert caplog.messages[1].endswith("; judging comes on top")
