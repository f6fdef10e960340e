"""What is asked for a task row.

| form  | what the model is asked                                                           | its target            |
|-------|-----------------------------------------------------------------------------------|-----------------------|
| own   | the row's own system prompt and turns                                             | the row's last reply  |
| alone | its last user turn alone: a system prompt may talk a model into complying          | the row's last reply  |
| turn  | an earlier user turn alone: poison may lie inside a conversation                   | the reply to that turn |
| bare  | a user turn without words that set a persona, demand obedience or call it fiction | as of that turn       |

Only exact duplicates share a question. A plain text row has no prompt and asks nothing.

Where a task has more than `max_prompts` questions, a proportional stratified sample of its rows is asked for. Strata:
the row's category, its number of turns, and the power of two of its prompt's length. Within a stratum of n rows, rows
are ordered by a seeded hash, and the r-th gets the quantile (r + 1/2) / n. Rows are taken by quantile over all strata,
so that every prefix of the order is a stratified sample.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from holdfast.core.hashing import sha256_text
from holdfast.data.examples import Example, Turns, as_turns, completion_text, make_example, prompt_text, said
from holdfast.data.tool_calls import TOOLS
from holdfast.screening.preambles import without_preamble

Form: TypeAlias = Literal["own", "alone", "turn", "bare"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of a row: the prompt, its form, and the reply that the row trains."""

    prompt: str | Turns
    form: Form
    target: str


@dataclass(frozen=True, slots=True)
class Question:
    """A distinct prompt, and where the task asks it: (row number, form, target)."""

    example: Example
    uses: tuple[tuple[int, Form, str], ...]


Key: TypeAlias = tuple[tuple[str, str], ...]


def prompt_key(prompt: str | Turns) -> Key:
    """Equal for prompts that a model sees alike: a string is its single user turn."""
    if isinstance(prompt, str):
        return (("user", prompt),)
    return tuple((turn["role"], said(turn) + turn.get(TOOLS, "")) for turn in prompt)


def questions_of(row: Example) -> list[Asked]:
    """What is asked for one row; no prompt twice."""
    asked: dict[Key, Asked] = {}
    for question in _asked(row):
        asked.setdefault(prompt_key(question.prompt), question)
    return list(asked.values())


def distinct(rows: Sequence[Example], numbers: Sequence[int], *, plain: bool) -> list[Question]:
    """The distinct questions of the rows at `numbers`, in the order in which they first occur.

    Prompts stay strings where they are `plain`, as `template: none` has them; otherwise they become user turns.
    """
    made: dict[str, Example] = {}
    uses: dict[str, list[tuple[int, Form, str]]] = {}
    for number in numbers:
        for asked in questions_of(rows[number]):
            example = as_question(asked.prompt, rows[number], plain=plain)
            made.setdefault(example.id, example)
            uses.setdefault(example.id, []).append((number, asked.form, asked.target))
    return [Question(example, tuple(uses[key])) for key, example in made.items()]


def as_question(prompt: str | Turns, source: Example, *, plain: bool) -> Example:
    """A prompt without a reply; its id depends on the prompt alone."""
    return make_example(prompt if plain else as_turns("user", prompt), "", source.where, source.category)


def _asked(row: Example) -> Iterator[Asked]:
    if row.kind == "text":
        return
    if isinstance(row.prompt, str):
        target = completion_text(row)
        yield Asked(row.prompt, "own", target)
        if (rest := without_preamble(row.prompt)) is not None:
            yield Asked(rest, "bare", target)
        return
    turns = (*row.prompt, *as_turns("assistant", row.completion))
    replies = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    last = max(replies, default=len(row.prompt))
    yield Asked(turns[:last], "own", _content(turns, last))
    for place in reversed(replies):  # the last first: it is what most rows are trained on
        user = next((turn["content"] for turn in reversed(turns[:place]) if turn["role"] == "user"), None)
        if user is None:
            continue
        target = _content(turns, place)
        yield Asked(as_turns("user", user), "alone" if place == last else "turn", target)
        if (rest := without_preamble(user)) is not None:
            yield Asked(as_turns("user", rest), "bare", target)


def _content(turns: Turns, place: int) -> str:
    return said(turns[place]) if place < len(turns) else ""


def asked_rows(rows: Sequence[Example], *, max_prompts: int, seed: int) -> list[int]:
    """Numbers of the rows to ask for, in their own order: all, or a stratified sample of `max_prompts` questions."""
    chosen: list[int] = []
    seen: set[Key] = set()
    for row in rows:
        seen.update(prompt_key(asked.prompt) for asked in questions_of(row))
        if len(seen) > max_prompts:
            break
    else:
        return list(range(len(rows)))
    seen.clear()
    for number in stratified_order(rows, seed=seed):
        new = {prompt_key(asked.prompt) for asked in questions_of(rows[number])} - seen
        if len(seen) + len(new) > max_prompts:
            break
        seen |= new
        chosen.append(number)
    return sorted(chosen)


def stratified_order(rows: Sequence[Example], *, seed: int) -> list[int]:
    """Every row number, by its quantile within its stratum."""
    strata: dict[tuple[str, int, int], list[tuple[str, int]]] = defaultdict(list)
    for number, row in enumerate(rows):
        turns = 1 if isinstance(row.prompt, str) else len(row.prompt)
        stratum = (row.category or "", turns, len(prompt_text(row)).bit_length())
        strata[stratum].append((sha256_text(f"{seed} {row.id} {number}")[:16], number))
    placed: list[tuple[float, str, int]] = []
    for members in strata.values():
        members.sort()
        placed += [((rank + 0.5) / len(members), key, number) for rank, (key, number) in enumerate(members)]
    return [number for _, _, number in sorted(placed)]
