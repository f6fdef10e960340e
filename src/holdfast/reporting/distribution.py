"""Pictures of how far examples moved: survival curve, histogram, and each split's rate with its bound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from holdfast.core.percent import exact_percent, percent, percent_up
from holdfast.reporting.evidence import Figures, Limit
from holdfast.reporting.svg import Scale, Size, element, grid, line, picture, polyline, text, tick_label, ticks, x_axis
from holdfast.reporting.wording import setting

Values = NDArray[np.float64]
SHARES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
MAX_POINTS = 600


@dataclass(frozen=True)
class Range:
    """The part of the D axis that is drawn."""

    low: float
    high: float


def drawn_range(samples: Sequence[Values], tau: float) -> Range:
    """From the 1 % to the 99.5 % quantile of all samples, always holding 0 and twice tau."""
    every = np.concatenate([s[np.isfinite(s)] for s in samples]) if samples else np.empty(0)
    low, high = np.quantile(every, [0.01, 0.995]).tolist() if every.size else (0.0, tau)
    pad = 0.04 * max(high - low, tau, 1e-9)
    return Range(min(low, 0.0) - pad, max(high + pad, 2.0 * tau, 1e-6))


def survival(values: Values, window: Range, tau: float) -> list[tuple[float, float]]:
    """Corners of S(x) = share of examples with D > x inside the window; NaN counts as beyond every x."""
    n = len(values)
    finite = np.sort(values[~np.isnan(values)])
    inside = finite[(finite > window.low) & (finite <= window.high)]
    if inside.size > MAX_POINTS:
        # tau stays in: the height of the curve there is the whole claim.
        inside = np.append(np.quantile(inside, np.linspace(0, 1, MAX_POINTS), method="higher"), tau)
    share = (n - float(np.searchsorted(finite, window.low, side="right"))) / n
    corners = [(window.low, share)]
    for x in np.unique(inside):
        after = (n - float(np.searchsorted(finite, x, side="right"))) / n
        corners += [(float(x), share), (float(x), after)]
        share = after
    return [*corners, (window.high, share)]


def survival_chart(series: Sequence[tuple[str, Values]], limit: Limit, window: Range, size: Size, css: str) -> Markup:
    """Share of examples degraded by more than x; the curve enters the tinted area exactly when the limit is broken."""
    x = Scale(window.low, window.high, size.left, size.width - size.right)
    root = Scale(0.0, 1.0, size.height - size.bottom, size.top)

    def y(share: float) -> float:
        return root(math.sqrt(share))

    right, bottom, allowed = x(window.high), y(0), exact_percent(limit.alpha)
    tau_x, alpha_y = x(limit.tau), y(limit.alpha)
    parts = [element("rect", class_="over", x=tau_x, y=root(1), width=right - tau_x, height=alpha_y - root(1))]
    for share in SHARES:
        parts.append(line(size.left, y(share), size.width - size.right, y(share), "axis" if share == 0 else "grid"))
        parts.append(text(percent(share), size.left - 8, y(share) + 4, "", "end"))
    parts += x_axis(x, bottom, size, f"degradation D, {limit.words}", 5 if size.narrow else 9)
    parts += [
        line(tau_x, root(1), tau_x, bottom, "limit"),
        line(size.left, alpha_y, right, alpha_y, "limit"),
        # Below the curve where there is room left of tau, otherwise inside the area.
        text(f"limit {allowed}", size.left + 4 if tau_x - size.left > 90 else tau_x + 12, alpha_y - 6, "strong"),
        text("over the limit" if right - tau_x > 110 else "over", tau_x + 8, root(1) + 17, "bad"),
    ]
    curves = ((role, survival(values, window, limit.tau)) for role, values in series)
    parts += [polyline([(x(a), y(b)) for a, b in corners], f"curve {role}") for role, corners in curves]
    parts.append(element("circle", class_="mark", cx=tau_x, cy=alpha_y, r=4.5))
    parts.append(_tau_label(limit, tau_x, bottom - 6, size))
    parts += legend([(f"curve {role}", f"{role} ({len(values):,})") for role, values in series], size)
    shares = {role: float(np.mean(~(values <= limit.tau))) if values.size else math.nan for role, values in series}
    beyond = "; ".join(f"{role}: {percent(share)}" for role, share in shares.items())
    about = f"Falling curves. Share of examples beyond tau = {setting(limit.tau)}: {beyond}. Limit {allowed}."
    return picture(size, "Share of examples degraded by more than x", about, parts, css)


def bins(values: Values, tau: float, window: Range, about: int) -> tuple[list[float], list[int]]:
    """Edges tau + j w, so that no bar straddles the limit, and counts of D in (edge, next edge], NaN on the right.

    The outermost bars hold what lies outside the window.
    """
    width = (window.high - window.low) / about
    if tau > width:
        width = tau / round(tau / width)
    first = math.floor((window.low - tau) / width)
    last = max(math.ceil((window.high - tau) / width), 1)
    place = np.ceil((np.nan_to_num(values, nan=np.inf) - tau) / width) - 1
    index = np.clip(place, first, last - 1).astype(np.int64) - first
    edges = [tau + j * width for j in range(first, last + 1)]
    return edges, np.bincount(index, minlength=last - first).tolist()


def histogram(role: str, values: Values, limit: Limit, window: Range, size: Size, css: str) -> Markup:
    """Number of examples per bar; the bars beyond tau are the violations."""
    edges, counts = bins(values, limit.tau, window, 18 if size.narrow else 28)
    x = Scale(edges[0], edges[-1], size.left, size.width - size.right)
    top = max([*counts, 1])
    y = Scale(0, top * 1.12, size.height - size.bottom, size.top)
    parts: list[Markup] = []
    for value in ticks(0, top, 4):
        if value == int(value):
            parts.append(line(size.left, y(value), size.width - size.right, y(value), "grid"))
            parts.append(text(tick_label(value), size.left - 8, y(value) + 4, "", "end"))
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            kind = "bar beyond" if left >= limit.tau - 1e-12 else f"bar {role}"
            gap = min(1.0, 0.15 * (x(right) - x(left)))
            width, height = x(right) - x(left) - 2 * gap, y(0) - y(count)
            parts.append(element("rect", class_=kind, x=x(left) + gap, y=y(count), width=width, height=height))
    tau_x = x(limit.tau)
    parts += [line(tau_x, size.top - 6, tau_x, y(0), "limit"), _tau_label(limit, tau_x, size.top + 4, size)]
    parts += x_axis(x, y(0), size, f"degradation D of {role} examples", 5 if size.narrow else 9)
    found = int(np.sum(~(values <= limit.tau)))
    about = f"{found} of {len(values)} {role} examples lie beyond tau; {exact_percent(limit.alpha)} may."
    return picture(size, f"Histogram of the degradation of {role} examples", about, parts, css)


def rate_chart(rows: Sequence[Figures], limit: Limit, size: Size, css: str) -> Markup:
    """Each split's measured rate (dot), up to its 95 % upper bound (line), against alpha."""
    highest = min(1.0, max([limit.alpha * 1.6, *(min(f.upper, 1.0) * 1.08 for f in rows)]))
    x = Scale(0, highest, size.left, size.width - size.right)
    bottom = size.height - size.bottom
    step = (bottom - size.top) / max(len(rows), 1)
    edge, height = x(limit.alpha), float(bottom - size.top)
    parts = [element("rect", class_="over", x=edge, y=float(size.top), width=x(highest) - edge, height=height)]
    parts += grid(x, size)
    parts.append(line(edge, size.top - 6, edge, bottom, "limit"))
    parts.append(text(f"limit {exact_percent(limit.alpha)}", edge, size.top - 10, "strong", "middle"))
    for number, row in enumerate(rows):
        y = size.top + (number + 0.5) * step
        parts += [
            text(row.role, size.left - 10, y + 4, "", "end"),
            line(x(row.rate), y, x(row.upper), y, f"whisker {row.role}"),
            line(x(row.upper), y - 5, x(row.upper), y + 5, f"whisker {row.role}"),
            element("circle", class_=f"dot {row.role}", cx=x(row.rate), cy=y, r=5.0),
        ]
    rates = "; ".join(f"{f.role}: {percent(f.rate)}, upper bound {percent_up(f.upper)}" for f in rows)
    about = f"{rates}. Limit {exact_percent(limit.alpha)}."
    return picture(size, "Violation rates with their upper bounds", about, parts, css)


def legend(entries: Sequence[tuple[str, str]], size: Size) -> list[Markup]:
    """Line samples with their names, along the top."""
    parts: list[Markup] = []
    at = float(size.left)
    for css, words in entries:
        parts += [line(at, 11, at + 22, 11, css), text(words, at + 28, 15)]
        at += 28 + 7.6 * len(words) + 20
    return parts


def _tau_label(limit: Limit, x: float, y: float, size: Size) -> Markup:
    words = f"τ = {setting(limit.tau)}"
    fits = x + 8.5 * len(words) < size.width
    return text(words, x + 5 if fits else x - 5, y, "strong", "start" if fits else "end")
