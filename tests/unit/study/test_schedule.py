"""Running a study: each cell once, failures kept apart, and the folder as the only memory."""

from __future__ import annotations

import json
import threading

import pytest
from tests.unit.study.fakes import SECRET

from holdfast.core.errors import CheckpointError, DataError
from holdfast.core.file_lock import RunLock
from holdfast_lab.study import schedule
from holdfast_lab.study.engine import LocalEngine
from holdfast_lab.study.folder import StudyFolder, differences
from holdfast_lab.study.schedule import run_study
from holdfast_lab.study.worker import run_node


def names(outcome_ids):
    return [id_.rpartition("-")[0].partition(".")[2] for id_ in outcome_ids]


def test_every_cell_gets_a_result_and_a_second_call_starts_nothing(study):
    first = study.run(references=True)
    assert names(first.done) == ["sst2.base", "sst2.aligned", "sst2.sft.p0.5.s42", "sst2.holdfast.p0.5.s42"]
    assert (first.failed, first.blocked, first.exit_code) == ([], [], 0)
    assert set(study.results()) == set(first.done)
    assert all(value["cell"] == id_ for id_, value in study.results().items())
    assert len(study.begun()) == 5  # one alignment
    assert set(study.record()["cells"].values()) == {"done"}
    events = [(row["event"], row["kind"]) for row in study.events()]
    assert sorted(set(events)) == [("finish", "align"), ("finish", "cell"), ("start", "align"), ("start", "cell")]
    before = study.results()
    assert study.run(references=True) == first
    assert study.results() == before
    assert len(study.begun()) == 5


def test_cells_of_equal_work_are_run_once_under_all_their_names(study):
    outcome = study.run(defenses=["holdfast", {"name": "holdfast", "setting": "tau=0.1"}])
    assert len(study.begun()) == 2  # the alignment and the work
    assert [value["setting"] for value in study.results().values()] == ["", "tau=0.1"]
    assert len(outcome.done) == 2
    study.run(defenses=[{"name": "holdfast", "label": "new"}])
    assert len(study.begun()) == 2
    assert [value["label"] for value in study.results().values()].count("new") == 1


def test_more_seeds_may_be_added_later(study):
    study.run()
    outcome = study.run(seeds=[42, 43])
    assert len(outcome.done) == 4
    assert len(study.begun()) == 5  # one alignment, four cells


def test_another_protocol_in_the_same_folder_is_refused_by_field(study):
    study.run(protocol={"evaluation": {"judge": "a"}, "size": 10})
    with pytest.raises(CheckpointError, match=r"another protocol: evaluation\.judge differ"):
        study.plan(protocol={"evaluation": {"judge": "b"}, "size": 10.0})


def test_a_study_that_goes_on_keeps_the_spelling_of_its_protocol(study):
    """10 and 10.0 are one setting, but would give results with two protocol hashes."""
    study.run(protocol={"size": 10})
    study.run(protocol={"size": 10.0}, seeds=[42, 43])
    assert {json.dumps(value["protocol"]) for value in study.results().values()} == {
        json.dumps({"preset": "small", "size": 10})
    }
    assert len(study.results()) == 4


def test_a_study_that_could_not_be_finished_is_refused_before_it_starts(study):
    with pytest.raises(DataError, match="no judge"):
        study.run(protocol={"fake": {"refuse": True}})
    assert not study.folder.exists()


def test_a_finished_study_needs_no_judge_any_more(study, monkeypatch):
    first = study.run()
    monkeypatch.setattr("tests.unit.study.fakes.check", lambda *_, **__: pytest.fail("there is nothing to run"))
    assert study.run() == first


def test_a_folder_with_something_else_is_refused(study):
    study.folder.mkdir()
    (study.folder / "study.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not the record of a study"):
        study.plan()


