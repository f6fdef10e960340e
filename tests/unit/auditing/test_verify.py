"""Verification: a certificate stands while nothing it rests on has changed by a byte, and falls otherwise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests import tiny
from tests.overwriting import overwrite
from tests.unit.auditing.certifying import CONSTRAINT, STRONG, Scene, scene, write_safety

from holdfast.auditing.certificate_spec import Leakage
from holdfast.auditing.verify import verify
from holdfast.certification.ledger_state import Claim
from holdfast.certification.openings import Ledger
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.files import json_text
from holdfast.core.hashing import sha256_file, sha256_json
from holdfast.data.sources import read_examples
from holdfast.data.split_record import save_record
from holdfast.data.splits import split_examples
from holdfast.models.content import content_of
from holdfast.records.certificate import load_certificate


def json_bytes(value):
    return json_text(value).encode()


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A certificate on the certify share of a split, as a run has one; the adapter carries its own tokenizer."""
    made = scene(tmp_path_factory.mktemp("issued"), n=80)
    tiny.tokenizer().save_pretrained(made.adapter)
    split = split_examples(read_examples(str(made.safety)), seed=0, fractions=(0.5, 0.25, 0.25))
    made.output.mkdir()
    splits = save_record(split.record, made.output)
    leakage = Leakage(checked=True, against="task.jsonl", prompts=20)
    made.certify(safety=split.certify, source=str(made.safety), splits=splits, leakage=leakage)
    return made


@pytest.fixture
def copy(issued: Scene, tmp_path: Path) -> Scene:
    """The same with its own files to damage; base and safety data still lead to the issued ones."""
    shutil.copytree(issued.output, tmp_path / "out")
    return issued._replace(output=tmp_path / "out")


def forge(folder: Path, **values: object) -> None:
    """Change a certificate and make its own hash fit again."""
    path = folder / "certificate.json"
    value = json.loads(path.read_text()) | values
    path.write_bytes(json_bytes(value | {"sha256": sha256_json({k: v for k, v in value.items() if k != "sha256"})}))


def test_an_untouched_certificate_verifies(issued):
    record = verify(issued.output / "certificate.json")
    assert record.certified
    assert record.places["splits"] == str(issued.output / "splits.json")
    assert verify(issued.output, expect=record.sha256.upper()) == record


def test_what_is_not_certified_verifies_too(tmp_path):
    made = scene(tmp_path, size=STRONG)
    assert not made.certify().certified
    assert not verify(made.output).certified


def test_another_certificate_than_expected_is_refused(issued):
    with pytest.raises(CheckpointError, match="expected " + "0" * 64):
        verify(issued.output, expect="0" * 64)


def positions(path: Path, count: int) -> range:
    size = path.stat().st_size
    return range(0, size, max(1, size // count))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("out/certificate.parquet", 10**6), ("out/splits.json", 12), ("safety.jsonl", 12),
        ("base/model.safetensors", 12), ("base/config.json", 8), ("base/tokenizer.json", 8),
        ("base/chat_template.jinja", 8),
        ("adapter/adapter_model.safetensors", 12), ("adapter/adapter_config.json", 8), ("adapter/tokenizer.json", 8),
        ("adapter/chat_template.jinja", 8), ("adapter/tokenizer_config.json", 8), ("safety.jsonl.openings.json", 8),
    ],
)  # fmt: skip
def test_a_changed_byte_is_caught(issued, name, count):
    """Every byte of the table, samples of the others; all of them are hashed whole."""
    path = issued.output.parent / name
    data = path.read_bytes()
    if name.endswith("adapter_config.json"):  # the two values that say where the base is are free on purpose
        start = data.index(b'"base_model_name_or_path"')
        free = range(start, data.index(b"\n", start))
        where = [i for i in positions(path, count) if i not in free]
    elif name.endswith(".openings.json"):  # the ledger may gain entries; what it says of this opening may not change
        where = [data.index(key) + len(key) + 3 for key in (b'"claim": ', b'"declared": ', b'"number": ', b'"split": ')]
        where = [i - 3 for i in where[1:3]] + [where[0], where[3]]
    else:
        where = list(positions(path, count))
    try:
        for position in where:
            changed = bytearray(data)
            changed[position] ^= 1
            overwrite(path, bytes(changed))
            with pytest.raises(CheckpointError):
                verify(issued.output)
    finally:
        path.write_bytes(data)
    verify(issued.output)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("certified", False), ("regressions", 1), ("n", 21), ("examples", 19), ("p_value", 0.001),
        ("upper_bound", 0.01), ("level", 0.04), ("certified_tau", 0.0001),
        ("statement", "All is well."), ("alpha", 0.3), ("tau", 0.06),
        ("confidence", 0.9), ("unit", "nll_sum"), ("first_k", 4), ("kind", "finite_pool"), ("pool", 40),
        ("e_value", 1.0), ("categories", {}), ("sequential", {}),
    ],
)  # fmt: skip
def test_a_figure_that_does_not_follow_is_caught_even_with_a_fitting_hash(copy, key, value):
    forge(copy.output, **{key: value})
    assert load_certificate(copy.output / "certificate.json")
    with pytest.raises(CheckpointError):
        verify(copy.output)


