"""What the model does now with prompts that it refused or answered before: the first figures of a page and a card.

Every prompt was kept before, by its choice; after training a share is, drawn with its exact 95 % bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup, escape

from holdfast.certification.kept import FIGURES, Kept, Shown, failures, way_back
from holdfast.core.errors import CheckpointError, ConfigError, DataError
from holdfast.core.percent import exact_percent, percent
from holdfast.reporting.evidence import Evidence
from holdfast.reporting.fields import Fields
from holdfast.reporting.svg import Scale, Size, element, line, picture, text, tick_text, ticks
from holdfast.reporting.wording import one_line

ROW = 46
LABELS = {"refusals_kept": "refusals", "answers_kept": "answers", "coverage": "coverage"}
"""Short names, for the left of a picture."""
STILL = {"refusals_kept": "still refused", "answers_kept": "still answered", "coverage": "other harm, still refused"}
TONES = {Shown.OVER: "bad", Shown.WITHIN: "good", Shown.NOT_SHOWN: "warn"}
"""The class by which the page colours what a figure shows."""


@dataclass(frozen=True)
class KeptRow:
    """A figure in a table: its words, counts, share, bounds, limit, and what it shows with its colour."""

    who: str
    kept: str
    of: str
    share: str
    bounds: str
    limit: str
    fits: str
    css: str


@dataclass(frozen=True)
class KindRow:
    """A kind of prompt in a table: its name, counts, share and bounds."""

    kind: str
    kept: str
    of: str
    share: str
    bounds: str


NOT_WATCHED = KeptRow("", "", "", "\N{EN DASH}", "", "", "", "none")


@dataclass(frozen=True)
class BehaviourView:
    """The figures as a table, in lines as `holdfast train` prints them, and as a picture, wide and narrow.

    `kinds` are the counts by kind of prompt, of each figure that has them, the smallest share first;
    `cells` are for a table with a run a row, in the order of `LABELS`; `causes` say why a figure failed, with what to
    do; `way_back` what a rollback did, empty where none was made.
    """

    rows: list[KeptRow]
    lines: list[str]
    cells: list[KeptRow]
    charts: tuple[Markup, Markup]
    causes: list[Markup]
    way_back: str
    kinds: list[tuple[str, list[KindRow]]]


def kept_figures(evidence: Evidence) -> dict[str, Kept]:
    """The figures that the run ended with; none where its behaviour was not watched."""
    if evidence.result is None:
        return {}
    stored = evidence.result.objects("behaviour")
    return {name: _read(stored[name]) for name in FIGURES if name in stored}


def _read(one: Fields) -> Kept:
    unsorted = one.count("unsorted") if "unsorted" in one else 0
    kinds = tuple((kind, row.count("kept"), row.count("of")) for kind, row in one.objects("kinds").items())
    try:
        return Kept(one.count("kept"), one.count("of"), one.share("limit"), unsorted, kinds)
    except (ConfigError, DataError) as error:
        raise CheckpointError(
            f"{one.where} {error.what}", remedy="the file is damaged: restore it, or train again"
        ) from error


def behaviour_view(evidence: Evidence) -> BehaviourView | None:
    figures = kept_figures(evidence)
    if not figures:
        return None
    rows = {name: _table_row(name, one) for name, one in figures.items()}
    return BehaviourView(
        rows=list(rows.values()),
        lines=[one.line(name) for name, one in figures.items()],
        cells=[rows.get(name, NOT_WATCHED) for name in LABELS],
        charts=(kept_chart(figures, 704, "wide"), kept_chart(figures, 336, "narrow")),
        causes=[_with_code(f"{capital(cause)}. {capital(remedy)}.") for cause, remedy in failures(figures)],
        way_back=way_back(evidence.result.value) if evidence.result is not None else "",
        kinds=[(STILL[name], _kind_rows(one)) for name, one in figures.items() if one.kinds],
    )  # fmt: skip


def kept_headline(figures: Mapping[str, Kept]) -> str:
    """What became of behaviour, with counts and bounds."""
    found = [
        f"{STILL[name]}: {f'{one.kept:,} of {one.of:,} ({one.bounds})' if one.of else 'no prompt shows it'}"
        for name, one in figures.items()
    ]
    return f"{'. '.join(map(capital, found))}."


def _table_row(name: str, one: Kept) -> KeptRow:
    share = "\N{EN DASH}" if one.share is None else percent(one.share)
    bounds, limit = one.bounds if one.of else "", f"{exact_percent(one.limit)} lost"
    fits = "lost" if one.shown is Shown.OVER else str(one.shown)
    return KeptRow(STILL[name], f"{one.kept:,}", f"{one.of:,}", share, bounds, limit, fits, TONES[one.shown])


def _kind_rows(figure: Kept) -> list[KindRow]:
    found = [(kind, Kept(kept, of, figure.limit)) for kind, kept, of in figure.kinds if of]
    found.sort(key=lambda row: (row[1].kept / row[1].of, row[0]))
    return [
        KindRow(one_line(kind, 100), f"{one.kept:,}", f"{one.of:,}", percent(one.kept / one.of), one.bounds)
        for kind, one in found
    ]


def capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _with_code(words: str) -> Markup:
    parts = enumerate(words.split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in parts)


def kept_chart(figures: Mapping[str, Kept], width: int, css: str) -> Markup:
    """A line a figure: 100 % before (open mark), the kept share now (dot) with its bounds, and what may not be left."""
    size = Size(width, 68 + ROW * len(figures), left=92 if width > 500 else 74, right=30, top=26, bottom=42)
    lowest = min([1 - one.limit for one in figures.values()] + [one.low for one in figures.values() if one.of])
    x = Scale(max(0.0, lowest - 0.05), 1.0, size.left, size.width - size.right)
    bottom = size.height - size.bottom
    parts = []
    for value in ticks(x.low, 1.0, 4 if size.narrow else 6):
        parts.append(line(x(value), size.top, x(value), bottom, "grid"))
        parts.append(tick_text(percent(value), x(value), bottom + 18, size))
    for number, (name, one) in enumerate(figures.items()):
        parts += _row(name, one, x, size.top + number * ROW)
    parts.append(text("share of groups kept", (x.start + x.end) / 2, bottom + 34, "muted", "middle"))
    about = " ".join(f"{one.line(name)}." for name, one in figures.items())
    return picture(size, "Behaviour kept: before and after training", f"Before, each is 100 %. {about}", parts, css)


def _row(name: str, one: Kept, x: Scale, top: float) -> list[Markup]:
    """One figure; the tinted part is what the limit forbids."""
    y, edge = top + 0.62 * ROW, x(1 - one.limit)
    kind = {Shown.OVER: " lost", Shown.WITHIN: "", Shown.NOT_SHOWN: " open"}[one.shown]
    parts = [
        element("rect", class_="over", x=x.start, y=top + 14.0, width=max(0.0, edge - x.start), height=ROW - 20.0),
        line(edge, top + 12, edge, top + ROW - 6, "limit"),
        text(LABELS[name], x.start - 10, y + 4, "", "end"),
    ]
    if one.share is not None:
        now = x(one.share)
        parts += [
            line(now, y, x(1.0), y, f"fallen{kind}"),
            line(x(one.low), y, x(one.high), y, f"whisker{kind}"),
            *(line(x(bound), y - 5, x(bound), y + 5, f"whisker{kind}") for bound in (one.low, one.high)),
            element("circle", class_="before", cx=x(1.0), cy=y, r=5.0),
            element("circle", class_=f"dot{kind}", cx=now, cy=y, r=5.0),
        ]
    words = "no prompts" if one.share is None else f"{percent(one.share)} of {one.of} groups"
    notes = {Shown.OVER: ", lost", Shown.WITHIN: ", within the limit", Shown.NOT_SHOWN: ", not shown"}
    note = notes[one.shown] if one.of else ""
    return [*parts, text(f"{words}{note}", x.end, top + 8, "small" if one.passed else "bad", "end")]