@pytest.mark.parametrize(
    ("how", "code", "error"),
    [("data", 3, "DataError"), ("bug", 1, "RuntimeError"), ("killed", 7, "Killed"), ("exit", 17, "Ended")],
)
def test_a_failed_cell_is_recorded_and_the_others_go_on(study, how, code, error):
    outcome = study.run(protocol={"fake": {"fail": {".holdfast.": how}}})
    assert names(outcome.failed) == ["sst2.holdfast.p0.5.s42"]
    assert names(outcome.done) == ["sst2.sft.p0.5.s42"]
    assert outcome.exit_code == code
    (file,) = (study.folder / "errors").glob("*.json")
    assert file.stem == outcome.failed[0]
    record = json.loads(file.read_text())
    assert (record["error"], record["exit_code"]) == (error, code)
    assert SECRET not in file.read_text() + (study.folder / "study.json").read_text()
    assert study.record()["cells"][outcome.failed[0]] == "failed"


def test_what_failed_is_only_run_again_when_asked(study):
    failing = {"fake": {"fail": {".holdfast.": "data"}}}
    first = study.run(protocol=failing)
    again = study.run(protocol=failing)
    assert again.exit_code == first.exit_code == 3
    assert len(study.begun()) == 3
    study.run(protocol=failing, retry_failed=True)
    assert len(study.begun()) == 4
    assert ".holdfast." in study.begun()[-1]


def test_a_cell_that_succeeds_at_last_loses_its_error(study):
    plan = study.plan()
    node = plan.nodes[-1]
    for path in plan.folder.error_files(node):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"node": node.id, "what": "x", "remedy": "y", "exit_code": 5}))
    assert run_study(plan).exit_code == 5
    assert run_study(plan, retry_failed=True).exit_code == 0
    assert list((study.folder / "errors").glob("*.json")) == []


def test_cells_whose_alignment_failed_are_blocked_and_the_others_run(study):
    entries = ["sft", {"name": "holdfast", "align": "antibody"}]
    failing = {"fake": {"fail": {"instruct.antibody-": "data"}}}
    outcome = study.run(defenses=entries, protocol=failing)
    assert (names(outcome.done), names(outcome.blocked)) == (["sst2.sft.p0.5.s42"], ["sst2.holdfast.antibody.p0.5.s42"])
    assert outcome.failed == []
    assert outcome.exit_code == 3
    assert list((study.folder / "errors").glob("*.json")) == []  # no cell failed
    assert len(list((study.folder / "errors" / "alignments").glob("*.json"))) == 1


def test_the_exit_code_is_that_of_the_first_failure(study):
    failing = {"fake": {"fail": {".sft.p": "data", ".holdfast.p": "killed"}}}
    assert study.run(protocol=failing, workers=1).exit_code == 3


def test_a_worker_that_was_interrupted_is_run_again_without_asking(study):
    interrupted = {"fake": {"fail": {".holdfast.": "interrupted"}}}
    assert study.run(protocol=interrupted).exit_code == 130
    assert not list((study.folder / "errors").glob("*.json"))
    assert study.run(protocol=interrupted).exit_code == 130
    assert len(study.begun()) == 4


def test_an_alignment_that_no_open_cell_needs_is_not_run(study):
    study.run()
    for folder in (study.folder / "alignments").iterdir():
        (folder / "outcome.json").unlink()
    study.run()
    assert len(study.begun()) == 3


def test_no_more_than_the_workers_run_side_by_side_and_so_many_do(study):
    study.run(seeds=[1, 2, 3], workers=3, protocol={"fake": {"steps": 2, "pause": 0.15}})
    running = most = 0
    for row in study.events():
        running += 1 if row["event"] == "start" else -1
        most = max(most, running)
    assert (most, running) == (3, 0)


def test_two_workers_never_do_one_cell(study):
    """The second waits for the first and finds its outcome."""
    plan = study.plan(protocol={"fake": {"steps": 3, "pause": 0.1}})
    file = plan.folder.write_node(plan.nodes[0], call=plan.calls.align, protocol=plan.protocol)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(run_node(file))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0, 0]
    assert study.begun() == [plan.nodes[0].id]


def test_a_study_that_runs_elsewhere_is_refused(study):
    plan = study.plan()
    with RunLock(plan.folder.root), pytest.raises(CheckpointError, match="in use by process"):
        run_study(plan)


