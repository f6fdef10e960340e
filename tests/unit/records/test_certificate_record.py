"""A certificate file: one serialisation, bound to its own content, any other byte refused."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.overwriting import overwrite

from holdfast.core.errors import CheckpointError
from holdfast.core.files import json_text
from holdfast.core.hashing import sha256_json
from holdfast.records.certificate import CertificateRecord, load_certificate

TEST = {"n": 60, "regressions": 0, "p_value": 0.0461, "upper_bound": 0.0487}
RECORD = CertificateRecord(
    by="likelihood", certified=True, statement="At most 5 % …", also=None, kind="fixed",
    alpha=0.05, tau=0.1, unit="nll_token", first_k=8,
    confidence=0.95, level=0.05, n=60, examples=62, regressions=0, upper_bound=0.0487, p_value=0.0461, e_value=None,
    certified_tau=0.03, pool=None, drawn="groups", max_weight=None, groups=TEST, rows=TEST | {"n": 62}, categories=None,
    strength=None, sequential=None, behaviour=None, models={"before": "a", "after": "b"},
    openings={"declared": 1, "this": 1, "ledger": "/data/x.openings.json", "claim": "c" * 64},
    bound={
        "data_sha256": "d" * 64, "split_sha256": "s" * 64, "table_sha256": "t" * 64, "before_sha256": "b" * 64,
        "after_sha256": "a" * 64, "reference_sha256": "r" * 64, "tokenizer_sha256": "t" * 64,
        "template_sha256": "t" * 64, "splits_sha256": None, "replies_sha256": None,
    },
    places={"before": "a", "after": "b", "prompts": "s.jsonl", "table": "certificate.parquet", "splits": None},
    leakage={"checked": False, "against": None, "prompts": 0},
    settings={
        "before_revision": None, "after_revision": None, "reading": {}, "template": "chat", "tokenizer": "same",
        "max_length": None, "dtype": "auto", "trust_remote_code": False,
    },
    noise_floor=1e-7, assumptions=["one", "two"], versions={"python": "3"}, commit=None, hardware="CPU",
    made="2025-01-01T00:00:00+00:00",
)  # fmt: skip


def json_bytes(value):
    return json_text(value).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return RECORD.save(tmp_path)


def rewrite(path: Path, value: object, *, rehash: bool = True) -> None:
    """What someone would do who changes the file and makes its hash fit again."""
    if rehash and isinstance(value, dict):
        value = dict(value) | {"sha256": sha256_json({k: v for k, v in value.items() if k != "sha256"})}
    path.write_bytes(json_bytes(value))


def test_what_is_saved_is_loaded(path):
    assert path.name == "certificate.json"
    assert load_certificate(path) == RECORD
    stored = json.loads(path.read_text())
    assert stored["sha256"] == RECORD.sha256
    assert stored["sha256"] == sha256_json({k: v for k, v in stored.items() if k != "sha256"})
    assert stored == RECORD.to_json()


def test_a_flipped_bit_in_any_byte_is_caught(path):
    data = path.read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        overwrite(path, bytes(changed))
        with pytest.raises(CheckpointError):
            load_certificate(path)


def test_every_removed_or_doubled_byte_is_caught(path):
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        head, byte, rest = data[:position], data[position : position + 1], data[position + 1 :]
        for changed in (head + rest, head + 2 * byte + rest):
            overwrite(path, changed)
            if changed != data:
                with pytest.raises(CheckpointError):
                    load_certificate(path)


@pytest.mark.parametrize("write", [json.dumps, lambda v: json.dumps(v, indent=2) + "\n ", lambda v: ""])
def test_the_same_content_in_other_bytes_is_refused(path, write):
    path.write_text(write(RECORD.to_json()), encoding="utf-8")
    with pytest.raises(CheckpointError):
        load_certificate(path)


def test_a_key_written_twice_is_refused(path):
    text = path.read_text().replace('  "alpha": 0.05,', '  "alpha": 0.5,\n  "alpha": 0.05,')
    assert text != path.read_text()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="its bytes are not those of its content"):
        load_certificate(path)


@pytest.mark.parametrize("field", [field.name for field in fields(CertificateRecord)])
def test_a_missing_key_is_refused_even_with_a_fitting_hash(path, field):
    value = RECORD.to_json()
    del value[field]
    rewrite(path, value)
    with pytest.raises(CheckpointError, match=field):
        load_certificate(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("extra", 1), ("n", "60"), ("n", True), ("n", -1), ("certified", 1), ("kind", "other"), ("p_value", "0"),
        ("assumptions", [1]), ("bound", {}), ("openings", []), ("level", None), ("strength", {"chosen": 1}),
        ("places", {"before": 1}),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_even_with_a_fitting_hash(path, key, value):
    rewrite(path, RECORD.to_json() | {key: value})
    with pytest.raises(CheckpointError, match=key):
        load_certificate(path)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_another_version_is_refused(path, version):
    rewrite(path, RECORD.to_json() | {"version": version})
    with pytest.raises(CheckpointError, match="version"):
        load_certificate(path)


def test_a_changed_value_without_its_hash_is_refused(path):
    rewrite(path, RECORD.to_json() | {"regressions": 3}, rehash=False)
    with pytest.raises(CheckpointError, match="was changed"):
        load_certificate(path)
    rewrite(path, RECORD.to_json() | {"regressions": 3})
    assert load_certificate(path) == replace(RECORD, regressions=3), "hash binding is not a signature"


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"version": 1}', "[" * 5000, "\xff"])
def test_what_is_no_certificate_is_refused(path, text):
    path.write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as refusal:
        load_certificate(path)
    assert str(path) in refusal.value.what


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no certificate at") as refusal:
        load_certificate(tmp_path / "absent.json")
    assert "holdfast certify" in refusal.value.remedy


def test_nothing_infinite_is_written(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        replace(RECORD, upper_bound=float("nan")).save(tmp_path)
    assert list(tmp_path.iterdir()) == []
