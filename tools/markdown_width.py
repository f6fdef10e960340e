"""Markdown whose source can be read: prose wrapped, wide tables taken apart by columns.

    python -m tools.markdown_width README.md docs/*.md           # rewrites the files that change

A paragraph or list item is wrapped at `WRAP` characters where one of its lines is longer than `LOOSE`. A table with a
line over `LIMIT` becomes several with the same first column. Code, headings, comments and HTML stay as they are. The
page writers call `fit`, so that generated tables keep the limit too. tests/docs/test_readability.py holds all pages to
it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

WRAP, LOOSE, LIMIT = 116, 120, 200
ITEM = re.compile(r"(\s*(?:[-*+]|\d+[.)])\s+)")
FENCE = re.compile(r"\s*(```|~~~)")
CELLS = re.compile(r"(?<!\\)\|")
MARKUP = re.compile(r"(?:[-*+>=|]|#+|\d+[.)]|---+|===+)$")
"""A word that would start a list, quotation, heading or table if a line began with it."""
SPAN = re.compile(r"(`+)(?:(?!\1).)+\1")
SPACE = "\x00"


def fit(text: str) -> str:
    """The same page with prose wrapped and wide tables split."""
    return "\n".join(line for block in _blocks(text.split("\n")) for line in _fitted(block))


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Runs of lines that belong together: a code block, a table, a paragraph, a list item, or one other line."""
    block: list[str] = []
    kind = fence = ""
    for line in lines:
        marker = FENCE.match(line)
        if fence or marker:
            found = "code"
            fence = "" if fence and marker else fence or line
        else:
            found = _kind(line, kind)
        if block and (found != kind or found in ("item", "other")):
            yield block
            block = []
        block.append(line)
        kind = "prose" if found == "item" else found
        if found == "code" and not fence:
            yield block
            block, kind = [], ""
    if block:
        yield block


def _kind(line: str, before: str) -> str:
    if line.startswith("|"):
        return "table"
    if not line.strip() or line.lstrip().startswith(("#", "<!--", ">", "![")):
        return "other"
    if ITEM.match(line):
        return "item"
    return "other" if line.startswith("    ") and before != "prose" else "prose"


def _fitted(block: list[str]) -> list[str]:
    if block[0].startswith("|"):
        return _narrowed(block) if max(map(len, block)) > LIMIT else block
    if max(map(len, block)) <= LOOSE or FENCE.match(block[0]) or _kind(block[0], "") == "other":
        return block
    mark = ITEM.match(block[0])
    first = mark[1] if mark else re.match(r"\s*", block[0])[0]  # type: ignore[index]
    indent = " " * len(first)
    words = " ".join([block[0][len(first) :], *(line.strip() for line in block[1:])])
    wrapped = textwrap.wrap(
        _glued(words),
        WRAP,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(SPACE, " ") for line in wrapped]


def _glued(text: str) -> str:
    """Spaces that must not become line ends: inside short code, and before a word that would be markup."""
    kept = SPAN.sub(lambda span: span[0].replace(" ", SPACE) if len(span[0]) < WRAP // 2 else span[0], text)
    words = kept.split(" ")
    glued = [words[0]]
    for word in words[1:]:
        glued.append((SPACE if MARKUP.match(word) else " ") + word)
    return "".join(glued)


def _narrowed(rows: Sequence[str]) -> list[str]:
    """Several tables of equal parts of the columns, each with the first column, as few as keep the limit."""
    cells = [CELLS.split(row.strip())[1:-1] for row in rows]
    first, others = [row[0] for row in cells], [row[1:] for row in cells]
    count = len(others[0])
    tables: list[list[str]] = []
    for parts in range(2, count + 1):
        size = -(-count // parts)
        tables = [
            ["|" + "|".join([head, *row[at : at + size]]) + "|" for head, row in zip(first, others, strict=True)]
            for at in range(0, count, size)
        ]
        even = count % parts == 0 or count % (parts + 1) != 0
        if even and all(len(row) <= LIMIT for table in tables for row in table):
            break
    return [line for table in tables for line in ("", *table)][1:] if tables else list(rows)


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        if (fitted := fit(text)) != text:
            path.write_text(fitted, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
