"""`report`: a page and a model card from run folders."""

from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.reporting.card import Card, write_cards
from holdfast.reporting.page import FILE_NAME, write_report
from holdfast.reporting.read import read_evidence
from holdfast.reporting.views import RunView


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        path: the page.
        runs: what it says of each run: `label`, `claim`, and `verdict` with its title and reason.
        cards: the model cards; one with a user's own text is kept.
    """

    path: Path
    runs: list[RunView]
    cards: list[Card]


def report(*runs: str | Path, output: str | Path | None = None, text: bool = True) -> Report:
    """Write report.html, which needs no network and no script, and model cards; several runs stand side by side.

    Args:
        runs: run folders, or output folders of an audit or certification.
        output: the page; report.html in the first folder.
        text: whether the page holds the text of examples, hidden until clicked.
    """
    if not runs:
        raise ConfigError("report() has no run", remedy="give the folder of a run: report('runs/first')")
    evidence = [read_evidence(Path(folder)) for folder in runs]
    path = Path(runs[0]) / FILE_NAME if output is None else Path(output)
    views = write_report(evidence, path, text=text)
    return Report(path, views, [card for one in evidence for card in write_cards(one)])
