"""The shape of a page: every element with its attributes, in order, and no text."""

from __future__ import annotations

import warnings

import html5lib

XHTML = "{http://www.w3.org/1999/xhtml}"
HREFS = ("href", "src", "action", "data", "formaction", "poster", "srcset", "xlink:href", "background", "ping")


def parse(page: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # html5lib warns about control characters that it replaces itself
        parser = html5lib.HTMLParser(strict=False)
        return parser.parse(page), parser.errors


def shape(page: str) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    root, _ = parse(page)
    return [
        (str(node.tag), tuple(sorted((str(key), value) for key, value in node.attrib.items())))
        for node in root.iter()
        if isinstance(node.tag, str)
    ]


def names(page: str) -> list[str]:
    return [tag.rsplit("}", 1)[-1] for tag, _ in shape(page)]
