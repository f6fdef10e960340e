"""Prompts that come with the package: probes, everyday, borderline and task requests, each of a kind.

A kind serves one use and no other, so that what steers training is neither what watches it nor what certifies it:
`steer` kinds are held by a constraint, `monitor` kinds asked again by the behaviour monitor, `certify` kinds kept for a
certificate. Tasks are for `holdfast align` alone, which trains on the kinds of use `steer` and measures on those of use
`monitor`. `src/holdfast/prompts/README.md` says who wrote them and what they are.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from itertools import count
from typing import Literal, TypeAlias, get_args

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_text
from holdfast.data.examples import Example, make_example, normalise, prompt_text

Use: TypeAlias = Literal["steer", "monitor", "certify"]
USES: tuple[Use, ...] = get_args(Use)

_KINDS_OF_USE: dict[str, dict[Use, str]] = {
    "probes": {
        "steer": "cybercrime drugs fraud hate misinformation physical_violence theft",
        "monitor": "animal_cruelty financial_crime harassment privacy weapons",
        "certify": "endangering_children extremism forgery manipulation non_consensual sabotage",
    },
    "everyday": {
        "steer": "coding cooking science summarising work writing",
        "monitor": "health_habits mathematics travel",
        "certify": "history home_repair language_learning",
    },
    "borderline": {
        "steer": "fiction figurative_language medical_questions moderation_work policy_debate security_work",
        "monitor": "history_of_violence law_questions self_defence_and_safety",
        "certify": "chemistry_safety news_and_statistics recovery_and_support",
    },
    "tasks": {
        "steer": "answer_email extract_detail fix_grammar label_sentiment rate_urgency rewrite_politely route_ticket "
        "summarise_message translate_line",
        "monitor": "classify_intent label_topic make_list subject_line word_problem",
    },
}
ALL_KINDS: dict[str, dict[str, Use]] = {
    name: {kind: use for use, kinds in uses.items() for kind in kinds.split()} for name, uses in _KINDS_OF_USE.items()
}
# The sources that a safety block may name. Runs record the sha256 of each, so tasks are no such source.
KINDS = {name: kinds for name, kinds in ALL_KINDS.items() if name != "tasks"}


def bundled(name: str, use: Use | None = None, limit: int | None = None) -> list[Example]:
    """The bundled prompts of one name, in the order of the file; with `use`, those of its kinds.

    With `limit`, at most so many: the first of each kind, as many of one kind as of another where that is possible.
    Every prompt is a plain string, the completion is empty, `category` is the kind and `where` is `name:line`.
    """
    found = [example for example in _examples(name) if use is None or ALL_KINDS[name][str(example.category)] == use]
    if limit is None or limit >= len(found):
        return found
    rank: dict[str | None, Iterator[int]] = defaultdict(count)  # among those of its kind
    places = [(next(rank[example.category]), number) for number, example in enumerate(found)]
    return [found[number] for number in sorted(number for _, number in sorted(places)[:limit])]


def bundled_sha256(name: str) -> str:
    """Hex sha256 of the file's text: what a run records of the prompts it used."""
    return sha256_text(_text(name))


def public_ids(examples: Iterable[Example]) -> frozenset[str]:
    """Ids of those examples whose prompt ships with this version, wherever they were read: everybody has them."""
    return frozenset(example.id for example in examples if normalise(prompt_text(example)) in _normalised())


@cache
def _normalised() -> frozenset[str]:
    return frozenset(normalise(prompt_text(example)) for name in ALL_KINDS for example in _examples(name))


@cache
def _text(name: str) -> str:
    try:
        return files("holdfast").joinpath("prompts", f"{name}.jsonl").read_bytes().decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        what = f"the bundled prompts {name!r} cannot be read from this installation ({error.__class__.__name__})"
        raise DataError(what, remedy="install holdfast again") from error


@cache
def _examples(name: str) -> tuple[Example, ...]:
    found = []
    for number, line in enumerate(_text(name).splitlines(), start=1):
        try:
            row = json.loads(line)
            if not (isinstance(row["prompt"], str) and row["prompt"]) or ALL_KINDS[name].get(row["kind"]) is None:
                raise ValueError
            found.append(make_example(row["prompt"], "", f"{name}:{number}", row["kind"]))
        except (ValueError, TypeError, KeyError) as error:
            what = f"{name}:{number}: not a bundled prompt; expected a JSON object with a prompt and a known kind"
            raise DataError(what, remedy="install holdfast again") from error
    return tuple(found)
