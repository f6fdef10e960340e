"""The generated blocks of one page: tables, the paper's order, a second study's rows, figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.study_page import verdicts
from tools.study_page.missing import Wanted, missing_line
from tools.study_page.page import Marked
from tools.study_page.replicated import replicated

from holdfast.core.errors import ConfigError
from holdfast.core.registry import nearest
from holdfast_lab.study.cells import expand
from holdfast_lab.study.config import load_study
from holdfast_lab.tables.figures import figures
from holdfast_lab.tables.formats import Style, markdown
from holdfast_lab.tables.formats import escape_markdown as escape
from holdfast_lab.tables.kinds import KINDS
from holdfast_lab.tables.lines import Line
from holdfast_lab.tables.reported import Reported, beside
from holdfast_lab.tables.results import Result, read_results

OWN = {
    "pareto": verdicts.pareto, "pairs": verdicts.pairs, "slopes": verdicts.slopes, "bounds": verdicts.bounds,
    "headline": verdicts.headline,
}  # fmt: skip
ROWS = {"primal_dual": ("holdfast", "primal_dual")}
"""Tables of a few defenses: of a study, only their cells are looked for."""
NOTHING = "No cell of this kind has been measured yet."
NOT_BESIDE = "No row of this table can be compared with the paper's figures yet."


@dataclass
class BlockMaker:
    """Makes the blocks of one page; keeps its pictures and the blocks that were left alone."""

    page: Path
    results: Sequence[Result]
    reported: Reported | None
    pictures: dict[Path, bytes] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    listed: set[tuple[str, bool]] = field(default_factory=set)

    def __call__(self, block: Marked) -> str | None:
        """The text of a block; None leaves it as it is."""
        make = {"table": self._table, "paper": self._paper, "figures": self._figures, "replicated": self._replicated}
        return make[block.kind](block)

    def _table(self, block: Marked) -> str:
        self._require_known(block, [*KINDS, *OWN])
        if block.name in OWN:
            text = OWN[block.name](self.results)
        else:
            text = "\n".join(markdown(table, Style(intervals=True)) for table in KINDS[block.name](self.results))
        return "\n\n".join(part.strip("\n") for part in (text or NOTHING, self._missing(block)) if part)

    def _require_known(self, block: Marked, names: Iterable[str]) -> None:
        if block.name not in names:
            what = f"{self.page}:{block.line}: unknown table {block.name!r}"
            raise ConfigError(what, remedy=nearest(block.name, list(names)))

    def _missing(self, block: Marked) -> str:
        if block.study is None:
            return ""
        if not (file := self.page.parent / block.study).is_file():
            raise ConfigError(
                f"{self.page}:{block.line}: there is no study file {file}",
                remedy="name it by its path from the page: <!-- table: main of ../studies/main.yaml -->",
            )
        wanted, study = _wanted(file), block.study.removeprefix("../")
        few = ROWS.get(block.name)
        if few is not None:
            wanted, study = [cell for cell in wanted if cell.defense in few], f"these rows in {study}"
        key = (block.study, few is None)
        again, self.listed = key in self.listed, self.listed | {key}
        return missing_line(wanted, {result.cell for result in self.results}, study, again=again)

    def _paper(self, block: Marked) -> str | None:
        """Rank correlations alone: the paper's figures are read at report time and are part of no page."""
        if self.reported is None or not any(self.reported.counterpart(result.model) for result in self.results):
            self.left.append(f"{self.page.name}:{block.line}")
            return None
        self._require_known(block, KINDS)
        tables = KINDS[block.name](self.results)
        lines = []
        for table in tables:
            title = f"{table.title}: " if len(tables) > 1 else ""
            for line in beside(table, self.reported).notes:
                if line not in table.notes:
                    lines.append(f"- {escape(title + line if line.startswith('order of') else line)}")
        return "\n".join(dict.fromkeys(lines)) or NOT_BESIDE

    def _replicated(self, block: Marked) -> str:
        folder, where = self.page.parent / block.name, f"{self.page}:{block.line}"
        if block.study is not None or not folder.is_dir():
            what = "takes no study" if block.study is not None else f"{folder} is not a folder"
            raise ConfigError(
                f"{where}: replicated: {what}",
                remedy="name the results of another study, by their path from the page: <!-- replicated: FOLDER -->",
            )
        return replicated(read_results(folder), self.results).strip("\n")

    def _figures(self, block: Marked) -> str:
        lines = []
        for picture in figures(self.results):
            self.pictures[self.page.parent / block.name / f"{picture.name}.png"] = picture.png
            lines.append(f"![{picture.name.partition('-')[0].replace('_', ' ')}]({block.name}/{picture.name}.png)")
        return "\n\n".join(lines) or NOTHING


def _wanted(file: Path) -> list[Wanted]:
    """The cells that a study file asks for."""
    wanted = []
    for cell in expand(load_study(file)):
        row = Line(cell.defense.name, cell.defense.label, cell.defense.setting, cell.align).title
        wanted.append(Wanted(cell.id, cell.task, row, cell.defense.name, cell.poison_ratio, cell.seed))
    return wanted
