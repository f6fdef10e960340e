"""Reading a folder: what is missing is named, what is damaged is refused, nothing heavy is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from tests.unit.report.synthetic import ALPHA, TAU, Words, certificate, change, write_plain_audit, write_run

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.reporting.page import render
from holdfast.reporting.read import read_evidence
from holdfast.reporting.views import _stored_examples, run_view


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", certified=certificate(Words()))


def page_of(folder) -> str:
    evidence = read_evidence(folder)
    return render([evidence], [run_view(evidence, label="run", anchor="run-1", text=True)])


def test_a_complete_run_misses_nothing(run):
    found = read_evidence(run)
    assert found.missing == ()
    assert [f.role for f in found.sets[0].figures] == ["constraint", "monitor"]
    assert found.sets[0].headline.role == "monitor"
    assert (found.sets[0].limit.tau, found.sets[0].limit.alpha) == (TAU, ALPHA)


@pytest.mark.parametrize(
    ("files", "what", "command"),
    [
        (["audit.parquet", "audit.json"], "No audit.parquet", "holdfast audit "),
        (["certificate.json"], "the claim is not certified", "holdfast certify "),
        (["result.json"], "the run is not finished", "holdfast train RUN.yaml --resume"),
        (["events.jsonl"], "the course of training is unknown", "holdfast train"),
        (["config.yaml"], "settings of the run are unknown", "holdfast train"),
    ],
)
def test_a_missing_piece_is_named_with_the_command_that_makes_it(run, files, what, command):
    for name in files:
        (run / name).unlink()
    page = page_of(run)
    assert what in page
    assert f"<code>{command}" in page


def test_each_single_file_is_enough_for_a_page(run, tmp_path):
    audit, certified = ("audit.json", "audit.parquet"), ("certificate.json", "certificate.parquet")
    for names in (("config.yaml",), ("events.jsonl",), ("result.json",), audit, audit[1:], certified):
        alone = tmp_path / "alone" / "-".join(names)
        alone.mkdir(parents=True)
        for name in names:
            shutil.copy(run / name, alone / name)
        assert "What this does not say" in page_of(alone)


def test_an_audit_made_later_is_found_in_its_folder(run):
    """`holdfast audit RUN` writes into RUN/audit: its judge adds to training's own table, or it stands in for it."""
    judged = write_run(run.parent / "judged")
    write_run(run, judged=False)
    (run / "audit").mkdir()
    for name in ("audit.json", "audit.parquet"):
        shutil.copy(judged / name, run / "audit" / name)
    both = read_evidence(run).sets[0]
    assert both.behaviour.count("flips") == 3
    (run / "audit.json").unlink()
    (run / "audit.parquet").unlink()
    later = read_evidence(run).sets[0]
    assert later.figures == both.figures
    assert later.table is not None


def test_without_a_table_the_figures_come_from_the_result(run):
    before = {f.role: (f.violations, f.n, f.upper) for f in read_evidence(run).sets[0].figures}
    (run / "audit.parquet").unlink()
    (run / "audit.json").unlink()
    found = {f.role: (f.violations, f.n, f.upper) for f in read_evidence(run).sets[0].figures}
    assert found == before
    assert "no distribution to draw" in page_of(run)


