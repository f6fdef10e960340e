"""Examples in two passes: the same examples as `read_examples`, in little memory, and nothing unchecked."""

from __future__ import annotations

import json
import tracemalloc

import datasets
import pytest

from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.data import stream as streaming
from holdfast.data.examples import as_chat, make_example, to_rows, uniform
from holdfast.data.rows import check_columns, example_from_row
from holdfast.data.sources import examples_from_rows, read_examples
from holdfast.data.splits import split_examples
from holdfast.data.stream import open_stream


def rows(n: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"prompt {i}", "completion": f"reply {i}"} for i in range(start, start + n)]


def write(path, entries):
    path.write_text("".join(json.dumps(row) + "\n" for row in entries), encoding="utf-8")
    return path


def test_gives_what_read_examples_gives(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(7))
    expected = read_examples(str(path))
    assert list(open_stream(path, template="none")) == expected
    assert list(open_stream(path)) == [as_chat(example) for example in expected]
    assert list(open_stream(rows(3), template="none", name="x")) == examples_from_rows(rows(3), name="x")
    data = datasets.Dataset.from_list(rows(3))
    assert [e.id for e in open_stream(data)] == [e.id for e in expected[:3]]
    assert list(open_stream(expected, template="none")) == expected


def test_mixed_formats_become_conversations():
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    mixed = [*rows(2), chat]
    assert list(open_stream(mixed, template="none", name="m")) == uniform(examples_from_rows(mixed, name="m"))
    text = [{"text": "only text"}]
    assert next(iter(open_stream(text, template="none"))).kind == "text"
    for bad, template in ((text, "chat"), ([*text, *rows(1)], "none")):
        with pytest.raises(DataError, match="no prompt"):
            open_stream(bad, template=template)


def test_duplicates_are_left_out_and_counted():
    found = open_stream([*rows(4), *rows(2), *rows(1, start=9), *rows(1)])
    assert (found.n, found.duplicates) == (5, 3)
    assert [e.where.split()[1] for e in found] == ["0", "1", "2", "3", "6"]
    assert len({e.id for e in found.sample}) == len(found.sample) == 5


def test_the_hash_depends_on_every_text_the_order_and_the_category():
    base = rows(4)
    changed = [
        base[::-1],
        base[:3],
        [*base[:3], {**base[3], "completion": "other"}],
        [*base[:3], {**base[3], "category": "c"}],
        [*base, base[0]],
    ]
    hashes = [open_stream(entries).sha256 for entries in (base, *changed)]
    assert len(set(hashes)) == len(hashes)
    assert open_stream([dict(row) for row in base], template="none").sha256 == hashes[0]


def test_a_file_is_hashed_by_its_bytes_too(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(2))
    first = open_stream(path)
    path.write_bytes(b"\n" + path.read_bytes())
    second = open_stream(path)
    assert first.sha256 == second.sha256
    assert first.file_sha256 != second.file_sha256
    assert open_stream(rows(2)).file_sha256 is None


def test_the_sample_depends_on_content_alone(monkeypatch):
    monkeypatch.setattr(streaming, "SAMPLE", 5)
    found = open_stream(rows(40))
    expected = sorted(e.id for e in found)[:5]
    assert [e.id for e in found.sample] == expected
    assert [e.id for e in open_stream(rows(40)[::-1]).sample] == expected


def test_all_faults_are_listed_and_none_of_the_text(tmp_path):
    bad = [*rows(1), {"prompt": "secret", "completion": ""}, {"prompt": "secret"}, {"prompt": 3, "completion": "x"}]
    path = write(tmp_path / "a.jsonl", bad)
    with pytest.raises(DataError, match="3 bad rows") as refused:
        open_stream(path)
    with pytest.raises(DataError) as expected:
        read_examples(str(path))
    assert str(refused.value) == str(expected.value)
    assert "secret" not in str(refused.value)
    with pytest.raises(DataError, match="expected columns"):
        open_stream([{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match="has no rows"):
        open_stream([])


@pytest.mark.parametrize("change", [lambda r: r[:-1], lambda r: [*r, *rows(1, start=50)], lambda r: [*r[1:], r[0]]])
def test_a_file_that_changes_between_the_passes_is_noticed(tmp_path, change):
    path = write(tmp_path / "a.jsonl", rows(5))
    found = open_stream(path)
    write(path, change(rows(5)))
    with pytest.raises(DataError, match="changed while it was being read"):
        list(found)


def test_what_can_be_read_only_once_is_refused():
    with pytest.raises(UnsupportedError, match="only once"):
        open_stream(iter(rows(2)))
    with pytest.raises(ConfigError, match="template 'chatty'"):
        open_stream(rows(2), template="chatty")


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(n: int) -> int:
        path = tmp_path / f"{n}.jsonl"
        with path.open("w", encoding="utf-8") as handle:
            for i in range(n):
                handle.write(json.dumps({"prompt": f"{i} " + "p" * 300, "completion": "c" * 300}) + "\n")
        tracemalloc.start()
        for _ in open_stream(path):
            pass
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(200)
    small, large = peak(500), peak(5000)
    assert large - small <= 50 * 4500, (small, large)


def test_category_is_read_kept_and_no_part_of_the_id():
    labelled = [{**row, "category": "theft"} for row in rows(6)]
    found = examples_from_rows(labelled, name="x")
    assert {e.category for e in found} == {"theft"}
    assert [e.id for e in found] == [e.id for e in examples_from_rows(rows(6), name="x")]
    assert as_chat(found[0]).category == "theft"
    assert {e.category for e in split_examples(found, seed=0).constraint} == {"theft"}
    assert {e.category for e in open_stream(labelled)} == {"theft"}
    assert "category" not in to_rows(found)[0]
    assert make_example("a", "b").category is None


def test_category_may_have_another_name():
    row = {"prompt": "a", "completion": "b", "kind": "x", "category": "y"}
    both = check_columns({"category": "kind", "prompt": "prompt"})
    assert example_from_row(row, both, "w").category == "x"
    assert example_from_row(row, check_columns({"category": "kind"}), "w").category == "x"
    assert example_from_row({**row, "kind": 4}, both, "w").category == "4"
    with pytest.raises(ValueError, match="category must be a short string, found a list"):
        example_from_row({**row, "kind": ["x"]}, both, "w")


@pytest.mark.parametrize("value", [3, ["a"], "x" * 101, None, " "])
def test_a_category_column_that_nobody_named_disturbs_nothing(value):
    row = {"prompt": "a", "completion": "b", "category": value}
    assert example_from_row(row, {}, "w").category is None