def test_an_interrupted_study_ends_its_workers_and_keeps_nothing_against_the_cells(study, monkeypatch):
    engines = []

    def engine(plan):
        engines.append(LocalEngine(plan.study.workers, gpus=[]))
        return engines[-1]

    monkeypatch.setattr(schedule, "_engine", engine)
    plan = study.plan(protocol={"fake": {"steps": 100, "pause": 0.1}})

    def interrupt(progress):
        if study.begun():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(plan, listener=interrupt)
    assert engines[0].ended() == []
    assert not (study.folder / "errors").exists()
    assert set(study.record()["alignments"].values()) == {"pending"}


def test_progress_counts_cells(study):
    seen = []
    run_study(
        study.plan(seeds=[1, 2], workers=1, protocol={"fake": {"fail": {".sft.p": "data"}}}), listener=seen.append
    )
    assert {p.total for p in seen} == {4}
    assert seen[0].running[0].startswith("smollm2-135m-instruct.sft-")
    assert (seen[0].done, seen[0].failed, seen[0].eta) == (0, 0, None)
    assert (seen[-1].done, seen[-1].failed) == (1, 2)
    assert seen[-1].eta is not None


def test_work_that_returns_nothing_is_a_failure(study):
    plan = study.plan()
    call = "tests.unit.study.fakes:nothing_is_a_mapping"
    for name in (call, "tests.unit.study.fakes:absent"):
        file = plan.folder.write_node(plan.nodes[0], call=name, protocol=plan.protocol)
        assert run_node(file) in (1, 2)
        assert plan.folder.failure(plan.nodes[0]) is not None
        assert not plan.folder.finished(plan.nodes[0])


def test_a_damaged_result_is_named(study):
    outcome = study.run()
    file = study.folder / "results" / f"{outcome.done[0]}.json"
    file.write_text('{"cell": "another"}')
    with pytest.raises(CheckpointError, match="is not the result of"):
        study.run()
    file.unlink()
    assert study.run() == outcome  # the outcome of the work is still there
    assert len(study.begun()) == 3


def test_logs_are_private(study):
    study.run()
    logs = list(study.folder.rglob("log.txt"))
    assert len(logs) == 3
    assert {log.stat().st_mode & 0o777 for log in logs} == {0o600}


def test_workers_are_spread_over_gpus(study, monkeypatch):
    seen = []

    class Worker:
        stdin = None

        def poll(self):
            return None

    monkeypatch.setattr(
        "holdfast_lab.study.engine.launch",
        lambda node, log, env: seen.append(env.get("CUDA_VISIBLE_DEVICES")) or Worker(),
    )
    for gpus, expected in ((["2", "5"], ["2", "5", "2"]), (["0"], [None] * 3), ([], [None] * 3)):
        seen.clear()
        engine = LocalEngine(3, gpus=gpus)
        for id_ in "abc":
            engine.start(id_, study.folder / "node.json")
        assert seen == expected


def test_differences_name_the_fields():
    assert differences({"a": 1, "b": {"c": [1, 2.0]}}, {"a": 1.0, "b": {"c": [1, 2]}}) == []
    assert differences({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"c": 2, "d": 2}, "e": None}) == ["a", "b.c"]


def test_the_record_is_written_twice_however_many_cells_there_are(study, monkeypatch):
    """It names every cell: written at each event, 10,000 cells would write 20,000 times what 10,000 cells take."""
    written = []
    write = StudyFolder.write_record

    def counted(folder, *arguments):
        written.append(folder.record)
        write(folder, *arguments)

    monkeypatch.setattr(StudyFolder, "write_record", counted)
    for seeds in ([42], [42, 43, 44]):
        written.clear()
        outcome = study.run(seeds=seeds)
        assert len(written) == 2
    assert set(study.record()["cells"].values()) == {"done"}
    moved = [row["node"] for row in study.events() if row["event"] == "finish"]
    assert len(moved) == 1 + len(outcome.done)  # one alignment


def test_a_record_that_is_older_than_the_work_is_no_obstacle(study):
    """A killed study leaves the record of its start; what is done is known from the results."""
    study.run()
    stale = study.record()
    stale["cells"] = dict.fromkeys(stale["cells"], "pending")
    (study.folder / "study.json").write_text(json.dumps(stale))
    begun = study.begun()
    assert len(study.run().done) == 2
    assert study.begun() == begun
    assert set(study.record()["cells"].values()) == {"done"}
