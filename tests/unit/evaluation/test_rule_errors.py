"""Error rates of the rules: drawn balanced and blind, stored without text, counted with exact intervals."""

from __future__ import annotations

import importlib
import json
import stat
import sys
from collections import Counter
from pathlib import Path

import pytest
from scipy.stats import beta

from holdfast.core.errors import CheckpointError, DataError
from holdfast.judging import rule_errors
from holdfast.judging.refusal_rules import RULES_REVISION
from holdfast.judging.rule_errors import rule_error_rates

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "refusal_rules"
MODELS = ("small", "medium", "large")
WORD = "zucchini"  # in every prompt and reply, so that a text that leaks is seen


@pytest.fixture(scope="module")
def measure():
    sys.path.insert(0, str(SCRIPTS))
    other = sys.modules.pop("measure", None)  # another benchmark has a script of this name
    try:
        return importlib.import_module("measure")
    finally:
        sys.path.remove(str(SCRIPTS))
        sys.modules.pop("measure", None)
        if other is not None:
            sys.modules["measure"] = other


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def replies(model: str, n: int = 60) -> list[dict]:
    texts = ["I can't help with that {word}.", "Take the {word} and cut it.", ""]
    return [
        {"model": model, "id": str(i), "prompt": f"{WORD} {i}?", "reply": texts[i % 3].format(word=f"{WORD} {i}"),
         "truncated": False}
        for i in range(n)
    ]  # fmt: skip


@pytest.fixture
def drawn(tmp_path, measure):
    files = [write(tmp_path / f"{model}.jsonl", replies(model)) for model in MODELS]
    assert measure.main(["draw", *map(str, files), "--output", str(tmp_path / "private"), "--each", "30"]) == 0
    return tmp_path / "private"


def labelled(drawn: Path, measure, wrong: dict[tuple[str, str], str] | None = None) -> list[dict]:
    """Labels as the rules say, except the first item of each (model, class) that is in `wrong`."""
    left, rows = dict(wrong or {}), []
    for row in measure.read_rows(drawn / "key.jsonl")[1:]:
        label = left.pop((row["model"], row["rule"]), row["rule"])
        rows.append({"item": row["item"], "label": label})
    assert not left
    return rows


def test_the_sheet_is_balanced_blind_and_private(drawn, measure):
    sheet, (header, *key) = measure.read_rows(drawn / "sheet.jsonl"), measure.read_rows(drawn / "key.jsonl")
    assert {tuple(sorted(row)) for row in sheet} == {("item", "label", "prompt", "reply", "truncated")}
    assert Counter((row["model"], row["rule"]) for row in key) == {
        (model, rule): 10 for model in MODELS for rule in ("refused", "answered")
    }
    assert header["header"]["replies"]["small"] == {"refused": 20, "answered": 20, "unsorted": 20}
    order = [row["rule"] for row in key]
    assert order not in (sorted(order), sorted(order, reverse=True))
    for name in ("sheet.jsonl", "key.jsonl"):
        assert stat.S_IMODE((drawn / name).stat().st_mode) == 0o600


def test_the_draw_depends_on_seed_and_replies_alone(measure):
    rows = [row for model in MODELS for row in replies(model)]
    first = measure.draw(rows, each=30, seed=1)
    assert measure.draw(rows[::-1], each=30, seed=1) == first
    assert measure.draw(rows, each=30, seed=2)[1] != first[1]


@pytest.mark.parametrize(
    ("available", "wanted", "taken"),
    [
        ({"a": 9, "b": 9, "c": 9}, 6, {"a": 2, "b": 2, "c": 2}),
        ({"a": 1, "b": 9, "c": 9}, 7, {"a": 1, "b": 3, "c": 3}),
        ({"a": 1, "b": 1}, 7, {"a": 1, "b": 1}),
        ({}, 3, {}),
    ],
)
def test_what_a_model_lacks_is_taken_from_the_others(measure, available, wanted, taken):
    assert measure.shares(available, wanted) == taken


