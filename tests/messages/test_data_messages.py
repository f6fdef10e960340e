"""Data errors name the place, the reason and the remedy, and never the text."""

import csv
import gzip
import io
import json

import datasets
import pytest

from holdfast.core.errors import ConfigError, DataError
from holdfast.data import readers
from holdfast.data.sources import examples_from_rows, read_examples

SECRET = "unspeakable"
GOOD = json.dumps({"prompt": f"{SECRET} p", "completion": f"{SECRET} c"}).encode() + b"\n"


def refusal(path, **options):
    """The error of reading `path`, checked to hold no text of the data, its causes included."""
    with pytest.raises(DataError) as caught:
        read_examples(str(path), **options)
    error = caught.value
    assert error.exit_code == 3
    assert error.remedy
    assert SECRET not in str(error)
    assert error.__suppress_context__ or error.__context__ is None
    return error


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "unspeakable", "completion"', "not valid JSON: Expecting ':' delimiter (column 39)"),
        (b"unspeakable", "not valid JSON: Expecting value (column 1)"),
        (b'{"prompt": "unspeakable\x00", "completion": "c"}', "a NUL byte"),
        (b'{"prompt": "unspeakable", "prompt": "b", "completion": "c"}', "an object has the same key twice"),
        (b'{"prompt": "unspeakable", "completion": "c", "score": NaN}', "NaN is not JSON"),
        (b'{"prompt": "unspeakable", "completion": "c", "score": -Infinity}', "-Infinity is not JSON"),
        (b'{"prompt": "unspeakable\xff", "completion": "c"}', "not valid UTF-8 at byte 23"),
        (b"\xef\xbb\xbf" + GOOD.strip(), "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'["unspeakable", "c"]', "expected an object with named columns, found a list"),
        (b'"unspeakable"', "found a string"),
        (b"null", "found null"),
        (b'{"prompt": 3, "completion": "unspeakable"}', "prompt must be a list of messages, found a number"),
        (b'{"prompt": "unspeakable", "completion": true}', "completion must be a string, found a boolean"),
        (b'{"prompt": "unspeakable", "completion": ["c"]}', "completion must be a string, found a list"),
        (b'{"prompt": "unspeakable", "completion": null}', "prompt or completion is null"),
        (b'{"prompt": "", "completion": "unspeakable"}', "the prompt is empty"),
        (b'{"prompt": " \\n", "completion": "unspeakable"}', "the prompt is empty"),
        (b'{"prompt": "unspeakable", "completion": ""}', "the completion is empty or only whitespace"),
        (
            b'{"prompt": "unspeakable", "completion": " \\u00a0\\n"}',
            "the completion is empty or only whitespace",
        ),
        (b'{"prompt": "unspeakable", "completion": "c", "tools": ["t"]}', "tools must be a list of objects, or JSON"),
        (b'{"prompt": "unspeakable", "completion": "c", "tools": [{"k": 1}]}', "tools need a conversation"),
        (b'{"prompt": "unspeakable", "completion": "c", "images": ["t"]}', "column 'images' is not supported: rows wi"),
        (
            b'{"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}',
            "messages[0] has tool_calls, and its role is not assistant",
        ),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": "unspeakable"}]}',
            "messages[0].tool_calls must be a list of objects, or JSON text of one, found a string",
        ),
        (b'{"instruction": "unspeakable", "unspeakable, too": 1}', "messages, or text; found instruction, 1 other"),
        (b'{"messages": []}', "messages has no messages"),
        (b'{"messages": ["unspeakable"]}', "messages[0] must be an object with role and content"),
        (b'{"messages": [{"role": "unspeakable", "content": "x"}]}', "messages[0].role is not one of system"),
        (b'{"messages": [{"role": "user", "content": "x", "k": 1}]}', "messages[0] has keys besides role"),
        (b'{"messages": [{"role": "user", "content": ["x"]}]}', "messages[0].content must be a string"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "the last message must be from the assistant"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "the prompt is empty"),
        (
            b'{"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "user", "content": "y"}]}',
            "the completion must end with an assistant message",
        ),
    ],
    ids=lambda value: "line" if isinstance(value, bytes) else "reason",  # ids name the test's folder: keep text out
)
def test_bad_lines(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    error = refusal(path)
    assert f"{path}: 1 bad row: {path}:2: " in error.what
    assert reason in error.what


def test_all_faults_are_listed_up_to_twenty(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"{\n" * 19 + b'{"prompt": 1, "completion": 2}\n' * 11)
    error = refusal(path)
    assert "30 bad rows" in error.what
    assert error.what.count(f"; {path}:") == 19
    assert error.what.endswith("and 10 more")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_empty_files(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"[]" if name.endswith(".json") else b"")
    assert refusal(path).what == f"{path} has no rows"


def test_long_lines(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b'{"prompt": "' + b"x" * readers.MAX_LINE + b'"}\n')
    assert f"{path}:2: the line is longer than 10 MB" in refusal(path).what


def test_damaged_files(tmp_path):
    packed = gzip.compress(GOOD * 100)
    for number, data in enumerate((packed[:-20], GOOD, packed[:30] + b"\xff\xff" + packed[32:])):
        path = tmp_path / f"{number}.jsonl.gz"
        path.write_bytes(data)
        assert "is not a complete gzip file" in refusal(path).what
    path = tmp_path / "a.parquet"
    path.write_bytes(GOOD)
    assert "cannot be read as Parquet" in refusal(path).what
    path = tmp_path / "a.json"
    path.write_bytes(GOOD)
    assert f"{path}: expected one list of objects" in refusal(path).what


@pytest.mark.parametrize(
    ("data", "line", "reason"),
    [
        (b"prompt,prompt\n", 1, "a column name occurs twice"),
        (b"prompt,completion\nunspeakable\n", 2, "expected 2 fields, as in the header"),
        (b"prompt,completion\na,b\nunspeakable,b,c\n", 3, "expected 2 fields, as in the header"),
        (b'prompt,completion\na,b\n"unspeakable"x,b\n', 3, "not valid CSV"),
        (b'prompt,completion\na,b\n"unspeakable,b\n', 3, "not valid CSV"),
        (b"prompt,completion\nunspeakable\x00,b\n", 2, "a NUL byte"),
    ],
)
def test_bad_tables(tmp_path, data, line, reason):
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    what = refusal(path).what
    assert f"{path}:{line}: {reason}" in what


def test_a_table_in_another_encoding(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("prompt,completion\nunspeakable é,b\n".encode("latin-1"))
    assert "not valid UTF-8" in refusal(path).what


@pytest.mark.parametrize(
    ("row", "columns", "proposal"),
    [
        (
            {"instruction": SECRET, "input": "", "output": "o"},
            None,
            "{prompt: instruction, completion: output}",
        ),
        ({"question": SECRET, "answer": "a"}, None, "{prompt: question, completion: answer}"),
        ({"prompts": SECRET, "completions": "a"}, None, "{prompt: prompts, completion: completions}"),
        ({"foo": SECRET}, None, "{prompt: <column>, completion: <column>}"),
        ({"mesages": [SECRET]}, {"messages": "messages"}, "{messages: mesages}"),
        ({"question": SECRET, "reply": "a"}, {"prompt": "questoin"}, "{prompt: question, completion: reply}"),
    ],
)
def test_other_columns_are_listed_with_the_mapping_to_write(tmp_path, row, columns, proposal):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    error = refusal(path, columns=columns)
    assert error.what.startswith(f"{path}:1: expected columns ")
    assert error.what.endswith(f"found {', '.join(sorted(row))}")
    wanted = f"columns: {proposal}"
    assert error.remedy == (
        f"name the columns to use, for example {wanted}; in a run file task: {{data: FILE, {wanted}}}"
    )


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (f"How is {SECRET} made?,Sorry {SECRET}\nHow?,No\n", "2 others (is the header line missing?)"),
        (f"id,{SECRET}: how?\n1,No\n", "id, 1 other (is the header line missing?)"),
        (f"id,{SECRET}{'x' * 20}\n1,No\n", "id, 1 other (is the header line missing?)"),
        (f"{SECRET}-é,source.name\n1,No\n", "source.name, 1 other (is the header line missing?)"),
    ],
)
def test_a_table_without_a_header_line_shows_none_of_its_text(content, found):
    with pytest.raises(DataError) as caught:
        examples_from_rows(csv.DictReader(io.StringIO(content)), name="a table")
    assert caught.value.what.endswith(f"; found {found}")
    assert SECRET not in str(caught.value)


