"""GSM8K: grade-school word problems, answered with a worked solution and a number.

The prompt is the question alone. The target is the gold solution with "####" written as "The final answer is:", one
space before the number (other code bases leave two there) and the calculator annotations `<<48/2=24>>` kept, as in the
literature.

lenient: the extracted final answer equals the target's. strict: likewise, and the reply states it after the marker, so
that the last number of a reply that was cut off or rambles cannot be right by luck.

The final answer is the first number after the first "the final answer is" (any case, colon or not), and without that
marker the last number of the text. A marker that no number follows is no answer.

| counts as one number                                           | value            |
|----------------------------------------------------------------|------------------|
| `1,234.50`, `1{,}234.50`, groups of three also by narrow spaces | 1234.50          |
| `12kg`, `25%`, `$7`, `3.`, `**3**`                             | 12, 25, 7, 3, 3  |
| `-3`, `−3`, `–3`, `-$3`, `$-3`, `(-3)`, `x=-3`                 | -3               |
| `.5`, `1e3`, `2.5E-2`                                          | 0.5, 1000, 0.025 |
| `1/2` (two whole numbers, no date such as 1/2/2024)            | 0.5              |

A minus after a letter, a digit or a closing bracket joins instead of negating: `10-12` is 10 and 12, `7-3` is 7 and 3.
A minus with a blank after it is a bullet or an operator. Not read: number words, `\\frac`, `1 1/2`, powers of ten
written out, decimal commas.

The extraction that the code bases of the literature share deletes every comma (`3,4` becomes 34), takes any minus as a
sign (`10-12` ends in -12), reads `1e3` as 1 and 3, `1/2` as 1 and 2, and wants its marker letter by letter.
"""

import re
from collections import deque
from dataclasses import dataclass
from decimal import Context, Decimal
from pathlib import Path

from holdfast.core.errors import DataError
from holdfast.data.examples import Example, make_example
from holdfast.data.tasks import MAX_NEW_TOKENS, TASKS, Grade, Match, user_text
from holdfast.data.templates import Template
from holdfast_lab.data.catalogue import load

_GOLD = "####"
MARKER = "The final answer is:"
_MARKER = re.compile(r"\bthe\s+final\s+answer\s+is\b", re.IGNORECASE)
_MINUS = "-\u2212\u2013\ufe63\uff0d"
_SIGNS = re.escape(_MINUS)
_CURRENCY = "$€£¥₹"
_GROUP = r"(?:,|\{,\}|[\u00a0\u2009\u202f])[0-9]{3}"
_NUMBER = re.compile(
    rf"""
    (?: (?<![^\W_]) (?<![)\]}}%{_SIGNS}]) (?P<sign>[+{_SIGNS}]) (?:\\?[{_CURRENCY}]\ ?)? )?
    (?:
        (?P<fraction> (?<![0-9]/) [0-9]+ / 0*[1-9][0-9]* (?![0-9]|[./,][0-9]) )
      | (?P<decimal>
            (?: [0-9]{{1,3}} (?:{_GROUP})+ (?![0-9]) | [0-9]+ ) (?:\.[0-9]+)?
          | (?<![\w.]) \.[0-9]+
        )
        (?P<exponent> [eE] [+{_SIGNS}]? [0-9]{{1,3}} (?![^\W_]) )?
    )
    """,
    re.VERBOSE,
)
_DIGITS = Context(prec=28)  # of a fraction


@dataclass(frozen=True)
class Gsm8k:
    """Questions and worked solutions."""

    name: str = "gsm8k"
    summary: str = "grade-school word problems: the final number of a worked solution"
    metric: Match = "lenient"
    max_new_tokens: int = MAX_NEW_TOKENS

    def train(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        return self._examples("train", template, folder)

    def test(self, template: Template, *, folder: Path | None = None) -> list[Example]:
        return self._examples("test", template, folder)

    def grade(self, reply: str, target: str) -> Grade:
        gold = extract_marked(target)
        if gold is None:
            raise DataError(
                f"gsm8k: a target without a number after {MARKER!r}",
                remedy="grade only examples of this task, with the completion that the task gave them",
            )
        return Grade(strict=same(extract_marked(reply), gold), lenient=same(extract(reply), gold))

    def _examples(self, split: str, template: Template, folder: Path | None) -> list[Example]:
        found = []
        for number, row in enumerate(load(self.name, split, folder=folder).rows, start=1):
            where = f"row {number} of {self.name} {split}"
            found.append(make_example(user_text(row["question"], "", template), _target(row["answer"], where), where))
        return found


def _target(answer: str, where: str) -> str:
    solution, gold, last = answer.rpartition(_GOLD)
    target = f"{solution}{MARKER} {last.strip()}"
    if not gold or answer.count(_GOLD) > 1 or extract_marked(target) is None:
        what = f"{where}: a solution without exactly one {_GOLD!r} and a number after it"
        raise DataError(what, remedy="restore the row; every GSM8K solution ends in such a line")
    return target


def extract(text: str) -> Decimal | None:
    """The final answer of `text`: after the marker, else its last number; None where there is none."""
    if _MARKER.search(text):
        return extract_marked(text)
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(last[0] if last else None)


def extract_marked(text: str) -> Decimal | None:
    """The first number after the first marker; None without either."""
    marker = _MARKER.search(text)
    return _value(_NUMBER.search(text, marker.end())) if marker else None


def same(first: Decimal | None, second: Decimal | None) -> bool:
    """Equal numbers; two missing answers are not equal."""
    return first is not None and second is not None and first == second


def _value(found: re.Match[str] | None) -> Decimal | None:
    if found is None:
        return None
    if found["fraction"]:
        above, below = found["fraction"].split("/")
        value = _DIGITS.divide(Decimal(above), Decimal(below))
    else:
        digits = re.sub(r"[^0-9.]", "", found["decimal"])
        value = Decimal(digits + re.sub(f"[{_SIGNS}]", "-", found["exponent"] or ""))
    return value.copy_negate() if (found["sign"] or "+") in _MINUS else value


GSM8K = TASKS.register("gsm8k")(Gsm8k())
