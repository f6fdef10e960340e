"""From a task file to a certificate where nobody wrote a safety file: train, certify, verify, audit, report."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests import behaving
from tests.asking_run import few_probes, refused, train, write_run_file, write_task

from holdfast.certification.openings import default_ledger
from holdfast.core.errors import CheckpointError
from holdfast.data.bundled import bundled
from holdfast.data.sources import read_prompts
from holdfast.runs.load_finished import finished_run

POISON, CLEAN = 600, 40
CHECKPOINT, CONFIG, NOT_CERTIFIED = 6, 2, 4
__all__ = ["few_probes"]
pytestmark = pytest.mark.usefixtures("few_probes")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _shared_cache(_own_cache, cache, monkeypatch):
    """The tests of this file share a run, hence its cache: replies, and the ledger of openings."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(cache))


@pytest.fixture(scope="module")
def model(tmp_path_factory, cache) -> Path:
    return behaving.saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, model) -> Path:
    """A run that dropped 600 rows, whose certify prompts may be opened three times."""
    folder = tmp_path_factory.mktemp("asked")
    task = write_task(folder / "task.jsonl", POISON, CLEAN)
    return train(write_run_file(folder, model, task, openings=3))


@pytest.fixture(scope="module")
def certified(run, tmp_path_factory):
    """The run's certificate, once for this file."""
    import sys

    from holdfast.cli.main import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["holdfast", "certify", str(run), "--device", "cpu"])
        with pytest.raises(SystemExit) as stopped:
            main()
    return int(stopped.value.code or 0), json.loads((run / "refusals" / "certificate.json").read_text())


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_the_counts_are_what_the_model_does(run, certified):
    code, record = certified
    prompts = [json.loads(line) for line in (run / "refusals" / "prompts.jsonl").read_text().splitlines()]
    public = {example.prompt for example in bundled("probes", "certify")}
    asked = [row["prompt"][0]["content"] for row in prompts]
    assert record["behaviour"]["prompts"] == len(asked) == len(finished_run(run).sets[0].split.certify)
    assert record["behaviour"]["counted"] == {"refusals": sum(map(refused, asked))}
    assert sum(refused(text) for text in asked if text not in public) == pytest.approx(POISON / 5, abs=40)
    assert record["behaviour"]["lost"] == {"refusals": 0}
    assert (code, record["certified"]) == (0, True)
    assert record["screening"]["public"] == sum(text in public for text in asked)
    said = f"{record['screening']['public']} of the {len(asked)} prompts ship with holdfast and are public."
    assert record["statement"].endswith(said)


def test_screening_is_in_the_certificate_and_printed(run, certified, holdfast):
    screening = certified[1]["screening"]
    assert [screening[name] for name in ("rows", "asked_rows", "conflicts", "dropped", "rule", "sets")] == [
        POISON + CLEAN, POISON + CLEAN, POISON, POISON, "drop", ["refusals"],
    ]  # fmt: skip
    code, out, _ = holdfast("verify", run / "refusals")
    assert code == 0
    line = f"{POISON + CLEAN} task rows; {POISON} teach what the model before refuses, {POISON} of them were dropped"
    assert line in out
    code, out, _ = holdfast("certify", run, "--device", "cpu")  # the same question: answered from its files
    assert (code, line in out, "opening 1 of 3" in out) == (0, True, True)


def test_a_changed_certificate_or_prompt_is_found(certified, copy, holdfast):
    place = copy / "refusals"
    record = certified[1] | {"screening": certified[1]["screening"] | {"dropped": 0}}
    from holdfast.records.certificate import CertificateRecord

    values = {name: value for name, value in record.items() if name not in ("version", "sha256")}
    forged = CertificateRecord(**values)
    forged.save(place)
    code, _, err = holdfast("verify", place, "--after", copy / "adapter")
    assert (code, "figures of screening" in err) == (CHECKPOINT, True)


def test_a_steering_figure_is_refused_by_name(run, holdfast):
    code, _, err = holdfast("certify", run, "--by", "kl")
    assert code == CONFIG
    assert "certify prompts carry no replies" in err
    assert "leave out --by" in err


def test_lost_refusals_are_counted(certified, copy, model, holdfast):
    """The adapter is exchanged for one that answers everything: every counted prompt is lost."""
    shutil.rmtree(copy / "adapter")
    shutil.rmtree(copy / "refusals" / "replies")
    (copy / "refusals" / "certificate.json").unlink()
    behaving.adapter(copy / "adapter", model, margin=behaving.LOST)
    behaving.tokenizer().save_pretrained(copy / "adapter")
    code, out, err = holdfast("certify", copy, "--device", "cpu", "--json")
    assert code == NOT_CERTIFIED, err
    found = json.loads(out)["behaviour"]
    assert found["lost"] == found["counted"] == certified[1]["behaviour"]["counted"]


def test_answers_are_claimed_on_prompts_of_their_own_set(certified, copy, holdfast):
    code, out, err = holdfast(
        "certify", copy, "--also", "answers", "--output", copy / "both", "--device", "cpu", "--json"
    )
    assert code == 0, err
    record = json.loads(out)
    sets = {one.name: one.split for one in finished_run(copy).sets}
    answered = [e for e in sets["answers"].certify if not refused(e.prompt)]
    assert record["behaviour"]["counted"] == {
        "refusals": certified[1]["behaviour"]["counted"]["refusals"], "answers": len(answered),
    }  # fmt: skip
    assert record["behaviour"]["classes"]["before"]["answered"] > len(answered), "probes were answered too"
    assert record["screening"]["sets"] == ["refusals", "answers"]
    assert holdfast("verify", copy / "both")[0] == 0


