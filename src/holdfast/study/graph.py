"""The work of a study in the order of its dependencies: alignments, and cells that start from them."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.study.cells import Alignment, Cell


@dataclass(frozen=True)
class Node:
    """One piece of work for one process.

    Attributes:
        id: of the alignment, or of the cells' common work.
        alignment: what is aligned, or what the cells start from; None for the base model.
        cells: the cells that this work answers; none for an alignment.
        needs: the node that must have succeeded before.
        after: a node that must have ended before, well or not: both fill one store of replies.
    """

    id: str
    alignment: Alignment | None
    cells: tuple[Cell, ...] = ()
    needs: str | None = None
    after: str | None = None

    @property
    def is_alignment(self) -> bool:
        """Whether this aligns a model rather than answering cells."""
        return not self.cells


def build_graph(cells: list[Cell]) -> list[Node]:
    """Nodes such that each comes after those it depends on; every alignment and every piece of work once.

    An alignment stands right before the first cell that needs it, so that work on one model stays together.
    """
    work: dict[str, list[Cell]] = {}
    for cell in cells:
        work.setdefault(cell.work_id, []).append(cell)
    nodes: dict[str, Node] = {}
    last_of_group: dict[object, str] = {}
    for id_, same in work.items():
        alignment = same[0].alignment
        if alignment is not None and alignment.id not in nodes:
            nodes[alignment.id] = Node(alignment.id, alignment)
        after = None
        if same[0].kind != "defense":  # its harm replies serve all tasks: whoever comes second finds them
            group = (same[0].model, same[0].align)
            after = last_of_group.get(group)
            last_of_group[group] = id_
        nodes[id_] = Node(id_, alignment, tuple(same), needs=alignment.id if alignment else None, after=after)
    return list(nodes.values())
