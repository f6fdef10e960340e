"""Reading files and rows."""

import csv
import gzip
import json

import datasets
import pytest

from holdfast.core.errors import ConfigError, DataError
from holdfast.data import readers, sources
from holdfast.data.sources import examples_from_rows, read_examples

ROWS = [{"prompt": "p one", "completion": "c one"}, {"prompt": "p two", "completion": "c two"}]
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def pairs(examples):
    return [(example.prompt, example.completion) for example in examples]


EXPECTED = [("p one", "c one"), ("p two", "c two")]


@pytest.mark.parametrize(
    "data",
    [
        jsonl(ROWS),
        b"\xef\xbb\xbf" + jsonl(ROWS),
        jsonl(ROWS).replace(b"\n", b"\r\n"),
        jsonl(ROWS).rstrip(),
        jsonl(ROWS) + b"\n  \n",
    ],
    ids=["plain", "bom", "crlf", "no newline at the end", "blank lines"],
)
def test_jsonl(tmp_path, data):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    examples = read_examples(str(path))
    assert pairs(examples) == EXPECTED
    assert [example.where for example in examples] == [f"{path}:1", f"{path}:2"]


def test_gzip_json_csv_tsv_and_parquet(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS)))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as handle:
            writer = csv.DictWriter(handle, ["prompt", "completion"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    for path in tmp_path.iterdir():
        assert pairs(read_examples(str(path))) == EXPECTED, path.name


def test_parquet_conversations(tmp_path):
    datasets.Dataset.from_list([CHAT, CHAT]).to_parquet(tmp_path / "a.parquet")
    examples = read_examples(str(tmp_path / "a.parquet"))
    assert examples[1].completion == ({"role": "assistant", "content": "hello"},)
    assert examples[1].where == f"row 1 of {tmp_path / 'a.parquet'}"


def test_csv_fields_with_newlines_quotes_and_an_unnamed_index(tmp_path):
    (tmp_path / "a.csv").write_text(',prompt,completion\n0,"p, ""q""\nr",c\n1,x,y\n')
    examples = read_examples(str(tmp_path / "a.csv"))
    assert pairs(examples) == [('p, "q"\nr', "c"), ("x", "y")]
    assert [example.where for example in examples] == [f"{tmp_path / 'a.csv'}:{n}" for n in (2, 4)]


def test_a_csv_row_is_at_its_first_line_below_blank_lines_and_rows_of_several_lines(tmp_path):
    """Lines as an editor counts them, whatever ends them."""
    text = '"prompt\nquoted",completion\n\n"a\n\nb","c\nd"\n\n\ne,f\n"g\nh",i\n'
    for name, end in (("unix.csv", "\n"), ("windows.csv", "\r\n")):
        (tmp_path / name).write_bytes(text.replace("\n", end).encode())
        columns = {"prompt": f"prompt{end}quoted"}
        examples = read_examples(str(tmp_path / name), columns=columns)
        assert [example.where for example in examples] == [f"{tmp_path / name}:{n}" for n in (4, 10, 11)]


def test_csv_leaves_the_field_size_limit_alone(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"prompt,completion\np,{'c' * (before + 1)}\n")
    assert len(read_examples(str(tmp_path / "a.csv"))[0].completion) == before + 1
    assert csv.field_size_limit() == before


def test_messages_split_before_the_last_reply():
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "tool_calls": None},
    ]
    (example,) = examples_from_rows([{"messages": turns}], name="n")
    assert example.prompt == tuple(turns[:4])
    assert example.completion == ({"role": "assistant", "content": "d"},)


def test_sharegpt_is_converted():
    rows = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}]
    (example,) = examples_from_rows(rows, name="n")
    assert example == examples_from_rows([CHAT], name="n")[0]


def test_dataset_rows_and_null_columns():
    rows = datasets.Dataset.from_list([{**CHAT, "prompt": None, "completion": None, "tools": None}])
    (example,) = examples_from_rows(rows, name="safety")
    assert example.kind == "chat"
    assert example.where == "row 0 of safety"


def test_prompt_and_completion_win_over_messages_and_text():
    (example,) = examples_from_rows([{**ROWS[0], **CHAT, "text": "t"}], name="n")
    assert pairs([example]) == EXPECTED[:1]
    (example,) = examples_from_rows([{"prompt": "only", **CHAT}], name="n")
    assert example.kind == "chat"


def test_mixed_rows_become_conversational():
    examples = examples_from_rows([ROWS[0], CHAT], name="n")
    assert [example.kind for example in examples] == ["chat", "chat"]


def test_columns_are_mapped(tmp_path):
    rows = [{"question": "q", "answer": "a"}]
    (example,) = examples_from_rows(rows, name="n", columns={"prompt": "question", "completion": "answer"})
    assert pairs([example]) == [("q", "a")]
    (example,) = examples_from_rows([{"prompt": "q", "out": "a"}], name="n", columns={"completion": "out"})
    assert pairs([example]) == [("q", "a")]
    (example,) = examples_from_rows(rows, name="n", columns={"text": "question"})
    assert (example.kind, example.completion) == ("text", "q")


def test_limit_reads_no_further(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS) + b"{bad\n")
    assert pairs(read_examples(str(path), limit=2)) == EXPECTED
    with pytest.raises(ConfigError):
        read_examples(str(path), limit=0)


def test_a_long_line_is_skipped_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([ROWS[0], {"prompt": "x" * 950, "completion": "y"}, ROWS[1], {"prompt": 1}]))
    with pytest.raises(DataError) as caught:
        read_examples(str(path))
    assert "2 bad rows" in caught.value.what
    assert f"{path}:2: the line is longer" in caught.value.what
    assert f"{path}:4: " in caught.value.what


def test_a_line_of_exactly_the_limit_is_accepted(tmp_path, monkeypatch):
    line = jsonl(ROWS[:1])
    monkeypatch.setattr(readers, "MAX_LINE", len(line))
    (tmp_path / "a.jsonl").write_bytes(line + line)
    assert len(read_examples(str(tmp_path / "a.jsonl"))) == 2


def test_strange_text_is_kept(tmp_path):
    texts = ["שלום", "👩‍👩‍👧", "e\u0301", "half \ud83d", "\u202eabc"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"prompt": text, "completion": text} for text in texts]))
    assert [example.prompt for example in read_examples(str(path))] == texts


def test_hub_sets_are_loaded_without_running_their_code(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    examples = read_examples("org/set", subset="main", split="test", revision="abc", limit=1)
    assert pairs(examples) == EXPECTED[:1]
    assert examples[0].where == "row 0 of org/set"
    read_examples("single-name")
    assert calls == [
        (("org/set",), {"name": "main", "split": "test", "revision": "abc"}),
        (("single-name",), {"name": None, "split": "train", "revision": None}),
    ]


@pytest.mark.parametrize("source", ["x.jsonl", "org/x.csv", "./org/x", "/a/b/c", "a/b/c"])
def test_what_cannot_be_a_hub_id_is_a_file(source, monkeypatch):
    monkeypatch.setattr(sources, "_load_hub", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match="does not exist"):
        read_examples(source)


@pytest.mark.parametrize("option", ["split", "subset", "revision"])
def test_hub_options_are_refused_for_files(tmp_path, option):
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    with pytest.raises(ConfigError, match=option):
        read_examples(str(tmp_path / "a.jsonl"), **{option: "x"})