def test_a_strange_name_that_the_user_wrote_is_a_column():
    columns = {"prompt": "Best Question", "completion": "answer"}
    with pytest.raises(DataError, match="expected columns answer; found Best Question, reply") as caught:
        examples_from_rows([{"Best Question": SECRET, "reply": "a"}], name="n", columns=columns)
    assert caught.value.remedy.endswith("columns: {prompt: Best Question, completion: reply}}")


def test_bad_column_mappings():
    for columns, message in (
        ({"promt": "a"}, "did you mean 'prompt'"),
        ({"prompt": "a", "text": "b"}, "map prompt and completion, or messages, or text"),
    ):
        with pytest.raises(ConfigError) as caught:
            examples_from_rows([], name="n", columns=columns)
        assert message in caught.value.remedy


def test_text_is_refused_in_mixtures(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": SECRET}) + "\n")
    path.write_bytes(GOOD + path.read_bytes())
    assert f"1 text examples are mixed with 1 prompt/completion examples (first text example: {path}:2)" in (
        refusal(path).what
    )


def test_missing_files_name_the_nearest(tmp_path):
    (tmp_path / "safety.jsonl").write_bytes(GOOD)
    error = refusal(tmp_path / "saftey.jsonl")
    assert error.what == f"{tmp_path / 'saftey.jsonl'} does not exist"
    assert error.remedy == "did you mean 'safety.jsonl'?"
    assert "nor does its folder" in refusal(tmp_path / "none" / "a.jsonl").what
    assert "is a folder" in refusal(tmp_path).what
    (tmp_path / "a.txt").write_bytes(GOOD)
    assert "unknown file ending; expected one of .jsonl" in refusal(tmp_path / "a.txt").what


def test_hub_failures_do_not_quote_the_library(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise datasets.exceptions.DatasetGenerationError(f"cannot cast {SECRET}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    what = refusal("org/set", split="test").what
    assert "hub data set 'org/set' (subset None, split test, revision None)" in what
    assert "DatasetGenerationError" in what


def test_rows_in_memory_are_named_by_number():
    rows = [{"prompt": "p", "completion": "c"}, {"prompt": SECRET, "completion": 4}]
    with pytest.raises(DataError) as caught:
        examples_from_rows(rows, name="the safety set")
    assert "row 1 of the safety set: completion must be a string, found a number" in caught.value.what
    assert SECRET not in str(caught.value)
