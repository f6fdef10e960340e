"""Which results make one row, what the row is called, and in which order rows stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.tables.results import REFERENCES, Result
from holdfast.tables.wording import defense_place, defense_title


@dataclass(frozen=True)
class Line:
    """A row to be: the results with this defense, label, setting and alignment.

    `shown` replaces its title, and `told` the setting that formats print: a default that stands in a sweep.
    """

    defense: str
    label: str
    setting: str
    align: str
    shown: str = ""
    told: str = ""

    @classmethod
    def of(cls, result: Result) -> Line:
        """The row that a result belongs to."""
        return cls(result.defense, result.label, result.setting, result.align)

    @property
    def title(self) -> str:
        """The study's own label or the defense's name, then its setting and an alignment that is not its own."""
        if self.shown:
            return self.shown
        named = self.label != self.defense
        if self.defense == "aligned" and not named:
            return f"Aligned ({defense_title(self.align)})"
        title = self.label if named else defense_title(self.defense)
        foreign = not self.is_reference and self.align not in ("sft", self.defense)
        return (
            title
            + (f", {self.setting}" if self.setting else "")
            + (f" on {defense_title(self.align)}-aligned" if foreign else "")
        )

    @property
    def is_reference(self) -> bool:
        """Whether this is a model before fine-tuning."""
        return self.defense in REFERENCES

    @property
    def is_plain(self) -> bool:
        """Whether this row belongs in the tables of defenses: default settings, on its usual alignment."""
        usual = ("sft",) if self.defense == "aligned" else ("sft", self.defense)
        return not self.setting and (self.align in usual or self.defense == "base")

    def holds(self, result: Result) -> bool:
        """Whether the result belongs to this row."""
        return (
            result.defense == self.defense
            and result.label == self.label
            and result.setting == self.setting
            and result.align == self.align
        )

    def describe(self) -> str:
        """Defense, setting and alignment, for errors."""
        return f"{self.defense} {self.setting}".strip() + f" on {self.align}"


def lines_of(results: Iterable[Result]) -> list[Line]:
    """The rows of some results: references, then the paper's order, then others; own labels after the plain one."""
    return sorted({Line.of(result) for result in results}, key=_order)


def _order(line: Line) -> tuple[Any, ...]:
    """A total order: what is left to a set's own order changes from one process to the next."""
    alignment = (line.align != "sft", defense_place(line.align), line.align)
    own = (line.label != line.defense, line.label, line.setting)
    return (defense_place(line.defense), line.defense, *alignment, *own)


def plain(results: Iterable[Result]) -> list[Result]:
    """The results whose rows belong in the tables of defenses."""
    return [result for result in results if Line.of(result).is_plain]
