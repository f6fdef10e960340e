"""Drawing in SVG text: elements, linear scales, round ticks. Numbers and fixed words only, all of them escaped."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup, escape

from holdfast.core.percent import percent

MINUS = "−"


@dataclass(frozen=True)
class Size:
    """Outer size and margins in the units of the drawing, which are pixels at full width."""

    width: int
    height: int
    left: int = 52
    right: int = 16
    top: int = 30
    bottom: int = 44

    @property
    def narrow(self) -> bool:
        return self.width < 500


@dataclass(frozen=True)
class Scale:
    """Linear map of [low, high] onto [start, end]; values outside are clipped to the ends."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = 0.5 if span <= 0 else (value - self.low) / span
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def element(name: str, *children: str, **attributes: float | str) -> Markup:
    """One SVG element; `class_` is `class`, underscores are hyphens, floats have two decimals."""
    parts = [Markup("<{}").format(name)]
    for key, value in attributes.items():
        shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        parts.append(Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), shown))
    inside = Markup("").join(escape(child) for child in children)
    return Markup("").join(parts) + Markup(">{}</{}>").format(inside, name)


def text(words: str, x: float, y: float, css: str = "", anchor: str = "start") -> Markup:
    return element("text", words, class_=f"t {css}".strip(), x=x, y=y, text_anchor=anchor)


def tick_text(words: str, x: float, y: float, size: Size) -> Markup:
    """A label centred under its tick, moved inwards where it would leave the drawing."""
    half = 3.9 * len(words)
    return text(words, min(max(x, half + 1), size.width - half - 1), y, "", "middle")


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return element("line", class_=css, x1=x1, y1=y1, x2=x2, y2=y2)


def polyline(points: Iterable[tuple[float, float]], css: str) -> Markup:
    placed = [f"{x:.1f},{y:.1f}" for x, y in points]
    return element("polyline", class_=css, points=" ".join(placed)) if len(placed) > 1 else Markup("")


def picture(size: Size, title: str, description: str, children: Iterable[Markup], css: str) -> Markup:
    """The whole drawing with its text for those who cannot see it."""
    about, view_box = (element("title", title), element("desc", description)), f"0 0 {size.width} {size.height}"
    return element("svg", *about, *children, class_=f"chart {css}", viewBox=view_box, role="img")


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) inside [low, high], about so many."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    raw = span / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_label(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-").replace("-", MINUS)
    return f"{value:,.6g}".replace("-", MINUS)


def grid(x: Scale, size: Size) -> list[Markup]:
    """Upright lines at round shares from the top margin to the bottom one, and the shares below them."""
    y, values = size.height - size.bottom, ticks(x.low, x.high, 4 if size.narrow else 6)
    marks = ((line(x(v), size.top, x(v), y, "grid"), tick_text(percent(v), x(v), y + 18, size)) for v in values)
    return [part for both in marks for part in both]


def x_axis(x: Scale, y: float, size: Size, words: str, about: int, *, whole: bool = False) -> list[Markup]:
    """A line at the height `y` with about so many labels, only `whole` numbers on request, and words below."""
    parts = [line(size.left, y, size.width - size.right, y, "axis")]
    for value in ticks(x.low, x.high, about):
        if not whole or value == int(value):
            parts += [line(x(value), y, x(value), y + 4, "axis"), tick_text(tick_label(value), x(value), y + 17, size)]
    return [*parts, text(words, (size.left + size.width - size.right) / 2, y + 36, "muted", "middle")]
