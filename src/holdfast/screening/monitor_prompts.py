"""The prompts that a behaviour monitor asks, all sorted at theta_0."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.data.examples import Example


@dataclass(frozen=True, slots=True)
class MonitorPrompts:
    """What is watched, by figure.

    Attributes:
        refusals: refused by theta_0; of the sources that steer, in groups that no steering prompt belongs to.
        unseen: refused by theta_0; whole bundled kinds that nothing steers by.
        answers: answered by theta_0; everyday and borderline prompts that nothing steers by.
    """

    refusals: tuple[Example, ...] = ()
    unseen: tuple[Example, ...] = ()
    answers: tuple[Example, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is anything to watch."""
        return bool(self.refusals or self.unseen or self.answers)
