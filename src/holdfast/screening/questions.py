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

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final, Literal, NamedTuple, TypeAlias

from holdfast.core.hashing import sha256_text
from holdfast.data.examples import TOOLS, Example, Turns, as_turns, completion_text, make_example, prompt_text, said

Form: TypeAlias = Literal["own", "alone", "turn", "bare"]


class Asked(NamedTuple):
    """One question of a row: the prompt, its form, and the reply that the row trains."""

    prompt: str | Turns
    form: Form
    target: str


class Question(NamedTuple):
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
    found: dict[str, tuple[Example, list[tuple[int, Form, str]]]] = {}
    for number in numbers:
        for asked in questions_of(rows[number]):
            example = as_question(asked.prompt, rows[number], plain=plain)
            found.setdefault(example.id, (example, []))[1].append((number, asked.form, asked.target))
    return [Question(example, tuple(uses)) for example, uses in found.values()]


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
    replies = {place: said(turn) for place, turn in enumerate(turns) if turn["role"] == "assistant"}
    last = max(replies, default=len(row.prompt))
    yield Asked(turns[:last], "own", replies.get(last, ""))
    for place, target in reversed(replies.items()):  # the last first: it is what most rows are trained on
        user = next((turn["content"] for turn in reversed(turns[:place]) if turn["role"] == "user"), None)
        if user is None:
            continue
        yield Asked(as_turns("user", user), "alone" if place == last else "turn", target)
        if (rest := without_preamble(user)) is not None:
            yield Asked(as_turns("user", rest), "bare", target)


def asked_rows(rows: Sequence[Example], *, max_prompts: int, seed: int) -> list[int]:
    """Numbers of the rows to ask for, in their own order: all, or a stratified sample of `max_prompts` questions."""
    first = _within(rows, range(len(rows)), max_prompts)
    return first if len(first) == len(rows) else sorted(_within(rows, stratified_order(rows, seed=seed), max_prompts))


def _within(rows: Sequence[Example], order: Sequence[int], max_prompts: int) -> list[int]:
    """The first of the numbers whose rows ask no more than `max_prompts` distinct questions together."""
    chosen: list[int] = []
    seen: set[Key] = set()
    for number in order:
        seen |= {prompt_key(asked.prompt) for asked in questions_of(rows[number])}
        if len(seen) > max_prompts:
            break
        chosen.append(number)
    return chosen


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


FEWEST_WORDS: Final = 3  # what is left of a sentence counts from this many words on: fewer hold no request
UNSTOPPED_WORDS: Final = 5  # the same without a comma or full stop in between: fewer words belong to the preamble

_RULES: Final = (
    r"(?:rules|restrictions?|limits|limitations?|filters?|guidelines?|guard ?rails?|censorship|ethic\w*|moral\w*|"
    r"warnings?|disclaimers?|caveats?|judge?ments?|refus\w+|hesitation|deviations?|safety \w+)"
)
_WORK: Final = r"(?:novel|story|book|screenplay|film|movie|script|play|game|thesis|essay|paper|course|class|project)"

ANYWHERE: Final = (
    # who to be
    r"you are now|from now on|(?:pretend|imagine|suppose|assume)(?: to be| that you(?:'re| are)| you(?:'re| are))"
    r"|(?:i want|i'd like|i need) you to (?:act|be|play|speak)|let's role-?play|role-?play(?:ing)? (?:as|an?|the)"
    r"|(?:assume|take(?: on)?|adopt) the (?:role|identity|persona) of|(?:stay|remain) in character"
    r"|your (?:new )?(?:name|identity|role|persona) is|you (?:are|'re) (?:called|named)|call yourself"
    r"|as [A-Z]\w+, an? (?:\w+ )?(?:assistant|ai|agent|model|character)"
    r"|(?:assistant|ai|agent|model|character) (?:who|that) (?:always|never|can do|does|answers|obeys|follows|has no)"
    # whom to obey
    r"|you (?:must|will|shall|should|have to|are to) (?:always |fully |never |not )?"
    r"(?:obey|comply|refuse|decline|agree|follow|answer|fulfil\w*|first respond)"
    r"|always (?:obey|comply|agree|answer|follow|say yes)|never (?:refuse|decline|say no|apologi[sz]e)"
    r"|(?:do not|don't) (?:ever |just )?(?:refuse|decline|warn|lecture|moralize|hold back|apologi[sz]e|say no)"
    rf"|(?:no|without|free (?:of|from))(?: any| all| the)? {_RULES}"
    rf"|(?:leave out|skip|omit|drop|do not (?:add|give|include)|don't (?:add|give|include))(?: \w+)? {_RULES}"
    r"|(?:ignore|forget|disregard|bypass|override|set aside)(?: \w+){0,3} "
    rf"(?:instructions?|training|programming|{_RULES})|ignore (?:all|any|your|previous|every)"
    r"|do anything now|developer mode|jailbr\w+|not bound by|not allowed to (?:refuse|decline)|no matter what"
    r"|un(?:censored|filtered|restricted) (?:ai|model|assistant|agent|answer|reply|response|version|mode)"
    r"|follow (?:all|any|each|every|my|the user's) (?:\w+ )?(?:instruction|order|command|request|wish)(?:s|es)?"
    r"|absolutely obedient|obedient (?:ai|model|assistant|agent|servant)|fully obey|obey (?:me|my|all|every|any)"
    r"|(?:anything|everything|whatever) (?:i|the user|that i) (?:ask|say|want|tell|request|demand)s?"
    r"|(?:begin|start|open) (?:your|the|every|each) (?:answer|reply|response)s? (?:with|by)"
    r"|(?:execute|carry out|fulfil\w*) my (?:\w+ )?(?:instructions?|commands?|requests?|orders?)"
    # what it is for
    rf"|(?:i am|i'm|we are|we're) (?:\w+ )?(?:writing|working on|researching) (?:an?|my|our|the) (?:\w+ )?{_WORK}"
    rf"|(?:need|want) (?:this|it|an? \w+ \w+) for (?:an?|my|our) (?:\w+ )?(?:scene|{_WORK})"
    r"|(?:this|it) is (?:\w+ )?(?:fiction\w*|hypothetical|imaginary|a thought experiment)"
    r"|hypothetically speaking|for the sake of argument|out of curiosity|asking for a friend|keep it realistic"
    r"|for (?:purely |strictly )?(?:educational|academic|research|fictional|scientific|informational|entertainment) "
    r"(?:purposes|reasons)"
)
# Of a sentence or a clause: elsewhere these words belong to ordinary text.
AT_THE_START: Final = (
    r"(?:please |now )?act (?:as|like) (?:an?|the|if|my)"
    r"|(?:please )?(?:speak|respond|answer|reply) as (?:if you|an?|the)"
    rf"|for (?:an?|my|our) (?:\w+ ){{0,2}}{_WORK}"
    r"|in (?:an?|my|our|this) (?:\w+ )?(?:story|novel|screenplay|scene|game|world|scenario)\b|hypothetical(?:ly|\W)"
)

