"""The graph of a study: every alignment and every piece of work once, after what it needs."""

from __future__ import annotations

from holdfast_lab.study.cells import build_graph, expand
from holdfast_lab.study.config import StudyConfig

STUDY = {
    "models": ["embedded", "a/other"],
    "tasks": ["sst2", "ag_news"],
    "defenses": ["sft", "holdfast", {"name": "antibody", "align": "antibody"}],
    "seeds": [1, 2],
    "output_dir": "out",
}


def graph(**changes):
    return build_graph(expand(StudyConfig.model_validate({**STUDY, **changes})))


def test_one_alignment_for_a_model_and_recipe():
    alignments = [node.id.rpartition("-")[0] for node in graph() if node.is_alignment]
    assert alignments == [
        "smollm2-135m-instruct.sft", "smollm2-135m-instruct.antibody", "other.sft", "other.antibody",
    ]  # fmt: skip


def test_nodes_come_after_what_they_need():
    seen: set[str] = set()
    for node in graph():
        assert {id_ for id_ in (node.needs, node.after) if id_} <= seen
        seen.add(node.id)
        if not node.is_alignment:
            assert (node.needs is None) == (node.cells[0].kind == "base")


def test_rows_before_fine_tuning_take_turns_because_they_share_replies():
    references = [node for node in graph() if node.cells and node.cells[0].kind != "defense"]
    first, second = references[0::2], references[1::2]
    assert [node.after for node in first] == [None] * len(first)
    assert [node.after for node in second] == [node.id for node in first]
    assert all(node.after is None for node in graph() if node.cells and node.cells[0].kind == "defense")


def test_cells_of_equal_work_share_a_node():
    same = ["holdfast", {"name": "holdfast", "setting": "tau=0.1"}, {"name": "holdfast", "setting": "beta=10"}]
    nodes = [node for node in graph(defenses=same, references=False, seeds=[1]) if not node.is_alignment]
    assert [[cell.defense.setting for cell in node.cells] for node in nodes] == [["", "tau=0.1", "beta=10"]] * 4
