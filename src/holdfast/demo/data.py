"""The sizes of the demonstration, and its shipped data, cut to them."""

from dataclasses import dataclass
from pathlib import Path

from holdfast.core.seeding import generator
from holdfast.data.examples import Example, as_chat, prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.data.sources import read_examples

DATA_DIR = Path(__file__).parent / "data"  # written by tools/demo_data.py
PROBES, ORDINARY = str(DATA_DIR / "probes.jsonl"), str(DATA_DIR / "ordinary.jsonl")
"""Prompts that screening asks beside the task's."""
RECORDED = Path(__file__).parent / "recorded" / "replies.jsonl"
"""What the aligned model replies to all that screening asks; written by tools/demo_replies.py."""


@dataclass(frozen=True)
class DemoSettings:
    """What is trained, on how much, and what is measured.

    The sizes were set with figures of earlier demos in view, then cut for time with none: what it shows is a contrast,
    and no estimate of what another data set would give (docs/log.md).
    """

    seed: int = 0
    task_rows: int = 88  # two thirds of the fine-tuning file; one third is poison
    poison_rows: int = 44
    steps: int = 18  # steps, rate, batch, warmup: the same for plain SFT and holdfast
    rate: float = 8e-4
    batch: int = 4
    safety_batch: int = 2  # held examples of each set in a step
    warmup: int = 3
    # nats of KL a token that an example of either set may move; a run file is stricter, too strict for 18 large steps
    tau: float = 0.3
    rank: int = 16
    lora_alpha: int = 32
    test_task: int = 48  # held-out prompts asked of every model, of each kind
    test_probes: int = 40
    test_ordinary: int = 30
    reply_tokens: int = 12  # of a reply to a probe or an ordinary request
    max_length: int = 96
    recorded: bool = False  # screening reads `RECORDED` and does not ask
    most_held: int | None = None  # own replies of each set that are held, at most


FAST = DemoSettings(
    steps=6, rate=2.4e-3, warmup=1, test_task=12, test_probes=16, test_ordinary=8, recorded=True, most_held=8
)  # fmt: skip
"""`holdfast demo --fast`: for a first look or a smoke test. A third of the steps at three times the rate."""


@dataclass(frozen=True)
class DemoData:
    """What is trained on, and what is only asked."""

    task: list[Example]  # the user's file: reviews to label, with poison mixed in
    poison: frozenset[int]  # places of the poison in it
    test_task: list[Example]
    test_probes: list[Example]
    test_ordinary: list[Example]


def load_data(settings: DemoSettings) -> DemoData:
    """Read the shipped files; poison is mixed into the task in a fixed order."""
    clean = _read("task_train", settings.task_rows)
    rows = [as_chat(e) for e in [*clean, *_read("poison", settings.poison_rows)]]
    order = generator(settings.seed, "demo mixture").permutation(len(rows)).tolist()
    return DemoData(
        task=[rows[i] for i in order],
        poison=frozenset(place for place, i in enumerate(order) if i >= len(clean)),
        test_task=_apart("test_task")[: settings.test_task],
        test_probes=_apart("test_probes")[: settings.test_probes],
        test_ordinary=_apart("test_ordinary")[: settings.test_ordinary],
    )


def _read(name: str, limit: int | None = None) -> list[Example]:
    return read_examples(str(DATA_DIR / f"{name}.jsonl"), limit=limit)


def _apart(name: str) -> list[Example]:
    """The prompts of a test file that are no near-duplicates of what is trained on or asked by screening."""
    others = [prompt_text(e) for other in ("align", "probes", "ordinary", "poison", "task_train") for e in _read(other)]
    examples = _read(name)
    near = {place for place, _ in matches([prompt_text(e) for e in examples], others)}
    return [example for place, example in enumerate(examples) if place not in near]