def test_a_table_without_its_summary_is_no_audit(run):
    """The summary is written last and says what was measured: a table alone is left by an audit that was killed."""
    (run / "audit.json").unlink()
    found = read_evidence(run).sets[0]
    assert (found.audit, found.table) == (None, None)
    assert [f.role for f in found.figures] == ["monitor", "constraint"], "those of result.json"


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "events.jsonl", "result.json", "audit.json", "audit.parquet", "certificate.json", "splits.json"],
)
@pytest.mark.parametrize("content", [b"{\n", b"[1, 2]\n", b"\xff\xfe\n", b"PAR1PAR1\n"])
def test_a_damaged_piece_is_refused(run, name, content):
    (run / name).write_bytes(content)
    with pytest.raises(CheckpointError) as refused:
        read_evidence(run)
    assert refused.value.exit_code == 6
    assert name in refused.value.what


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("audit.json", ["roles", "monitor", "violation_rate"], "0.0"),
        ("audit.json", ["roles", "monitor", "violation_rate"], 1.5),
        ("audit.json", ["roles", "monitor", "n"], 3.5),
        ("audit.json", ["roles", "monitor", "n"], True),
        ("audit.json", ["tau"], "<script>"),
        ("audit.json", ["unit"], 3),
        ("audit.json", ["behaviour", "flips"], "3"),
        ("audit.json", ["units", "nll_sum", "quantiles"], [1]),
        ("result.json", ["safety"], []),
        ("result.json", ["steps"], "40"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_and_not_drawn(run, name, path, value):
    values = json.loads((run / name).read_text())
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    change(run / name, **values)
    with pytest.raises(CheckpointError, match=path[0]):
        page_of(run)


def test_a_table_and_a_summary_that_disagree_are_refused(run):
    values = json.loads((run / "audit.json").read_text())
    values["roles"]["monitor"]["violations"] += 1
    change(run / "audit.json", **values)
    with pytest.raises(CheckpointError, match=r"roles do not follow from audit\.parquet"):
        read_evidence(run)


def test_a_certificate_with_a_changed_byte_is_refused(run):
    path = run / "certificate.json"
    path.write_text(path.read_text().replace('"regressions": 1', '"regressions": 0'))
    with pytest.raises(CheckpointError, match="changed"):
        read_evidence(run)


def test_a_certificate_that_contradicts_itself_is_refused(run):
    made = certificate(Words(), regressions=9)
    replace(made, record=replace(made.record, certified=True, regressions=0, upper_bound=0.03)).save(run)
    with pytest.raises(CheckpointError, match="certified, regressions, upper_bound do not follow from its table"):
        read_evidence(run)


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_folder_without_evidence_is_a_usage_error(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as refused:
        read_evidence(tmp_path / folder)
    assert refused.value.exit_code == 2


def test_named_safety_sets_are_read_from_their_folders(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["safety"] = {"first": config["safety"], "second": config["safety"]}
    config["constraint"] = {"first": config["constraint"], "second": config["constraint"] | {"tau": 0.3}}
    (run / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config))))  # without aliases
    (run / "first").mkdir()
    for name in ("audit.json", "audit.parquet", "certificate.json", "certificate.parquet", "splits.json"):
        (run / name).rename(run / "first" / name)
    (run / "result.json").unlink()
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    several = [{**row, "constraints": {"first": row, "second": {**row, "multiplier": 7.0}}} for row in rows]
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in several))
    found = read_evidence(run)
    assert [one.name for one in found.sets] == ["first", "second"]
    assert found.sets[0].certificate is not None
    assert found.sets[1].certificate is None
    assert found.sets[1].limit.tau == 0.3
    page = page_of(run)
    assert "Safety set <bdi>second</bdi>" in page
    assert "last multiplier 7." in page


def test_an_audit_folder_has_no_training(tmp_path):
    found = read_evidence(write_plain_audit(tmp_path / "audit"))
    assert not found.trained
    assert "course of training" not in page_of(tmp_path / "audit")


def test_a_report_imports_neither_torch_nor_its_libraries(run):
    code = (
        "import sys; from holdfast.cli.main import main; sys.argv = ['holdfast', 'report', sys.argv[1]]\n"
        "try: main()\n"
        "finally: print('heavy:', [m for m in ('torch', 'transformers', 'trl', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.endswith("heavy: []\n"), done.stderr
    assert (run / "report.html").exists()
    spoiled = code.replace("import sys;", "import sys; sys.modules['datasets'] = None;", 1)
    done = subprocess.run(
        [sys.executable, "-c", spoiled, str(run)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "datasets" in done.stdout


def test_a_link_in_the_place_of_stored_examples_is_not_followed(tmp_path):
    stored, link = tmp_path / "elsewhere.jsonl", tmp_path / "held.jsonl"
    stored.write_text('{"prompt": "a", "completion": "b", "where": "x:1", "category": null}\n')
    link.symlink_to(stored)
    assert [example.prompt for example in _stored_examples(stored)] == ["a"]
    with pytest.raises(CheckpointError):
        _stored_examples(link)
