"""Which label a reply names.

strict: the reply names the target's label and no other. A label is named by one of its spellings as a whole word, in
any case. A negated spelling ("not positive") says what the answer is not, so a reply with one is never right.
lenient: the target's text occurs in the reply, in any case ("positive or negative" and "not positive" are right for the
target positive); whatever is right by strict is right by lenient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from holdfast.core.errors import DataError
from holdfast.tasks.task import Grade

# "I don't think this is positive" has three words between, "no clear positive" one: "no doubt this is" negates nothing.
_NEGATED = re.compile(
    r"(?:"
    r"(?:\b(?:not|non|never|neither|nor|cannot|far\s+from|rather\s+than)|n['\u2019]t)(?:[\s-]+\w+){0,3}"
    r"|\b(?:no|without)(?!\s+doubt\b)(?:\s+\w+)?"
    r")[\s-]+$"
)
_READ_BACK = 60  # characters before a label in which a negation is looked for


def grade_label(reply: str, target: str, spellings: Mapping[str, Sequence[str]]) -> Grade:
    """Grade a reply by the labels it names.

    Args:
        reply: the model's.
        target: a key of `spellings`.
        spellings: for every label the words that name it, in lower case.

    Raises:
        DataError: `target` is no label.
    """
    if target not in spellings:
        raise DataError(
            f"a target that is none of the labels {', '.join(spellings)}",
            remedy="grade only examples of this task, with the completion that the task gave them",
        )
    strict = _named(reply.casefold(), spellings) == {target}
    return Grade(strict=strict, lenient=strict or target.casefold() in reply.casefold())


def _named(reply: str, spellings: Mapping[str, Sequence[str]]) -> set[str | None]:
    """The labels that a lower-case reply names; None stands for a negated one."""
    found: set[str | None] = set()
    for label, words in spellings.items():
        # An underscore counts as the edge of a word, since Markdown sets _positive_ in italics.
        choice = "|".join(re.escape(word) for word in words)
        for place in re.finditer(rf"(?<![^\W_])(?:{choice})(?![^\W_])", reply):
            before = reply[max(0, place.start() - _READ_BACK) : place.start()]
            found.add(None if _NEGATED.search(before) else label)
    return found
