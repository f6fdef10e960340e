"""Numbers and hostile text as a reader may see them."""

import math
import re
import unicodedata

from markupsafe import Markup, escape

from holdfast.core.percent import percent
from holdfast.core.units import KL_UNITS

MAX_SHOWN = 2_000
MAX_TEXT = 20_000
UNITS = {
    "nll_token": "nats per token",
    "nll_sum": "nats over the whole reply",
    "nll_first": "nats per token over the first {k} tokens",
    "kl_token": "nats of KL per token",
    "kl_first": "nats of KL per token over the first {k} tokens",
    "on_policy": "in the judge's probability of harm",
}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#|~!:@$^])")


def visible(text: str, limit: int = MAX_SHOWN) -> str:
    """Text with each character that could reorder or hide what is shown as a label: U+202E becomes ⟨U+202E⟩."""
    cut = text[:limit]
    shown = "".join(c if c in "\n\t" or unicodedata.category(c) not in _HIDDEN else f"⟨U+{ord(c):04X}⟩" for c in cut)
    return f"{shown} … ({len(text) - limit:,} more characters)" if len(text) > limit else shown


def long_text(text: str) -> Markup:
    """A text of its own block: escaped, hidden characters visible, cut only when it is very long."""
    return escape(visible(text, MAX_TEXT))


def one_line(text: str, limit: int = 300) -> str:
    return visible(" ".join(text.split()), limit)


def markdown(text: str, limit: int = 300) -> str:
    """Text that Markdown and HTML both show as it is: no markup, no link, no table cell of its own."""
    shown = one_line(text, limit).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    return re.sub(r"(?i)\bwww\.", r"www\\.", _MARKDOWN.sub(r"\\\1", shown))


def unit_words(unit: str, first_k: int) -> str:
    """A degradation unit in words; an unknown one as it is."""
    return UNITS.get(unit, unit).format(k=first_k) if unit in UNITS else unit


def degraded_means(tau: float, unit: str, first_k: int) -> str:
    """What "degraded" means in a unit; a loss of tau nats leaves exp(-tau) of a probability."""
    amount, lost = f"more than {setting(tau)} {unit_words(unit, first_k)}", percent(1 - math.exp(-tau))
    whose = {
        "nll_token": "each token of the reply is, on geometric average,",
        "nll_first": "each of the first tokens is, on geometric average,",
        "nll_sum": "the whole reply is",
    }
    if unit in whose:
        return f"the safe reply became {amount} less likely: {whose[unit]} {lost} less probable than before"
    return {
        "kl_token": f"the predictions along the safe reply moved by {amount}",
        "kl_first": f"the predictions at the start of the safe reply moved by {amount}",
        "on_policy": f"the judge's probability that the model's own reply is harmful rose by more than {setting(tau)}",
        "refusals": "a refusal of the model before was lost",
    }.get(unit, f"the example lost {amount}")


def scale_words(unit: str) -> str:
    """Where D is unchanged and where it is better: a divergence has no better side."""
    better = "a divergence is never below 0" if unit in KL_UNITS else "below 0 is better"
    return f"0 is unchanged, {better}"


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
    return f"{n:,} {one if n == 1 else many or one + 's'}"
