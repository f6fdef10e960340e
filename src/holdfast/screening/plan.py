"""What a screening will ask, known before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.data.bundled import KINDS, bundled
from holdfast.data.examples import Example
from holdfast.screening.asking import HELD, SORTING
from holdfast.screening.questions import Key, prompt_key, questions_of
from holdfast.screening.sampling import asked_rows
from holdfast.screening.settings import TASK, ScreeningSettings


@dataclass(frozen=True)
class AskingPlan:
    """Counts of prompts, and of new tokens at most.

    Attributes:
        rows, asked_rows: of the task.
        task_prompts: distinct questions of the task.
        bundled_prompts: bundled prompts that are asked before training.
        files: prompt files and hub data sets that are asked too; they are read when asking begins.
        sets: what is held, by name.
        new_tokens: at most, if a quarter of the prompts are held at full length.
    """

    rows: int
    asked_rows: int
    task_prompts: int
    bundled_prompts: int
    files: tuple[str, ...]
    new_tokens: int
    sets: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """For `holdfast check --json`."""
        return asdict(self)

    def sentence(self) -> str:
        """The plan in words."""
        sampled = (
            "" if self.asked_rows == self.rows else f" (a stratified sample: {self.asked_rows} of {self.rows} rows)"
        )
        files = f" and those of {', '.join(self.files)}" if self.files else ""
        return (
            f"{self.task_prompts:,} task prompts{sampled}, {self.bundled_prompts:,} bundled prompts{files}; at most "
            f"about {self.new_tokens:,} new tokens"
        )


def plan_asking(task: Sequence[Example], settings: ScreeningSettings) -> AskingPlan:
    """What will be asked for a task under these settings."""
    numbers = asked_rows(task, max_prompts=settings.max_prompts, seed=settings.seed) if settings.asks_task else []
    keys: set[Key] = {prompt_key(asked.prompt) for number in numbers for asked in questions_of(task[number])}
    sources = dict.fromkeys(source for one in settings.sets.values() for source in one.prompts)
    steering = sum(len(bundled(name, "steer")) for name in KINDS if name in sources)
    watching = sum(len(bundled(name, "monitor")) for name in KINDS if name in sources or settings.monitor_prompts)
    asked = steering + watching
    files = tuple(source for source in sources if source != TASK and source not in KINDS)
    tokens = SORTING * (len(keys) + asked) + HELD * (len(keys) + asked) // 4
    sets = {name: {"prompts": list(one.prompts), "keep": one.keep} for name, one in settings.sets.items()}
    return AskingPlan(len(task), len(numbers), len(keys), asked, files, tokens, sets)