@pytest.mark.parametrize("column", ["cluster", "category"])
def test_other_clusters_than_the_prompts_have_are_caught(copy, column):
    """Table and hashes rewritten so that they fit one another and every figure stays as it was."""
    path = copy.output / "certificate.parquet"
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[0], values[1] = (values[1], values[0]) if column == "cluster" else ("x", "y")
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array(values, table[column].type)), path)
    bound = json.loads((copy.output / "certificate.json").read_text())["bound"]
    forge(copy.output, bound=bound | {"table_sha256": sha256_file(path)})
    with pytest.raises(CheckpointError, match="clusters or categories"):
        verify(copy.output)


@pytest.mark.parametrize("block", ["bound", "openings"])
def test_a_changed_binding_is_caught_even_with_a_fitting_hash(copy, block):
    values = json.loads((copy.output / "certificate.json").read_text())[block]
    for key, value in values.items():
        if key == "ledger":
            continue
        other = value + 1 if isinstance(value, int) else "0" * 64
        forge(copy.output, **{block: values | {key: other}})
        with pytest.raises(CheckpointError):
            verify(copy.output)
    forge(copy.output, **{block: values})
    verify(copy.output)


def test_a_setting_that_was_not_used_is_caught(copy):
    settings = json.loads((copy.output / "certificate.json").read_text())["settings"]
    for change in ({"max_length": 9}, {"dtype": "float32"}, {"template": "none"}, {"tokenizer": "after"}):
        forge(copy.output, settings=settings | change)
        with pytest.raises(CheckpointError):
            verify(copy.output)


def test_a_certificate_cannot_ask_for_code_to_run(copy, monkeypatch):
    settings = json.loads((copy.output / "certificate.json").read_text())["settings"]
    forge(copy.output, settings=settings | {"trust_remote_code": True})
    refused = lambda *_, **__: pytest.fail("a tokenizer was loaded")  # noqa: E731
    monkeypatch.setattr("holdfast.auditing.verify.load_tokenizer", refused)
    with pytest.raises(ConfigError, match="issued with --trust-remote-code"):
        verify(copy.output)


@pytest.mark.parametrize("reading", [{"nonsense": 1}, {"limit": 3}, {"columns": {"prompt": "q"}}])
def test_other_ways_to_read_the_data_are_caught(copy, reading):
    settings = json.loads((copy.output / "certificate.json").read_text())["settings"]
    forge(copy.output, settings=settings | {"reading": reading})
    with pytest.raises(CheckpointError):
        verify(copy.output)


@pytest.mark.parametrize("lost", ["certificate.parquet", "splits.json"])
def test_a_missing_part_is_caught(copy, lost):
    (copy.output / lost).unlink()
    places = json.loads((copy.output / "certificate.json").read_text())["places"]
    forge(copy.output, places=places | {"splits": str(copy.output / "splits.json")})
    with pytest.raises(CheckpointError, match=lost):
        verify(copy.output)


def test_an_opening_that_was_never_entered_is_caught(copy, tmp_path):
    empty = tmp_path / "ledger.json"
    with pytest.raises(CheckpointError, match="is missing"):
        verify(copy.output, ledger=empty)
    Ledger(empty).open(Claim("a", "b", "u", 0.1, 0.1, 8, 0.9, "fixed", {}), ["x"])
    with pytest.raises(CheckpointError, match="found none"):
        verify(copy.output, ledger=empty)


def test_moved_parts_can_be_named(tmp_path):
    folder, new = tmp_path / "old", tmp_path / "new"
    made = scene(folder)
    record = made.certify()
    shutil.move(folder, new)
    with pytest.raises(CheckpointError, match="the model before cannot be found"):
        verify(new / "out")
    moved = {"before": new / "base", "after": new / "adapter", "prompts": str(new / "safety.jsonl")}
    assert verify(new / "out", **moved) == record
    with pytest.raises(CheckpointError, match="the prompts cannot be read"):
        verify(new / "out", before=new / "base", after=new / "adapter")
    tiny.model(seed=7).save_pretrained(new / "base")
    with pytest.raises(CheckpointError, match="the model before"):
        verify(new / "out", **moved)


def test_prompts_that_are_not_in_the_data_are_caught(tmp_path):
    """Data and hash replaced together: the measured prompts are then no longer in it."""
    made = scene(tmp_path)
    made.certify()
    write_safety(made.safety, tiny.rows(19, seed=3))
    with pytest.raises(CheckpointError, match="is not in"):
        verify(made.output)


@pytest.mark.parametrize("kind", ["finite_pool", "per_category", "sequential"])
def test_every_kind_verifies_and_falls(tmp_path, kind):
    made = scene(tmp_path)
    write_safety(made.safety, [row | {"category": "ab"[i % 2]} for i, row in enumerate(tiny.rows(40, seed=3))])
    record = made.certify(kind=kind, pool=60 if kind == "finite_pool" else None, constraint=CONSTRAINT)
    assert record.certified
    assert verify(made.output) == record
    block = {"finite_pool": {"pool": 50}, "per_category": {"categories": {}}, "sequential": {"e_value": 99.0}}[kind]
    forge(made.output, **block)
    with pytest.raises(CheckpointError):
        verify(made.output)


def test_a_sequence_that_grew_verifies_as_it_is_now(tmp_path):
    made = scene(tmp_path)
    made.certify(kind="sequential")
    write_safety(made.safety, tiny.rows(30, seed=3))
    with pytest.raises(CheckpointError, match="the data "):
        verify(made.output)
    record = made.certify(kind="sequential")
    assert record.n == 30
    assert verify(made.output) == record


def test_the_model_is_bound_by_content(issued):
    record = verify(issued.output)
    assert record.bound["after_sha256"] == content_of(issued.adapter).sha256
    assert record.bound["before_sha256"] == content_of(issued.base).sha256
