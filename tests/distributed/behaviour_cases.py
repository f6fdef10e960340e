"""The behaviour monitor in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.training import behaviour
from tests.watched import build, prompts

PROMPTS = 7  # of each figure, so that two processes do not share 21 prompts equally


def watch_behaviour(trainer: Any) -> None:
    """Measure after every second step."""
    trainer.watch_behaviour(prompts(PROMPTS), every=2)


def trained(folder: Path, *, watch: bool, **settings: Any) -> dict[str, Any]:
    """A run with the same eight rows a step, and how many prompts this process asked at each measurement."""
    from tests.distributed.worker import layout, weights

    trainer = build(folder, max_steps=4, logging_strategy="no", dropout=0.2, **layout(), **settings)
    shares: list[int] = []
    opened = behaviour.open_engine  # type: ignore[attr-defined]

    def counting(*args: Any, **kwargs: Any) -> Any:
        engine = opened(*args, **kwargs)
        generate = engine.generate

        class Counted:
            name = "counted"

            def generate(self, examples: Any, *, max_new_tokens: int) -> Any:
                shares.append(len(examples))
                return generate(examples, max_new_tokens=max_new_tokens)

        return Counted()

    behaviour.open_engine = counting  # type: ignore[attr-defined]
    try:
        if watch:
            watch_behaviour(trainer)
        trainer.train()
    finally:
        behaviour.open_engine = opened  # type: ignore[attr-defined]
    return {"weights": weights(trainer), "shares": shares, "result": trainer.behaviour_result()}
