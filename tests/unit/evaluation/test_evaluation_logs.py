"""Real logs of inspect and lm-eval are paired by sample; whatever does not belong together is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from holdfast.core.errors import ConfigError, DataError
from holdfast.judging.logs.inspect_log import open_zip
from holdfast.judging.logs.paired import paired_outcomes, read_log

LOGS = Path(__file__).parent / "evaluation_logs"
LM_BEFORE, LM_AFTER = (next((LOGS / side).glob("samples_*.jsonl")) for side in ("lm_before", "lm_after"))
PAIRS = {
    "eval": (LOGS / "inspect_before.eval", LOGS / "inspect_after.eval", "match"),
    "json": (LOGS / "inspect_before.json", LOGS / "inspect_after.json", "match"),
    "lm-eval": (LM_BEFORE, LM_AFTER, "exact_match,strict"),
}


def edited(folder: Path, change, *, side: str = "after") -> Path:
    """A copy of inspect's JSON log, changed."""
    log = json.loads((LOGS / f"inspect_{side}.json").read_text(encoding="utf-8"))
    change(log)
    path = folder / f"{side}.json"
    path.write_text(json.dumps(log), encoding="utf-8")
    return path


def edited_rows(folder: Path, change) -> Path:
    """A copy of lm-eval's log after, with its results beside it, changed."""
    rows = [json.loads(line) for line in LM_AFTER.read_text(encoding="utf-8").splitlines()]
    results = next(LM_AFTER.parent.glob("results_*.json"))
    (folder / results.name).write_bytes(results.read_bytes())
    change(rows)
    path = folder / LM_AFTER.name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", PAIRS)
def test_what_passed_before_and_does_not_after(kind):
    """Sums 3 was wrong before; 3, 5 and 7 after."""
    before, after, score = PAIRS[kind]
    found = paired_outcomes(before, after, score)
    assert (found.n, found.passed_before, found.regressions) == (12, 11, 2)
    ids = [sample.id.removeprefix("sum-") for sample in found.samples if sample.regressed]
    assert ids == ["5", "7"]
    assert {sample.category for sample in found.samples} == {"even", "odd"}
    assert "What is 5 + 5?" in next(s.prompt for s in found.samples if s.id.endswith("5"))
    assert found.warnings == []


@pytest.mark.parametrize("kind", PAIRS)
def test_what_goes_into_a_certificate_names_the_logs_and_has_no_text(kind):
    before, after, score = PAIRS[kind]
    found = paired_outcomes(before, after, score).to_json()
    assert found["before"]["model"].endswith("before")
    assert found["after"]["model"].endswith("after")
    assert (found["before"]["task"], found["before"]["task_version"] is None) == ("sums", False)
    assert len(found["before"]["sha256"]) == 64
    assert "What is" not in json.dumps(found) + repr(paired_outcomes(before, after, score))


def test_the_same_log_in_both_formats_has_the_same_samples():
    eval_log, json_log = read_log(LOGS / "inspect_before.eval"), read_log(LOGS / "inspect_before.json")
    found = [{s.id: (s.content_sha256, s.scores) for s in log.samples} for log in (eval_log, json_log)]
    assert found[0] == found[1]
    assert len(found[0]) == 12


def test_deflated_logs_of_older_versions_are_read(tmp_path):
    path = tmp_path / "deflated.eval"
    with open_zip(LOGS / "inspect_before.eval") as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.names:
            new.writestr(name, old.read(name))
    assert len(read_log(path).samples) == 12
    assert paired_outcomes(path, LOGS / "inspect_after.eval", "match").regressions == 2


