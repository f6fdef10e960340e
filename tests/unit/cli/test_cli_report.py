"""`holdfast report`: what it writes, prints and refuses, on a run that was really trained."""

from __future__ import annotations

import json
import stat
import webbrowser

import pytest
from tests.unit.report.synthetic import Words, certificate, write_plain_audit, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", certified=certificate(Words()))


def test_a_trained_run_gets_a_report_and_cards(holdfast, run_file, tmp_path):
    assert holdfast("train", run_file)[0] == 0
    folder = tmp_path / "out"
    code, out, _ = holdfast("report", folder)
    assert code == 0
    assert "Measured, not certified" in out
    page = (folder / "report.html").read_text()
    assert "Measured, not certified" in page
    assert "training step" in page
    for card in (folder / "README.md", folder / "adapter" / "README.md"):
        assert "Measured, not certified" in card.read_text()
    assert holdfast("audit", folder)[0] == 0
    assert holdfast("report", folder)[0] == 0
    page = (folder / "report.html").read_text()
    assert "Share of examples degraded by more than x" in page
    assert page.count('class="masked"') == 10
    assert "Shown is the later audit, in audit/." in page
    assert '<th scope="row">kl_token</th>' in page
    # The adapter's card was PEFT's own until then.
    assert "Model Card for Model ID" not in (folder / "adapter" / "README.md").read_text()


def test_a_run_that_is_not_finished_is_said_and_gets_no_card(holdfast, run):
    (run / "result.json").unlink()
    code, out, _ = holdfast("report", run)
    assert code == 0
    for text in (out, (run / "report.html").read_text()):
        assert "Not finished" in text
        assert "The run is not finished" in text
        assert "holdfast train RUN.yaml --resume" in text
    assert "model card" not in out
    assert not (run / "README.md").exists()
    assert json.loads(holdfast("report", run, "--json")[1])["runs"][0]["verdict"] == "unfinished"


def test_open_shows_the_page_in_the_browser(holdfast, run, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    code, _, err = holdfast("report", run, "--open")
    assert (code, err) == (0, "")
    assert opened == [(run / "report.html").as_uri()]


@pytest.mark.parametrize("raises", [False, True])
def test_open_without_a_browser_says_where_the_page_is(holdfast, run, monkeypatch, raises):
    def none(_):
        if raises:
            raise webbrowser.Error("could not locate runnable browser")
        return False

    monkeypatch.setattr("webbrowser.open", none)
    code, out, err = holdfast("report", run, "--open")
    assert code == 0  # the page was written
    assert f"report: {run / 'report.html'}" in out
    assert err.startswith("--open: no browser was found on this machine.")
    assert (run / "report.html").as_uri() in err


def test_json_names_what_was_written(holdfast, run):
    code, out, _ = holdfast("report", run, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["report"] == str(run / "report.html")
    assert found["cards"] == [str(run / "README.md"), str(run / "adapter" / "README.md")]
    assert [(one["folder"], one["verdict"]) for one in found["runs"]] == [(str(run), "certified")]


def test_output_and_no_text(holdfast, run, tmp_path):
    target = tmp_path / "elsewhere" / "page.html"
    assert holdfast("report", run, "--output", target, "--no-text")[0] == 0
    assert "pick the lock" not in target.read_text()
    assert not (run / "report.html").exists()
    assert holdfast("report", run)[0] == 0
    assert stat.S_IMODE((run / "report.html").stat().st_mode) == 0o600


def test_a_readme_of_ones_own_is_kept_and_said(holdfast, run):
    (run / "README.md").write_text("# Mine\n")
    code, _, err = holdfast("report", run)
    assert code == 0
    assert (run / "README.md").read_text() == "# Mine\n"
    assert "was left alone" in err


def test_several_runs_are_compared_on_their_shared_prompts(holdfast, tmp_path):
    first = write_run(tmp_path / "a" / "first")
    second = write_run(tmp_path / "b" / "second", worse=0.2)
    audit = write_plain_audit(tmp_path / "audit")
    code, out, _ = holdfast("report", first, second, audit)
    assert code == 0
    assert "second: Over the limit" in out
    page = (first / "comparison.html").read_text()
    assert not (second / "comparison.html").exists()
    assert "3 runs side by side" in page
    assert "exact McNemar test p = " in page
    assert "second against first, on the same 100 monitor prompts" in page
    assert "audit against first: not compared prompt by prompt" in page


def test_a_comparison_leaves_the_first_runs_own_page_alone(holdfast, tmp_path):
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    assert holdfast("report", runs[0])[0] == 0
    own = (runs[0] / "report.html").read_bytes()
    found = json.loads(holdfast("report", *runs, "--json")[1])
    assert found["report"] == str(runs[0] / "comparison.html")
    assert (runs[0] / "report.html").read_bytes() == own
    assert "2 runs side by side" in (runs[0] / "comparison.html").read_text()


def test_runs_of_one_name_are_told_apart(holdfast, tmp_path):
    runs = [write_run(tmp_path / name / "run") for name in ("a", "b")]
    assert holdfast("report", *runs)[0] == 0
    page = (runs[0] / "comparison.html").read_text()
    assert all(str(folder) in page for folder in runs)


@pytest.mark.parametrize("damage", ["audit.parquet", "certificate.json"])
def test_a_damaged_piece_exits_6_and_writes_nothing(holdfast, run, damage):
    (run / damage).write_bytes(b"broken")
    code, _, err = holdfast("report", run)
    assert code == 6
    assert damage in err
    assert "What to do: " in err
    assert not (run / "report.html").exists()
    assert not (run / "README.md").exists()


def test_usage_errors_exit_2(holdfast, run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert holdfast("report", tmp_path / "empty")[0] == 2
    assert holdfast("report", tmp_path / "nowhere")[0] == 2
    code, _, err = holdfast("report", run, "--output", tmp_path)
    assert code == 2
    assert "is a folder" in err


def test_a_study_is_no_damaged_run(holdfast, tmp_path):
    (tmp_path / "study.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text('{"event": "started"}\n')
    code, _, err = holdfast("report", tmp_path)
    assert code == 2
    assert "is the output_dir of a study" in err
    assert f"holdfast tables {tmp_path}" in err


def test_push_to_hub_sends_one_run_and_says_where(holdfast, run, monkeypatch):
    pushed = []

    def push(folder, repository, *, private):
        pushed.append((folder, repository, private))
        return "https://hub/somebody/a-model"

    monkeypatch.setattr("holdfast.reporting.card.push_to_hub", push)
    code, out, _ = holdfast("report", run, "--push-to-hub", "somebody/a-model", "--private")
    assert code == 0
    assert pushed == [(run, "somebody/a-model", True)]
    assert "pushed: https://hub/somebody/a-model" in out
    found = json.loads(holdfast("report", run, "--push-to-hub", "somebody/a-model", "--json")[1])
    assert found["pushed"] == "https://hub/somebody/a-model"
    code, _, err = holdfast("report", run, run, "--push-to-hub", "somebody/a-model")
    assert (code, len(pushed)) == (2, 2)
    assert "--push-to-hub with 2 runs" in err


def test_nothing_is_pushed_without_being_asked(holdfast, run, monkeypatch):
    monkeypatch.setattr("holdfast.reporting.card.push_to_hub", lambda *_, **__: pytest.fail("pushed"))
    code, _, err = holdfast("report", run, "--private")
    assert code == 2
    assert "--private without --push-to-hub" in err
    assert holdfast("report", run)[0] == 0
