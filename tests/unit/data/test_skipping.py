"""Malformed rows that are left out on request: counted, named, and refused where they are not few."""

from __future__ import annotations

import json

import pytest

from holdfast.core.errors import DataError
from holdfast.data.readers import READERS
from holdfast.data.rows import BadRowsError, Problems
from holdfast.data.sources import read_examples

GOOD = [{"prompt": f"question {i}", "completion": f"reply {i}"} for i in range(40)]


def written(path, good=40, bad=()):
    """A file whose bad lines stand between the fifth row and the sixth."""
    lines = [json.dumps(row) for row in GOOD[:good]]
    path.write_text("\n".join([*lines[:5], *bad, *lines[5:]]) + "\n", encoding="utf-8")
    return str(path)


BAD = ["{", '{"prompt": "a", "prompt": "b", "completion": "c"}', '{"prompt": "a", "completion": NaN}', "[1]",
       '{"prompt": "a", "completion": " "}', '{"messages": []}', '{"question": "a"}']  # fmt: skip


def test_every_bad_row_is_refused_by_default_and_skipped_on_request(tmp_path):
    path = written(tmp_path / "rows.jsonl", bad=BAD)
    with pytest.raises(BadRowsError, match=f"{len(BAD)} bad rows"):
        read_examples(path)
    skipped = Problems(path)
    kept = read_examples(path, skipped=skipped)
    assert [e.prompt for e in kept] == [row["prompt"] for row in GOOD]
    assert skipped.total == len(BAD)
    assert [place.split(": ")[0] for place in skipped.listed] == [f"{path}:{6 + i}" for i in range(len(BAD))]


def test_a_file_without_bad_rows_skips_none(tmp_path):
    path = written(tmp_path / "rows.jsonl")
    skipped = Problems(path)
    assert read_examples(path, skipped=skipped) == read_examples(path)
    assert (skipped.total, skipped.listed) == (0, [])


@pytest.mark.parametrize(
    ("good", "bad", "accepted"), [(40, 20, True), (40, 21, False), (20, 20, False), (20, 19, True), (1, 1, False)]
)
def test_at_most_twenty_of_a_small_file_and_never_half_of_it(tmp_path, good, bad, accepted):
    path = written(tmp_path / "rows.jsonl", good=good, bad=["{"] * bad)
    skipped = Problems(path)
    if accepted:
        assert len(read_examples(path, skipped=skipped)) == good
        return
    with pytest.raises(BadRowsError, match="too many to skip"):
        read_examples(path, skipped=skipped)


@pytest.mark.parametrize(("bad", "accepted"), [(30, True), (31, False)])
def test_one_percent_of_a_large_file(bad, accepted):
    problems = Problems("rows")
    for i in range(bad):
        problems.add(f"rows:{i}", "bad")
    if accepted:
        problems.require_few(3000 - bad)
        assert len(problems.listed) == 20
    else:
        with pytest.raises(BadRowsError, match=r"31 bad rows.*and 11 more.*too many to skip"):
            problems.require_few(3000 - bad)


def test_a_first_row_with_other_columns_is_one_bad_row_unless_all_are(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"question": "a"}', *(json.dumps(row) for row in GOOD)]))
    skipped = Problems(str(path))
    assert len(read_examples(str(path), skipped=skipped)) == 40
    assert skipped.total == 1
    path.write_text('{"question": "a", "answer": "b"}\n' * 3)
    with pytest.raises(DataError, match="expected columns prompt and completion") as caught:
        read_examples(str(path), skipped=Problems(str(path)))
    assert "prompt: question, completion: answer" in caught.value.remedy


def test_a_file_of_bad_rows_alone_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n{\n")
    with pytest.raises(BadRowsError, match="well-formed: 0"):
        read_examples(str(path), skipped=Problems(str(path)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", b'prompt,completion\na,b\nc,d\ne,f\ng,"h'),
        ("rows.csv", b"prompt,completion\na,b\nc,d\ne,f\n\xff,g\n"),
        ("rows.csv", b"prompt,prompt\na,b\n"),
        ("rows.json", b'[{"prompt": "a", "completion": "b"}, '),
    ],
)
def test_what_hides_the_rest_of_a_file_is_never_skipped(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert path.suffix in READERS
    with pytest.raises(BadRowsError, match="more than a row to skip"):
        read_examples(str(path), skipped=Problems(str(path)))


def test_a_csv_row_with_too_few_fields_is_one_row(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\na,b\nc\nd,e\nf,g\n")
    skipped = Problems(str(path))
    assert [e.prompt for e in read_examples(str(path), skipped=skipped)] == ["a", "d", "f"]
    assert skipped.listed == [f"{path}:3: expected 2 fields, as in the header"]