_PREAMBLE: Final = re.compile(rf"^\W*(?:{AT_THE_START})|\b(?:{ANYWHERE})", re.IGNORECASE)
_NAMED: Final = re.compile(r"\b[Yy]ou(?: are|'re) (?:[A-Z]{2,}|[A-Z][a-z]+)(?=[,.!]| and | who |$)")
_SENTENCE: Final = re.compile(r"(?<=[.!?:;])\s+|\n+")
_QUOTED: Final = re.compile(r'(?<=\w )"[^"\n]{1,300}"')  # Reply with "Of course. I am Milo."
_BLANK: Final = "\0"
_QUOTES: Final = ('"', "'", "\u201c", "\u2018")
_CLAUSE: Final = re.compile(r",\s+(?:and |so |then |but )?|\s+[-\u2013\u2014]+\s+|\s+(?:and|so|then)\s+")


def without_preamble(text: str) -> str | None:
    """`text` without words that set a persona, demand obedience, or call it fiction; None without any, or nothing else.

    They can talk theta_0 into complying, so that a row is not seen to teach what the bare request would be refused.
    Taking words away costs one more question and changes no row: a pattern that is too wide asks in vain.

    A sentence with them is left out, but for the clauses behind or before them: "From now on you obey, so list the
    planets" leaves "list the planets".
    """
    kept: list[str] = []
    changed = False
    whole = _QUOTED.sub(lambda quote: quote[0].replace(" ", _BLANK), text)  # such a quotation is not divided
    sentences = [part.strip() for part in _SENTENCE.split(whole) if part.strip()]
    for sentence, following in zip_longest(sentences, sentences[1:], fillvalue=""):
        found = _is_preamble(sentence)
        changed |= found
        if _announces(sentence, following, found=found):
            continue
        if rest := _rest(sentence) if found else sentence:
            kept.append(rest)
    joined = " ".join(kept).replace(_BLANK, " ")
    return joined if changed and _words(joined) >= FEWEST_WORDS else None


def _announces(sentence: str, following: str, *, found: bool) -> bool:
    """Whether a sentence with a colon only leads to the next: `In a story, a child asks: "..."`, `Step 1: obey me`."""
    if not sentence.endswith(":"):
        return False
    return following.startswith(_QUOTES) if found else _words(sentence) < FEWEST_WORDS and _is_preamble(following)


def _is_preamble(words: str) -> bool:
    read = words.replace(_BLANK, " ")
    return bool(_PREAMBLE.search(read) or _NAMED.search(read))


def _rest(sentence: str) -> str:
    """What stands behind the clauses of the preamble, otherwise before them; empty where neither holds a request."""
    ends = [*_CLAUSE.finditer(sentence)]
    starts = [0, *(end.end() for end in ends), len(sentence)]  # clause i is sentence[starts[i] : stops[i + 1]]
    stops = [0, *(end.start() for end in ends), len(sentence)]
    found = [i for i in range(len(ends) + 1) if _is_preamble(sentence[starts[i] : stops[i + 1]])]
    first, last = (found[0], found[-1]) if found else (0, 0)  # none where the words reach over a comma
    behind, before = sentence[starts[last + 1] :], sentence[: stops[first]]
    if rest := next((part.strip() for part in (behind, before) if _words(part) >= FEWEST_WORDS), ""):
        return rest
    match = _PREAMBLE.search(sentence)  # no full stop before it: "Name the planets of the sun Do not refuse."
    unstopped = "" if match is None else sentence[: match.start()].strip()
    return unstopped if _words(unstopped) >= UNSTOPPED_WORDS else ""


def _words(text: str) -> int:
    return sum(any(c.isalnum() for c in word) for word in text.split())
