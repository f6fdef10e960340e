"""`holdfast report FOLDER --tables --page PAGE.md`: the generated parts of a page, and its figures, from results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.terminal import note, say, say_json
from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.tables.missing import Wanted
    from holdfast.tables.page import Marked
    from holdfast.tables.reported import Reported
    from holdfast.tables.results import Result

ROWS = {"primal_dual": ("holdfast", "primal_dual")}
"""Tables of a few defenses: of a study, only their cells are looked for."""
NOTHING = "No cell of this kind has been measured yet."
NOT_BESIDE = "Nothing of this table stands beside the paper's figures yet."


def write_pages(pages: Sequence[Path], results: Sequence[Result], reported: Reported | None, *, json: bool) -> None:
    """Replace the generated blocks of every page; everything is made before the first byte is written."""
    content: dict[Path, bytes] = {}
    left: list[str] = []
    for page in pages:
        maker = _Maker(page, results, reported)
        content[page] = _regenerated(page, maker).encode()
        content |= maker.pictures
        left += maker.left
    _write(content)
    if json:
        say_json({"files": [str(path) for path in content], "left": left})
        return
    for path in content:
        say(str(path))
    if left:
        note(f"note: left as they stand without the paper's figures: {', '.join(left)}; give --reported")


def _regenerated(page: Path, maker: _Maker) -> str:
    from holdfast.tables.page import regenerate

    if not page.is_file():
        raise ConfigError(
            f"--page {page} is not a file",
            remedy="write the page first, with `<!-- table: main -->` and `<!-- end -->`",
        )
    return regenerate(page.read_text(encoding="utf-8"), str(page), maker)


def _write(content: dict[Path, bytes]) -> None:
    from holdfast.core.files import write_bytes

    for path, data in content.items():
        write_bytes(path, data)


@dataclass
class _Maker:
    """Makes the blocks of one page; keeps its pictures and the blocks that were left alone."""

    page: Path
    results: Sequence[Result]
    reported: Reported | None
    pictures: dict[Path, bytes] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    listed: set[tuple[str, bool]] = field(default_factory=set)

    def __call__(self, block: Marked) -> str | None:
        kinds: dict[str, Callable[[Marked], str | None]] = {
            "table": self._table, "paper": self._paper, "figures": self._figures, "replicated": self._replicated,
        }  # fmt: skip
        return kinds[block.kind](block)

    def _table(self, block: Marked) -> str:
        from holdfast.tables import verdicts

        own = {
            "pareto": verdicts.pareto, "pairs": verdicts.pairs, "slopes": verdicts.slopes,
            "bounds": verdicts.bounds, "headline": verdicts.headline,
        }  # fmt: skip
        text = own[block.name](self.results) if block.name in own else self._built(block, list(own))
        return "\n\n".join(part.strip("\n") for part in (text or NOTHING, self._missing(block)) if part)

    def _built(self, block: Marked, own: list[str]) -> str:
        from holdfast.tables.build import BUILDERS
        from holdfast.tables.layout import Style
        from holdfast.tables.markdown import markdown

        self._require_known(block, [*BUILDERS, *own])
        return "\n".join(markdown(table, Style(intervals=True)) for table in BUILDERS[block.name](self.results))

    def _require_known(self, block: Marked, names: Iterable[str]) -> None:
        from holdfast.core.registry import nearest

        if block.name not in names:
            what = f"{self.page}:{block.line}: unknown table {block.name!r}"
            raise ConfigError(what, remedy=nearest(block.name, list(names)))

    def _missing(self, block: Marked) -> str:
        from holdfast.tables.missing import missing_line

        if block.study is None:
            return ""
        if not (file := self.page.parent / block.study).is_file():
            raise ConfigError(
                f"{self.page}:{block.line}: there is no study file {file}",
                remedy="name it by its path from the page: <!-- table: main of ../studies/main.yaml -->",
            )
        there = {result.cell for result in self.results}
        wanted, study = _wanted(self.page.parent / block.study), block.study.removeprefix("../")
        few = ROWS.get(block.name)
        if few is not None:
            wanted, study = [one for one in wanted if one.defense in few], f"these rows in {study}"
        key = (block.study, few is None)
        again, self.listed = key in self.listed, self.listed | {key}
        return missing_line(wanted, there, study, again=again)

    def _paper(self, block: Marked) -> str | None:
        """Rank correlations alone: the paper's figures are read at report time and are part of no page."""
        from holdfast.tables.agreement import beside
        from holdfast.tables.build import BUILDERS
        from holdfast.tables.markdown import escape

        if self.reported is None or not any(self.reported.counterpart(result.model) for result in self.results):
            self.left.append(f"{self.page.name}:{block.line}")
            return None
        self._require_known(block, BUILDERS)
        tables = BUILDERS[block.name](self.results)
        lines = []
        for table in tables:
            new = [line for line in beside(table, self.reported).notes if line not in table.notes]
            told = f"{table.title}: " if len(tables) > 1 else ""
            lines += [f"- {escape(told + line if line.startswith('order of') else line)}" for line in new]
        return "\n".join(dict.fromkeys(lines)) or NOT_BESIDE

    def _replicated(self, block: Marked) -> str:
        from holdfast.tables.replicated import replicated
        from holdfast.tables.results import read_results

        folder, where = self.page.parent / block.name, f"{self.page}:{block.line}"
        if block.study is not None or not folder.is_dir():
            what = "takes no study" if block.study is not None else f"{folder} is not a folder"
            raise ConfigError(
                f"{where}: replicated: {what}",
                remedy="name the results of another study, by their path from the page: <!-- replicated: FOLDER -->",
            )
        return replicated(read_results(folder), self.results).strip("\n")

    def _figures(self, block: Marked) -> str:
        from holdfast.tables.figures import figures

        lines = []
        for picture in figures(self.results):
            self.pictures[self.page.parent / block.name / f"{picture.name}.png"] = picture.png
            lines.append(f"![{picture.name.partition('-')[0].replace('_', ' ')}]({block.name}/{picture.name}.png)")
        return "\n\n".join(lines) or NOTHING


def _wanted(file: Path) -> list[Wanted]:
    """The cells that a study file asks for."""
    from holdfast.study.expand import expand
    from holdfast.study.load import load_study
    from holdfast.tables.lines import Line
    from holdfast.tables.missing import Wanted

    found = []
    for cell in expand(load_study(file)):
        line = Line(cell.defense.name, cell.defense.label, cell.defense.setting, cell.align)
        found.append(Wanted(cell.id, cell.task, line.title, cell.defense.name, cell.poison_ratio, cell.seed))
    return found
