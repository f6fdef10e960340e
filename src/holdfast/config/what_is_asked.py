"""What a run file may not ask of its model, or leave open about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.config.problems import Problem
from holdfast.config.safety_sets import NAMED_PROMPTS, SafetyBlock
from holdfast.config.schema import RunConfig
from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest

FINE = ("everyday", "borderline")


def check_asking(config: RunConfig) -> list[Problem]:
    """Every problem of the prompts that are asked, of `conflicts` and of `screening`."""
    problems = []
    for name, block in config.prompt_sets.items():
        key = f"safety.{name}.prompts" if config.named else "safety.prompts"
        problems += [Problem(key, *found) for found in _check_prompts(block)]
    if config.asks and config.stage == "align":
        problems.append(
            Problem("safety", "a model that is being aligned has no replies yet that could be held", "remove `safety`")
        )
    pairs = any(block.data is not None for block in config.safety.values())
    if config.conflicts not in (None, "keep") and not (config.asks or pairs):
        problems.append(
            Problem(
                "conflicts",
                "conflicts are found by asking the model, and a run on the protocol's pairs or in alignment does not",
                "use `safety: auto`, or remove `conflicts`",
            )
        )
    return problems + _check_engine(config) + _check_judge(config)


def _check_prompts(block: SafetyBlock) -> Iterator[tuple[str, str]]:
    prompts = block.prompts or []
    for name in prompts:
        if name not in NAMED_PROMPTS and "/" not in name:  # files have absolute paths by now
            yield (
                f"{name!r} is none of {', '.join(NAMED_PROMPTS)}, no file and no hub data set (owner/name)",
                nearest(name, list(NAMED_PROMPTS)),
            )
    if twice := sorted({name for name in prompts if prompts.count(name) > 1}):
        yield f"{twice[0]!r} is listed twice", "list it once"
    fine = [name for name in FINE if name in prompts]
    if block.keep == "refusals" and fine:
        yield (
            f"refusals of {' and '.join(fine)} prompts are never held: the model should answer them",
            f"remove {', '.join(fine)}, or put it into a set with `keep: answers`",
        )
    if block.keep == "answers" and "probes" in prompts:
        yield (
            "answers to probes are never held: these prompts ask for harm",
            "remove probes, or put it into a set with `keep: refusals`",
        )


def _check_engine(config: RunConfig) -> list[Problem]:
    from holdfast.evaluation.engines import AUTO, ENGINES, require_options

    engine, options = config.screening.engine, config.screening.engine_options
    if engine == AUTO:
        found = Problem("screening.engine_options", "the engine auto has none", "name the engine that they belong to")
        return [found] if options else []
    try:
        ENGINES[engine]
    except ConfigError as error:
        return [Problem("screening.engine", error.what, error.remedy)]
    try:
        require_options(engine, options)
    except ConfigError as error:
        return [Problem("screening.engine_options", error.what, error.remedy)]
    return []


def _check_judge(config: RunConfig) -> list[Problem]:
    """A judge by name; a folder is read when it judges, so that a finished run is read back without it."""
    judge = config.screening.judge
    if judge is None or Path(judge).is_absolute():
        return []
    from holdfast.evaluation.judge import open_judge

    try:
        open_judge(judge)
    except ConfigError as error:
        return [Problem("screening.judge", error.what, error.remedy)]
    return []