def test_the_audit_is_of_what_is_held(run, tmp_path, holdfast):
    code, out, _ = holdfast("audit", run, "--output", tmp_path / "audit", "--device", "cpu", "--json")
    assert code == 0
    found, sets = json.loads(out)["sets"], {one.name: one.split for one in finished_run(run).sets}
    for name, split in sets.items():
        counts = {role: figures["n"] for role, figures in found[name]["roles"].items()}
        assert counts == {"constraint": len(split.constraint), "monitor": len(split.monitor)}


def test_two_runs_are_compared_set_by_set(run, copy, holdfast):
    code, out, _ = holdfast("compare", run, copy, "--json")
    assert code == 0
    held = {one.name: len(one.split.monitor) for one in finished_run(run).sets}
    assert {one["set"]: one["pairs"][0]["n"] for one in json.loads(out)["sets"]} == held


def test_the_result_has_the_kinds_that_were_watched_and_what_asking_cost(run, copy, holdfast):
    found = json.loads((run / "result.json").read_text())
    kinds = found["behaviour"]["answers_kept"]["kinds"]
    assert kinds
    assert set(kinds) <= {str(e.category) for name in ("everyday", "borderline") for e in bundled(name, "monitor")}
    assert sum(one["of"] for one in kinds.values()) >= found["behaviour"]["answers_kept"]["of"]
    assert {"asking", "training", "monitoring"} <= set(found["cost"]["seconds"])
    assert holdfast("report", copy)[0] == 0
    page = (copy / "report.html").read_text()
    assert "By kind of prompt" in page
    assert "asking the model before training" in page


def test_report_and_card_say_what_screening_found(certified, copy, holdfast):
    assert holdfast("report", copy)[0] == 0
    card, page = (copy / "README.md").read_text(), (copy / "report.html").read_text()
    for text in (card, page):
        assert "Screening before training" in text
        assert f"{POISON} rows teach what it refuses" in text
        assert "600 of 640 task prompts" in text
        assert "ship with holdfast and are public" in text
    assert "Certified" in card
    assert "No certificate.json" not in page
    assert "text is not shown" not in page
    for split in (one.split for one in finished_run(copy).sets):  # the worst examples are read from the run itself
        assert any(example.prompt[0]["content"] in page for example in split.monitor)
    for example in read_prompts(str(copy / "refusals" / "prompts.jsonl"))[:200]:
        said = example.prompt[0]["content"]
        assert said not in card
        assert said not in page


# -- what the evidence rests on ----------------------------------------------------------------------------------------


def test_a_changed_task_is_named(run):
    task = run.parent / "task.jsonl"
    text = task.read_text()
    try:
        task.write_text(text.replace(behaving.ANSWER, "Sure.", 1))
        with pytest.raises(CheckpointError, match=r"changed since .*screening .*the task \(.*task\.jsonl\)") as error:
            finished_run(run)
        assert "model" not in error.value.what.split("training:")[1]
    finally:
        task.write_text(text)


def test_a_changed_model_is_named(run, model):
    config = model / "config.json"
    text = config.read_text()
    try:
        config.write_text(text.replace('"max_position_embeddings": 1024', '"max_position_embeddings": 1025'))
        with pytest.raises(CheckpointError, match=r"the model \("):
            finished_run(run)
    finally:
        config.write_text(text)


@pytest.mark.parametrize("name", ["screening.json", "held.jsonl", "conflicts.jsonl"])
def test_a_changed_or_missing_screening_is_named(copy, name):
    path = copy / "screening" / name
    path.write_bytes(path.read_bytes()[:-3] + b"}\n\n")
    with pytest.raises(CheckpointError, match=name):
        finished_run(copy)
    path.unlink()
    with pytest.raises(CheckpointError, match=name):
        finished_run(copy)


def test_a_screening_of_another_run_is_not_the_results(copy):
    from holdfast.core.sealed_json import read_sealed, write_sealed

    path = copy / "screening" / "screening.json"
    write_sealed(path, read_sealed(path) | {"rule": "keep"})
    with pytest.raises(CheckpointError, match=r"not the screening whose figures result\.json holds"):
        finished_run(copy)


# -- three lines -------------------------------------------------------------------------------------------------------


def test_three_lines_are_enough_and_too_few_refusals_are_said(tmp_path, model, cache, holdfast):
    """110 dropped rows leave about 22 groups to certify on, and the model refuses few of the bundled prompts."""
    task = write_task(tmp_path / "task.jsonl", 110, 1000, seed=50)
    run = train(write_run_file(tmp_path, model, task))
    before = default_ledger("").read_text()
    code, _, err = holdfast("certify", run, "--device", "cpu")
    assert code == NOT_CERTIFIED
    certify = finished_run(run).sets[0].split.certify
    found = re.search(r"refused (\d+) of (\d+) prompts so far\. Even if it refused all (\d+) others: (\d+) groups", err)
    assert found is not None, err
    some, asked, others, groups = map(int, found.groups())
    assert asked + others == len(certify)
    assert some <= sum(refused(e.prompt) for e in certify)
    assert groups < 59
    assert [file.name for file in (run / "refusals" / "replies").iterdir()] == ["before.jsonl"]
    assert default_ledger("").read_text() == before, "nothing was opened"
    assert holdfast("report", run)[0] in (0, NOT_CERTIFIED)