def test_reading_logs_needs_no_torch():
    code = (
        "import sys; from pathlib import Path; from holdfast.judging.logs.paired import paired_outcomes; "
        f"paired_outcomes(Path({str(PAIRS['eval'][0])!r}), Path({str(PAIRS['eval'][1])!r}), 'match'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_message_ids_do_not_count(tmp_path):
    def change(log, number):
        for sample in log["samples"]:
            sample["input"] = [{"role": "user", "content": sample["input"], "id": f"{number}-{sample['id']}"}]

    before = edited(tmp_path, lambda log: change(log, 1), side="before")
    after = edited(tmp_path, lambda log: change(log, 2))
    found = paired_outcomes(before, after, "match")
    assert found.regressions == 2
    assert {sample.prompt for sample in found.samples} == {f"What is {i} + {i}?" for i in range(12)}


# What is refused


def _swap(log):
    log["samples"][4]["input"] = "What is 9 + 9?"


def _target(log):
    log["samples"][4]["target"] = "9"


def _drop(log):
    log["eval"]["dataset"]["sample_ids"].remove(log["samples"].pop()["id"])


def _twice(log):
    log["samples"].append(log["samples"][0])


def _options(log):
    log["eval"]["scorers"][0]["options"] = {"numeric": True}


REFUSED = {
    "another prompt": (_swap, "1 of 12 samples have the same id and ask for something else"),
    "another target": (_target, "1 of 12 samples have the same id and ask for something else"),
    "a missing sample": (_drop, "1 of 12 samples of inspect_before.json are not in after.json, and 0 of 11"),
    "a sample that the header lists": (lambda log: log["samples"].pop(), "1 of 12 samples are missing"),
    "a sample twice": (_twice, "occur twice"),
    "another task": (lambda log: log["eval"].update(task="products"), "differ in their task: 'sums' before, 'prod"),
    "another version": (lambda log: log["eval"].update(task_version=3), "differ in their task version: '2' before"),
    "other data": (lambda log: log["eval"]["dataset"].update(name="x"), "differ in their dataset"),
    "an unfinished run": (lambda log: log.update(status="cancelled"), "unfinished evaluation: status 'cancelled'"),
    "an invalid run": (lambda log: log.update(invalidated=True), "marked as invalid"),
    "another scorer": (_options, "computed with other options"),
    "a NaN": (lambda log: log["samples"][0]["scores"]["match"].update(value=float("nan")), "not a finite number"),
    "infinity": (lambda log: log["samples"][0]["scores"]["match"].update(value=float("inf")), "not a finite number"),
    "a huge number": (lambda log: log["samples"][0]["scores"]["match"].update(value=10**400), "too large a number"),
    "no value": (lambda log: log["samples"][0]["scores"].pop("match"), "the score is missing"),
    "a list": (lambda log: log["samples"][0]["scores"]["match"].update(value=[1]), "list, not a finite number"),
    "a word": (lambda log: log["samples"][0]["scores"]["match"].update(value="\x1b[31mgood"), r"'\\x1b\[31mgood'"),
    "a number between": (lambda log: log["samples"][0]["scores"]["match"].update(value=0.5), "neither 0 nor 1"),
    "an id that is none": (lambda log: log["samples"][0].update(id=None), "without an id"),
    "an epoch that is none": (lambda log: log["samples"][0].update(epoch=True), "epoch is bool"),
    "no samples": (lambda log: log.update(samples=None), "samples is NoneType"),
    "an empty log": (
        lambda log: (log.update(samples=[]), log["eval"]["dataset"].update(sample_ids=[])), "12 of 12 samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_logs_that_do_not_belong_together_are_refused(tmp_path, case):
    change, message = REFUSED[case]
    after = edited(tmp_path, change)
    with pytest.raises(DataError, match=message) as refusal:
        paired_outcomes(LOGS / "inspect_before.json", after, "match")
    assert "What is" not in str(refusal.value)
    assert "\x1b" not in str(refusal.value)


def test_the_same_log_twice_is_refused(tmp_path):
    copy = tmp_path / "copy.eval"
    copy.write_bytes((LOGS / "inspect_before.eval").read_bytes())
    with pytest.raises(DataError, match="the same log"):
        paired_outcomes(LOGS / "inspect_before.eval", copy, "match")


def test_logs_of_two_tools_are_refused():
    with pytest.raises(DataError, match="differ in their kind: 'inspect' before, 'lm-eval' after"):
        paired_outcomes(LOGS / "inspect_before.eval", LM_AFTER, "match")


@pytest.mark.parametrize(
    ("kind", "score", "message"),
    [
        ("eval", None, "not named; scores of these logs: 'includes', 'match'"),
        ("eval", "accuracy", "no score is called 'accuracy'; scores of these logs: 'includes', 'match'"),
        ("lm-eval", None, "'exact_match,flexible', 'exact_match,strict'"),
        ("lm-eval", "exact_match", "no score is called 'exact_match'"),
    ],
)
def test_an_unknown_score_is_refused_with_the_known_ones(kind, score, message):
    with pytest.raises(DataError, match=message):
        paired_outcomes(*PAIRS[kind][:2], score)


def test_one_score_need_not_be_named(tmp_path):
    sides = [
        edited(tmp_path, lambda log: [sample["scores"].pop("includes") for sample in log["samples"]], side=side)
        for side in ("before", "after")
    ]
    assert paired_outcomes(*sides).score == "match"


# Epochs, thresholds, samples without a result


def epochs_log(tmp_path, side: str, wrong: dict[int, set[int]]) -> Path:
    """Inspect's log in three epochs; `wrong` has the sums that fail in each epoch."""

    def change(log):
        log["samples"] = [
            {**sample, "epoch": epoch,
             "scores": {"match": {"value": "I" if int(sample["id"].split("-")[1]) in wrong[epoch] else "C"}}}
            for sample in log["samples"] for epoch in wrong
        ]  # fmt: skip

    return edited(tmp_path, change, side=side)


def test_several_epochs_need_a_rule(tmp_path):
    before = epochs_log(tmp_path, "before", {1: set(), 2: {0}, 3: {0}})
    after = epochs_log(tmp_path, "after", {1: {1, 2, 3}, 2: {1, 2}, 3: {1}})
    with pytest.raises(DataError, match="no rule says when a repeated sample passes"):
        paired_outcomes(before, after, "match")
    for rule, passed, regressions in (("all", 11, 3), ("majority", 11, 2), ("any", 12, 1)):
        found = paired_outcomes(before, after, "match", epochs=rule)
        assert (found.n, found.passed_before, found.regressions, found.epochs) == (12, passed, regressions, rule)
    with pytest.raises(ConfigError, match="expected one of all, majority, any"):
        paired_outcomes(before, after, "match", epochs="first")


def test_other_numbers_of_epochs_are_refused():
    with pytest.raises(DataError, match="12 of 12 samples were repeated in other numbers"):
        paired_outcomes(LOGS / "inspect_before.eval", LOGS / "inspect_epochs.eval", "match", epochs="all")


def test_epochs_of_a_real_log(tmp_path):
    assert {sample.epoch for sample in read_log(LOGS / "inspect_epochs.eval").samples} == {1, 2}


@pytest.mark.parametrize(("threshold", "regressions"), [(0.5, 2), (0.9, 12), (0.0, 0)])
def test_numbers_pass_from_the_threshold_on(tmp_path, threshold, regressions):
    def numbers(high, low, wrong):
        def change(log):
            for sample in log["samples"]:
                failed = int(sample["id"].split("-")[1]) in wrong
                sample["scores"] = {"grade": {"value": low if failed else high}}

        return change

    before = edited(tmp_path, numbers(1.0, 1.0, set()), side="before")
    after = edited(tmp_path, numbers(0.8, 0.2, {5, 7}))
    assert paired_outcomes(before, after, "grade", threshold=threshold).regressions == regressions
    with pytest.raises(ConfigError, match="expected a number"):
        paired_outcomes(before, after, "grade", threshold=float("nan"))


@pytest.mark.parametrize(
    ("value", "passes"), [("C", 1), ("I", 0), ("P", 0), ("N", 0), (True, 1), (False, 0), (1, 1), (0.0, 0), ("yes", 1)]
)
def test_values_of_scores(tmp_path, value, passes):
    after = edited(tmp_path, lambda log: log["samples"][0]["scores"]["match"].update(value=value))
    found = paired_outcomes(LOGS / "inspect_before.json", after, "match")
    assert found.samples[0].after == bool(passes)
    assert found.regressions == 3 - passes


def test_a_score_of_several_parts(tmp_path):
    def change(log):
        for sample in log["samples"]:
            sample["scores"] = {"graded": {"value": {"safe": 1, "polite": 0}}}

    sides = [edited(tmp_path, change, side=side) for side in ("before", "after")]
    assert paired_outcomes(*sides, "graded.safe").passed_before == 12  # type: ignore[call-arg]
    assert paired_outcomes(*sides, "graded.polite").passed_before == 0  # type: ignore[call-arg]


@pytest.mark.parametrize("field", ["error", "limit"])
def test_a_sample_without_a_result_is_lost(tmp_path, field):
    after = edited(tmp_path, lambda log: log["samples"][0].update({field: {"message": "x", "type": "token"}}))
    found = paired_outcomes(LOGS / "inspect_before.json", after, "match")
    assert (found.regressions, found.to_json()["lost_after"], found.to_json()["lost_before"]) == (3, 1, 0)
    before = edited(tmp_path, lambda log: log["samples"][0].update({field: {"message": "x"}}), side="before")
    found = paired_outcomes(before, LOGS / "inspect_after.json", "match")
    assert (found.passed_before, found.regressions, found.to_json()["lost_before"]) == (10, 2, 1)


def test_what_is_only_warned_of(tmp_path):
    def change(log):
        log["eval"]["model"] = "mockllm/before"
        log["plan"]["steps"][0]["params"] = {"tool_calls": "none"}

    found = paired_outcomes(LOGS / "inspect_before.json", edited(tmp_path, change), "match")
    assert found.warnings == ["both logs name the same model, 'mockllm/before'", "the logs differ in their solver"]


# lm-eval


LM_REFUSED = {
    "another prompt": (lambda rows: rows[0].update(prompt_hash="0"), "ask for"),
    "another document": (lambda rows: [r.update(doc_hash="0") for r in rows[:1] + rows[12:13]], "same id"),
    "a missing sample": (lambda rows: [rows.pop(12), rows.pop(0)], "1 of 12 samples of .* are not in"),
    "a row twice": (lambda rows: rows.append(rows[0]), "occurs twice"),
    "a NaN": (lambda rows: [row.update(exact_match=float("nan")) for row in rows], "not a finite number"),
    "no hashes": (lambda rows: rows[0].pop("doc_hash"), "doc_hash is NoneType"),
    "an id that is none": (lambda rows: rows[0].update(doc_id="0"), "doc_id is str"),
    "metrics that are none": (lambda rows: rows[0].update(metrics="exact_match"), "metrics is str"),
    "no rows": (lambda rows: rows.clear(), "are not in"),
}


@pytest.mark.parametrize("case", LM_REFUSED)
def test_logs_of_lm_eval_that_do_not_belong_together_are_refused(tmp_path, case):
    change, message = LM_REFUSED[case]
    with pytest.raises(DataError, match=message):
        paired_outcomes(LM_BEFORE, edited_rows(tmp_path, change), "exact_match,strict")


def test_a_metric_with_one_filter_has_its_plain_name(tmp_path):
    def one_filter(rows):
        rows[:] = [row for row in rows if row["filter"] == "strict"]

    found = read_log(edited_rows(tmp_path, one_filter))
    assert found.score_names == ["exact_match"]


def test_without_its_results_a_log_has_no_model(tmp_path):
    path = tmp_path / LM_AFTER.name
    path.write_bytes(LM_AFTER.read_bytes())
    found = read_log(path)
    assert (found.task, found.model, found.task_version) == ("sums", None, None)
    with pytest.raises(DataError, match="differ in their task version"):
        paired_outcomes(LM_BEFORE, path, "exact_match,strict")


def test_a_metric_of_which_less_is_better_is_refused(tmp_path):
    sides = []
    for log in (LM_BEFORE, LM_AFTER):
        folder = tmp_path / log.parent.name
        folder.mkdir()
        results = json.loads(next(log.parent.glob("results_*.json")).read_text())
        results["configs"]["sums"]["metric_list"][0]["higher_is_better"] = False
        (folder / next(log.parent.glob("results_*.json")).name).write_text(json.dumps(results))
        (folder / log.name).write_bytes(log.read_bytes())
        sides.append(folder / log.name)
    with pytest.raises(DataError, match="less is better"):
        paired_outcomes(*sides, "exact_match,strict")  # type: ignore[call-arg]
