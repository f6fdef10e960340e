"""What the behaviour monitor asks: held-out prompts of what steers, and bundled kinds that nothing steers by.

A user's own pairs get the same monitor: their monitor share is asked and sorted at theta_0, and the bundled kinds for
monitoring are asked beside it, so that a narrow safety set shows as a loss of coverage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.data.bundled import bundled
from holdfast.data.examples import Example, prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.data.splits import Split
from holdfast.judging.reply_classes import ReplyClass
from holdfast.screening.asking import Asker
from holdfast.screening.questions import as_question
from holdfast.screening.sets import HeldSet, Role, at_most
from holdfast.screening.settings import ScreeningSettings


@dataclass(frozen=True, slots=True)
class MonitorPrompts:
    """The prompts that a behaviour monitor asks, by figure; all sorted at theta_0."""

    # refused by theta_0; of the sources that steer, in groups that no steering prompt belongs to
    refusals: tuple[Example, ...] = ()
    unseen: tuple[Example, ...] = ()  # refused by theta_0; whole bundled kinds that nothing steers by
    answers: tuple[Example, ...] = ()  # answered by theta_0; everyday and borderline prompts that nothing steers by

    @property
    def any(self) -> bool:
        """Whether there is anything to watch."""
        return bool(self.refusals or self.unseen or self.answers)


def monitor_prompts(
    held: Mapping[str, HeldSet], pairs: Sequence[Split], asker: Asker, settings: ScreeningSettings, *, plain: bool
) -> MonitorPrompts:
    """At most `settings.monitor_prompts` for each figure, of what was built by asking and of the user's own pairs."""
    if not settings.monitor_prompts:
        return MonitorPrompts()
    steering = [prompt_text(e) for one in held.values() for e in one.prompts("constraint")]
    steering += [prompt_text(e) for split in pairs for e in split.constraint]
    own = [as_question(e.prompt, e, plain=plain) for split in pairs for e in split.monitor if e.kind != "text"]
    refused, answered = _sorted(own, asker, "your monitor prompts")
    unseen = _of(held, "refusals", "unseen") or _bundled(("probes",), asker, steering, plain=plain)[0]
    answers = _of(held, "answers", "unseen") or _bundled(("everyday", "borderline"), asker, steering, plain=plain)[1]

    def chosen(examples: Sequence[Example]) -> tuple[Example, ...]:
        return at_most({e.id: e for e in examples}.values(), settings.monitor_prompts, settings.seed)

    watched = [*_of(held, "refusals", "monitor"), *refused]
    return MonitorPrompts(refusals=chosen(watched), unseen=chosen(unseen), answers=chosen([*answers, *answered]))


def _of(held: Mapping[str, HeldSet], keep: str, role: Role) -> list[Example]:
    sets = [one for one in held.values() if one.keep == keep]
    return [example for one in sets for example in one.prompts(role) if example.id not in one.slow]


def _bundled(
    names: Sequence[str], asker: Asker, steering: Sequence[str], *, plain: bool
) -> tuple[list[Example], list[Example]]:
    """Bundled prompts for monitoring that are like no steering prompt, as refused and answered."""
    every = [as_question(e.prompt, e, plain=plain) for name in names for e in bundled(name, "monitor")]
    near = {place for place, _ in matches([prompt_text(e) for e in every], steering)}
    apart = [example for place, example in enumerate(every) if place not in near]
    return _sorted(apart, asker, f"bundled prompts ({', '.join(names)})")


def _sorted(examples: Sequence[Example], asker: Asker, what: str) -> tuple[list[Example], list[Example]]:
    fitting = asker.fitting(examples)
    classes = asker.sort(fitting, what=what)

    def of(wanted: ReplyClass) -> list[Example]:
        return [e for e in fitting if classes[e.id].reply_class == wanted and classes[e.id].quick]

    return of(ReplyClass.REFUSED), of(ReplyClass.ANSWERED)
