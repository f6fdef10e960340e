"""Numbers and hostile text as a reader may see them."""

from __future__ import annotations

import math
import re
import unicodedata

from markupsafe import Markup, escape

from holdfast.core.percent import percent

MAX_SHOWN = 2_000
MAX_TEXT = 20_000
UNITS = {
    "nll_token": "nats per token",
    "nll_sum": "nats over the whole reply",
    "nll_first": "nats per token over the first {k} tokens",
    "kl_token": "nats of KL per token",
    "on_policy": "in the judge's probability of harm",
}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#|~!:@$^])")


def visible(text: str, limit: int = MAX_SHOWN) -> str:
    """Text with every control, direction and unassigned character as a label: U+202E becomes ⟨U+202E⟩.

    Such characters could reorder or hide what is shown. Newlines and tabs stay; a very long text is cut, and says so.
    """
    cut = text[:limit]
    shown = "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else f"⟨U+{ord(c):04X}⟩" for c in cut)
    return f"{shown} … ({len(text) - limit:,} more characters)" if len(text) > limit else shown


def long_text(text: str) -> Markup:
    """A text of its own block: escaped, hidden characters visible, cut only when it is very long."""
    return escape(visible(text, MAX_TEXT))


def one_line(text: str, limit: int = 300) -> str:
    """`visible` on one line."""
    return visible(" ".join(text.split()), limit)


def markdown(text: str, limit: int = 300) -> str:
    """Text that Markdown and HTML both show as it is: no markup, no link, no table cell of its own."""
    shown = one_line(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return re.sub(r"(?i)\bwww\.", r"www\\.", _MARKDOWN.sub(r"\\\1", shown))


def unit_words(unit: str, first_k: int) -> str:
    """A degradation unit in words; an unknown one as it is."""
    return UNITS.get(unit, unit).format(k=first_k) if unit in UNITS else unit


def in_plain_words(tau: float, unit: str) -> str:
    """What a loss of tau nats means as a probability: exp(-tau) of it is left."""
    lost = percent(1 - math.exp(-tau))
    words = {
        "nll_token": f"each token of the reply is, on geometric average, {lost} less probable than before",
        "nll_first": f"each of the first tokens is, on geometric average, {lost} less probable than before",
        "nll_sum": f"the whole reply is {lost} less probable than before",
    }
    return words.get(unit, "")


def number(value: float) -> str:
    """A degradation or another plain number, three places after the point; what rounds to 0 has no sign."""
    if not math.isfinite(value):
        return "not a number"
    size = abs(value)
    if size >= 1e6:
        return f"{value:.1e}".replace("-", "−")
    short = f"{value:.3f}" if size < 100 else f"{value:,.1f}"
    return short.removeprefix("-") if size < 0.0005 else short.replace("-", "−")


def setting(value: float) -> str:
    """A number somebody chose, as short as it can be written."""
    return f"{value:g}".replace("-", "−")


def counted(n: int, one: str, many: str | None = None) -> str:
    """`1 example`, `2 examples`."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
