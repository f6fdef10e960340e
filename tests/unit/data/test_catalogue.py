"""Public data sets by name, from a folder and from the hub."""

import json
import os
from collections import Counter
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from tests.protocol_data import CATEGORIES as WRITTEN
from tests.protocol_data import make_data_folder

from holdfast.core.errors import ConfigError, DataError
from holdfast.data import sources
from holdfast.data.harm_categories import CATEGORIES
from holdfast_lab.data import catalogue
from holdfast_lab.data.catalogue import NAMES, load

COLUMNS = {
    "beavertails": {"prompt", "response", "is_safe", "categories"},
    "beavertails_evaluation": {"prompt", "category"},
    "refusals": {"prompt", "response"},
    "harmful_with_refusals": {"prompt", "response", "refusal", "category"},
    "advbench": {"prompt"},
    "xstest": {"prompt", "safe", "category"},
    "sst2": {"sentence", "label"},
    "ag_news": {"text", "label"},
    "gsm8k": {"question", "answer"},
}
COMMIT = "a" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_data_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)


def text_file(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_every_name_has_its_columns(folder):
    assert set(NAMES) == set(COLUMNS)
    for name, columns in COLUMNS.items():
        found = load(name, folder=folder)
        assert {frozenset(row) for row in found.rows} == {frozenset(columns)}, name
        assert (found.name, found.origin, found.revision) == (name, "folder", None)


def test_the_categories_are_those_of_the_data_in_the_order_of_beaver_dam():
    assert CATEGORIES == WRITTEN
    assert sorted(CATEGORIES) == [*CATEGORIES]


def test_beavertails_labels(folder):
    rows = load("beavertails", "train", folder=folder).rows
    raw = [json.loads(line) for line in (folder / "beavertails/30k_train_partial.jsonl").read_text().splitlines()]
    assert [row["is_safe"] for row in rows] == [row["is_safe"] for row in raw]
    for row, original in zip(rows, raw, strict=True):
        if original["label_source"] == "is_safe_flag":
            assert row["categories"] is None
        else:
            assert row["categories"] == [name for name, marked in original["category"].items() if marked]
    assert any(row["categories"] is None for row in rows)
    assert any(row["categories"] == [] for row in rows)


def test_incomplete_splits_say_so_and_complete_files_come_first(folder, tmp_path):
    partial = {name: load(name, "train", folder=folder).partial for name in ("beavertails", "ag_news", "sst2", "gsm8k")}
    assert partial == {"beavertails": True, "ag_news": True, "sst2": False, "gsm8k": False}
    assert load("beavertails", "test", folder=folder).partial is False
    row = (folder / "beavertails/30k_test.jsonl").read_text().splitlines()[0]
    text_file(tmp_path / "beavertails/30k_train_partial.jsonl", f"{row}\n{row}\n")
    text_file(tmp_path / "beavertails/30k_train.jsonl", f"{row}\n")
    found = load("beavertails", folder=tmp_path)
    assert (len(found.rows), found.partial) == (1, False)


def test_news_of_both_splits_has_one_shape(tmp_path):
    text_file(tmp_path / "ag_news/test.csv", '"4","Cats win","A second\\team of ""cats""  won. "\n"1","Peace","Now"\n')
    text_file(tmp_path / "ag_news/train.csv", '"2","Goal","At last"\n')
    line = {"text": 'Cats win A second\\team of "cats"  won. ', "label": 3, "label_text": "Sci/Tech"}
    text_file(tmp_path / "ag_news/train_partial.jsonl", json.dumps(line) + "\n")
    test = load("ag_news", "test", folder=tmp_path).rows
    assert test == [{"text": 'Cats win A second\\team of "cats"  won.', "label": 3}, {"text": "Peace Now", "label": 0}]
    assert load("ag_news", "train", folder=tmp_path).rows == [{"text": "Goal At last", "label": 1}]
    (tmp_path / "ag_news/train.csv").unlink()
    assert load("ag_news", "train", folder=tmp_path).rows == [test[0]]


def test_sentences_lose_the_blank_at_their_end(folder):
    raw = (folder / "sst2_glue/dev.tsv").read_text().splitlines()[1]
    assert raw.endswith(" . \t0")
    first = load("sst2", "validation", folder=folder).rows[0]
    assert first == {"sentence": raw.split("\t")[0].rstrip(), "label": 0}


def test_pairs_copied_from_the_test_split_are_dropped(folder):
    found = load("harmful_with_refusals", folder=folder)
    test = {(row["prompt"], row["response"]) for row in load("beavertails", "test", folder=folder).rows}
    assert (found.dropped, len(found.rows)) == (2, 10)
    assert not [row for row in found.rows if (row["prompt"], row["response"]) in test]


def test_refusals_with_an_input_show_it_below(tmp_path):
    rows = [{"instruction": "Judge this", "input": "a pie", "output": "Good"}]
    text_file(tmp_path / "safety_tuned_llamas/safety_only_data_Instructions.json", json.dumps(rows))
    assert load("refusals", folder=tmp_path).rows == [{"prompt": "Judge this\n\na pie", "response": "Good"}]


def test_the_hash_is_of_the_rows(folder, tmp_path):
    first = load("gsm8k", "test", folder=folder)
    assert load("gsm8k", "test", folder=folder).sha256 == first.sha256
    lines = (folder / "gsm8k/test.jsonl").read_text().splitlines()
    text_file(tmp_path / "gsm8k/test.jsonl", "\n".join([*lines[:-1], lines[-1].replace("Ann", "Bea")]))
    assert load("gsm8k", "test", folder=tmp_path).sha256 != first.sha256
    assert first.describe()["rows"] == len(first.rows)
    json.dumps(first.describe())


def test_the_variable_names_the_folder_and_the_argument_wins(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_DATA", str(folder))
    assert load("xstest").origin == "folder"
    text_file(tmp_path / "xstest/xstest_prompts.csv", "id,prompt,type,label,focus,note\n1,hi there,a,safe,b,c\n")
    assert load("xstest", folder=tmp_path).rows == [{"prompt": "hi there", "safe": True, "category": "a"}]


def test_an_empty_variable_means_the_hub(monkeypatch):
    monkeypatch.setenv("HOLDFAST_DATA", "")
    assert catalogue.data_folder() is None


@pytest.mark.parametrize(
    ("arguments", "kind", "message", "remedy"),
    [
        ({"name": "beavertail"}, ConfigError, "unknown data set 'beavertail'", "beavertails"),
        ({"name": "sst2", "split": "test"}, ConfigError, "no split 'test'", "validation"),
        ({"name": "sst2", "folder": Path("/nowhere/at/all")}, DataError, "does not exist", "HOLDFAST_DATA"),
        ({"name": "sst2", "folder": Path(__file__).parent}, DataError, "has no sst2_glue/train.tsv", "add the file"),
        ({"name": "beavertails", "folder": Path(__file__).parent}, DataError, "nor beavertails/30k_train_partial", ""),
        ({"name": "xstest"}, DataError, "not on the hub", "set HOLDFAST_DATA to a folder that holds xstest/xstest"),
    ],
    ids=["name", "split", "no folder", "no file", "no file of two", "hub"],
)
def test_what_cannot_be_loaded_is_refused_with_a_remedy(arguments, kind, message, remedy):
    with pytest.raises(kind, match=message) as error:
        load(**arguments)
    assert remedy in error.value.remedy


BAD = {
    "beavertails/30k_test.jsonl": [
        '{"prompt": "secret text", "response": "x", "is_safe": "yes", "category": {}}',
        '{"prompt": "secret text", "response": "x", "is_safe": true, "category": {"other": true}}',
        '{"prompt": 7, "response": "x", "is_safe": true, "category": {}}',
        json.dumps(
            {"prompt": "secret text", "response": "x", "is_safe": True, "category": dict.fromkeys(CATEGORIES, "false")}
        ),
        "[1]",
        "{broken secret text",
    ],
    "sst2_glue/train.tsv": [
        "sentence\tlabel",
        "secret text\t2",
        "secret text\t0.9",
        "secret text\tgood",
        " \t1",
        "secret\ttext\t1",
    ],
    "ag_news/test.csv": ['"5","secret","text"', '"0","secret","text"', '"1","secret text"', '"x","secret","text"'],
    "xstest/xstest_prompts.csv": ["id,prompt,type,label,focus,note", "1,secret text,a,maybe,b,c"],
}


@pytest.mark.parametrize(
    ("name", "file"),
    [("beavertails", "beavertails/30k_test.jsonl"), ("sst2", "sst2_glue/train.tsv"),
     ("ag_news", "ag_news/test.csv"), ("xstest", "xstest/xstest_prompts.csv")],
    ids=["beavertails", "sst2", "ag_news", "xstest"],
)  # fmt: skip
def test_every_bad_row_is_named_by_its_place_and_never_quoted(tmp_path, name, file):
    lines = BAD[file]
    header = lines[0].startswith(("sentence", "id,"))
    text_file(tmp_path / file, "\n".join(lines) + "\n")
    split = {"beavertails": "test", "ag_news": "test"}.get(name)
    with pytest.raises(DataError, match=f"{len(lines) - header} bad row") as error:
        load(name, split, folder=tmp_path)
    for number in range(1 + header, len(lines) + 1):
        assert f"{file}:{number}: " in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("label", [0.9, 1.0, True, None], ids=str)
def test_a_label_of_the_hub_that_is_no_integer_is_refused_not_cut(hub, label):
    hub.rows = [{"sentence": "a film", "label": label}]
    with pytest.raises(DataError, match="column 'label' must be a whole number"):
        load("sst2")


def test_an_empty_file_is_refused(tmp_path):
    text_file(tmp_path / "gsm8k/test.jsonl", "")
    with pytest.raises(DataError, match="has no rows"):
        load("gsm8k", "test", folder=tmp_path)


class Hub:
    """Stands for the hub: notes what is asked for."""

    def __init__(self, rows):
        self.rows, self.loaded, self.asked = rows, [], []

    def load_dataset(self, source, **options):
        self.loaded.append((source, options))
        return datasets.Dataset.from_list(self.rows)

    def dataset_info(self, repository, *, revision, timeout):
        self.asked.append((repository, revision))
        return huggingface_hub.hf_api.DatasetInfo(id=repository, sha=COMMIT)


@pytest.fixture
def hub(monkeypatch):
    made = Hub([{"prompt": "tease the cat", "category": CATEGORIES[0], "category_id": 0}])
    monkeypatch.setattr(datasets, "load_dataset", made.load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda _, *a, **k: made.dataset_info(*a, **k))
    return made


def test_the_head_of_a_hub_data_set_is_loaded_at_its_commit(hub):
    found = load("beavertails_evaluation")
    assert hub.asked == [("PKU-Alignment/BeaverTails-Evaluation", None)]
    assert hub.loaded == [("PKU-Alignment/BeaverTails-Evaluation", {"name": None, "split": "test", "revision": COMMIT})]
    assert (found.revision, found.origin, found.partial) == (COMMIT, "PKU-Alignment/BeaverTails-Evaluation", False)
    assert found.rows == [{"prompt": "tease the cat", "category": CATEGORIES[0]}]


def test_pinned_data_sets_are_loaded_at_their_commit_and_subset(hub):
    hub.rows = [{"question": "2+2?", "answer": "#### 4"}]
    found = load("gsm8k", "test")
    assert hub.asked == []
    assert hub.loaded == [("openai/gsm8k", {"name": "main", "split": "test", "revision": found.revision})]
    assert len(found.revision) == 40


def test_hub_rows_become_the_rows_of_a_folder(hub, folder):
    hub.rows = [{"text": "Cats win. ", "label": 3}]
    assert load("ag_news", "test").rows == [{"text": "Cats win.", "label": 3}]
    local = load("beavertails", "test", folder=folder)
    hub.rows = [json.loads(line) for line in (folder / "beavertails/30k_test.jsonl").read_text().splitlines()]
    assert load("beavertails", "test").sha256 == local.sha256


def test_a_silent_hub_is_an_error_with_both_ways_out(hub, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("quotes a secret text")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    with pytest.raises(DataError, match="does not say which commit") as error:
        load("beavertails_evaluation")
    assert "secret" not in str(error.value)
    assert "HOLDFAST_DATA" in error.value.remedy
    monkeypatch.setattr(sources, "_load_hub", lambda *_, **__: (_ for _ in ()).throw(DataError("no", remedy="x")))
    with pytest.raises(DataError, match="no") as error:
        load("gsm8k")
    assert "HOLDFAST_DATA" in error.value.remedy


REAL = os.environ.get("HOLDFAST_DATA")


@pytest.mark.skipif(not REAL, reason="HOLDFAST_DATA is not set")
def test_the_real_folder_holds_what_its_description_says():
    folder = Path(REAL)
    rows = {
        (name, split): load(name, split, folder=folder).rows
        for name, split in (
            ("beavertails", "train"), ("beavertails", "test"), ("beavertails_evaluation", "test"),
            ("refusals", "train"), ("harmful_with_refusals", "train"), ("advbench", "test"), ("xstest", "test"),
            ("sst2", "train"), ("sst2", "validation"), ("ag_news", "train"), ("ag_news", "test"),
            ("gsm8k", "train"), ("gsm8k", "test"),
        )
    }  # fmt: skip
    assert [len(found) for found in rows.values()] == [
        9598, 3021, 700, 2483, 747 - 19, 520, 450, 67349, 872, 13854, 7600, 7473, 1319,
    ]  # fmt: skip
    train, test = rows["beavertails", "train"], rows["beavertails", "test"]
    assert Counter(row["is_safe"] for row in train) == {False: 7048, True: 2550}
    assert Counter(row["is_safe"] for row in test) == {False: 1733, True: 1288}
    assert len({row["prompt"] for row in train}) == 5045
    known = {row["prompt"] for row in test}
    apart = [row for row in train if row["prompt"] not in known]
    assert Counter(row["is_safe"] for row in apart) == {False: 4955, True: 1792}
    assert set(Counter(row["category"] for row in rows["beavertails_evaluation", "test"]).values()) == {50}
    assert Counter(row["label"] for row in rows["ag_news", "test"]) == dict.fromkeys(range(4), 1900)