def test_from_labels_to_what_the_package_ships(drawn, measure, tmp_path):
    wrong = {("small", "refused"): "answered", ("large", "refused"): "unclear", ("small", "answered"): "refused"}
    labels, filled = tmp_path / "labels.jsonl", write(tmp_path / "filled.jsonl", labelled(drawn, measure, wrong))
    arguments = ["collect", str(drawn), "--labels", str(filled), "--labeller", "a test", "--output", str(labels)]
    assert measure.main(arguments) == 0
    text = labels.read_text(encoding="utf-8")
    assert WORD not in text
    assert len(text.splitlines()) == 61
    assert set(json.loads(text.splitlines()[1])) == {"prompt_sha256", "reply_sha256", "model", "rule", "label"}
    assert measure.main(["rates", "--labels", str(labels), "--output", str(tmp_path / "rates.json")]) == 0
    found = rule_error_rates(tmp_path / "rates.json")
    assert (found.revision, found.labeller) == (RULES_REVISION, "a test")
    assert (found.false_refusals.n, found.false_refusals.errors, found.false_refusals.unclear) == (30, 2, 1)
    assert (found.missed_refusals.n, found.missed_refusals.errors, found.missed_refusals.unclear) == (30, 1, 0)
    false, missed = found.models["small"]
    assert (false.n, false.errors, missed.n, missed.errors) == (10, 1, 10, 1)
    expected = beta.ppf(0.025, 2, 29), beta.ppf(0.975, 3, 28)
    assert found.false_refusals.interval == pytest.approx(expected, rel=1e-8)


def test_the_filled_sheet_itself_serves(drawn, measure, tmp_path):
    labels = {row["item"]: row["label"] for row in labelled(drawn, measure)}
    sheet = [{**row, "label": labels[row["item"]]} for row in measure.read_rows(drawn / "sheet.jsonl")]
    header, *key = measure.read_rows(drawn / "key.jsonl")
    assert len(measure.collect(header["header"], key, sheet, "a test")) == 61
    sheet[3]["reply"] += "!"
    with pytest.raises(DataError, match="not the one that was drawn"):
        measure.collect(header["header"], key, sheet, "a test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.pop(), "1 of 60 items have no label"),
        (lambda rows: rows.append(rows[0]), "given twice"),
        (lambda rows: rows[0].update(label="maybe"), "no label of"),
        (lambda rows: rows[0].update(item=999), "unknown"),
    ],
)
def test_labels_that_do_not_fit_are_refused(drawn, measure, change, message):
    rows = labelled(drawn, measure)
    change(rows)
    header, *key = measure.read_rows(drawn / "key.jsonl")
    with pytest.raises(DataError, match=message):
        measure.collect(header["header"], key, rows, "a test")


def test_labels_of_another_revision_are_refused(drawn, measure):
    header, *key = measure.read_rows(drawn / "key.jsonl")
    with pytest.raises(DataError, match="draw again"):
        measure.collect({**header["header"], "revision": "0"}, key, labelled(drawn, measure), "a test")


@pytest.mark.parametrize("row", [{}, {"model": "m", "id": 3}, {**replies("m")[0], "truncated": "no"}])
def test_replies_without_their_fields_are_refused(measure, tmp_path, row, capsys):
    path = write(tmp_path / "replies.jsonl", [row])
    assert measure.main(["draw", str(path), "--output", str(tmp_path / "out")]) == 3
    assert "row 1" in capsys.readouterr().err


@pytest.fixture
def shipped(drawn, measure, tmp_path):
    header, *key = measure.read_rows(drawn / "key.jsonl")
    rows = measure.collect(header["header"], key, labelled(drawn, measure), "a test")
    path = tmp_path / "shipped.json"
    path.write_text(json.dumps(measure.error_rates(rows, "0" * 64).to_json()), encoding="utf-8")
    return path


def test_rates_of_another_revision_are_none(shipped, tmp_path):
    assert rule_error_rates(shipped) is not None
    stored = json.loads(shipped.read_text())
    shipped.write_text(json.dumps(stored | {"revision": "1"}))
    assert rule_error_rates(shipped) is None
    assert rule_error_rates(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored["false_refusals"].update(errors=3),
        lambda stored: stored["false_refusals"].update(n="30"),
        lambda stored: stored["models"]["small"]["missed_refusals"].update(interval=[0.0, 0.01]),
        lambda stored: stored.pop("models"),
        lambda stored: stored.update(models=[]),
    ],
)
def test_rates_that_are_not_those_of_their_counts_are_refused(shipped, change):
    stored = json.loads(shipped.read_text())
    change(stored)
    shipped.write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="not the error rates"):
        rule_error_rates(shipped)


def test_what_is_shipped_can_be_read():
    found = rule_error_rates()
    assert found is None or found.revision == RULES_REVISION
    assert rule_errors.DATA.parent == Path(rule_errors.__file__).parent
