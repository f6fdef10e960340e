"""Evaluation logs from hostile hands: always a refusal, never a traceback, a hang or a file somewhere else."""

from __future__ import annotations

import json
import random
import struct
import time
import zipfile
import zlib
from pathlib import Path

import pyarrow
import pytest
from tests.unit.evaluation.test_evaluation_logs import LM_AFTER, LM_BEFORE, LOGS, PAIRS

from holdfast.core.errors import CheckpointError, DataError
from holdfast.judging.logs import inspect_log as zip_members
from holdfast.judging.logs import lm_eval_log
from holdfast.judging.logs.paired import paired_outcomes, read_log

MUTANTS = 150  # of each kind of log


def archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return path


def real_members() -> dict[str, bytes]:
    with zip_members.open_zip(LOGS / "inspect_before.eval") as found:
        return {name: found.read(name) for name in found.names}


def mutant(data: bytes, draw: random.Random) -> bytes:
    """Flipped bits, a cut, bytes put in or taken out."""
    made = bytearray(data)
    kind = draw.randrange(4)
    place = draw.randrange(len(made))
    if kind == 0:
        for _ in range(draw.randint(1, 8)):
            made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del made[place:]
    elif kind == 2:
        made[place:place] = draw.randbytes(draw.randint(1, 40))
    else:
        del made[place : place + draw.randint(1, 40)]
    return bytes(made)


def is_refused(before: Path, after: Path, score: str) -> bool:
    """Whether the pair is refused as data or as damaged; any other exception fails the test."""
    try:
        paired_outcomes(before, after, score)
    except (DataError, CheckpointError):
        return True
    return False


@pytest.mark.parametrize("kind", PAIRS)
def test_mutants_are_read_or_refused(tmp_path, kind):
    before, after, score = PAIRS[kind]
    draw, data, refused = random.Random(5), after.read_bytes(), 0
    path = tmp_path / after.name
    for results in after.parent.glob("results_*.json"):
        (tmp_path / results.name).write_bytes(results.read_bytes())
    for _ in range(MUTANTS):
        path.write_bytes(mutant(data, draw))
        refused += is_refused(before, path, score)
    assert MUTANTS / 4 < refused < MUTANTS


def test_mutants_of_unpacked_members_are_read_or_refused(tmp_path):
    """With valid checksums: what reaches the parser is damaged JSON, not a damaged ZIP."""
    draw, members = random.Random(6), real_members()
    for _ in range(MUTANTS):
        name = draw.choice(list(members))
        path = archive(tmp_path / "mutant.eval", members | {name: mutant(members[name], draw)})
        is_refused(path, LOGS / "inspect_after.eval", "match")


def test_swapped_types_are_read_or_refused(tmp_path):
    """Every field of a header and of a sample in turn is replaced by each kind of JSON value."""
    log = json.loads((LOGS / "inspect_after.json").read_text())
    places = [(log,), (log["eval"],), (log["eval"]["dataset"],), (log["plan"],), (log["samples"][0],),
              (log["samples"][0]["scores"],), (log["samples"][0]["scores"]["match"],)]  # fmt: skip
    path = tmp_path / "after.json"
    for (place,) in places:
        for key in list(place):
            old = place[key]
            for value in (None, True, -1, 1e999, "\x00", [], [[]], [None], {}, {"a": None}):
                place[key] = value
                path.write_text(json.dumps(log))
                is_refused(LOGS / "inspect_before.json", path, "match")
            place[key] = old


# ZIP files


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    members = real_members() | {"samples/bomb_epoch_1.json": b" " * (zip_members.MAX_MEMBER + 1)}
    path = archive(tmp_path / "bomb.eval", members)
    assert path.stat().st_size < 1 << 20
    started = time.perf_counter()
    with pytest.raises(DataError, match="more than 64 MiB unpacked"):
        read_log(path)
    assert time.perf_counter() - started < 30


def raw_zip(content: bytes, *, method: int, declared: int, crc: int, name: bytes = b"header.json") -> bytes:
    """A ZIP file of one member whose header says what it is told to."""
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, method, 0, 0, crc, len(content), declared, len(name), 0) + name
    central = struct.pack(
        "<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, method, 0, 0, crc, len(content), declared, len(name), 0, 0, 0, 0, 0, 0
    ) + name  # fmt: skip
    start = len(local) + len(content)
    return local + content + central + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(central), start, 0)


def packed(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(("method", "pack"), [(8, lambda d: zlib.compress(d, 9, -15)), (93, packed)])
def test_a_bomb_that_lies_about_its_size_is_refused(tmp_path, method, pack):
    bomb = b"0" * (8 << 20)
    path = tmp_path / "bomb.eval"
    path.write_bytes(raw_zip(pack(bomb), method=method, declared=100, crc=zlib.crc32(bomb)))
    with pytest.raises(DataError, match=r"length or checksum|damaged"):
        read_log(path)


def test_zstandard_members_are_read_as_they_are(tmp_path):
    header = b'{"status": "started"}'
    path = tmp_path / "log.eval"
    path.write_bytes(raw_zip(packed(header), method=93, declared=len(header), crc=zlib.crc32(header)))
    with zip_members.open_zip(path) as members:
        assert members.read("header.json") == header
    path.write_bytes(raw_zip(b"no frame", method=93, declared=8, crc=0))
    with pytest.raises(DataError, match="damaged"):
        read_log(path)


@pytest.mark.parametrize("method", [12, 14, 97])
def test_other_compression_is_refused_by_name(tmp_path, method):
    path = tmp_path / "log.eval"
    path.write_bytes(raw_zip(b"xx", method=method, declared=2, crc=zlib.crc32(b"xx")))
    with pytest.raises(DataError, match=f"compression method {method}"):
        read_log(path)


def test_names_are_never_paths(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "evil.json"
    inside.mkdir()
    evil = {
        "samples/../../evil.json": b"{}",
        "/evil.json": b"{}",
        "samples/..\\evil.json": b"{}",
        "../evil.json": b"{}",
    }
    path = archive(inside / "log.eval", real_members() | evil)
    assert len(read_log(path).samples) == 12
    assert not outside.exists()
    assert [found.name for found in tmp_path.iterdir()] == ["in"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_twice_is_refused(tmp_path):
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as made:
        for name, data in real_members().items():
            made.writestr(name, data)
        made.writestr("samples/sum-3_epoch_1.json", b"{}")
    with pytest.raises(DataError, match="a member occurs twice"):
        read_log(path)


def test_too_many_members_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(zip_members, "MAX_MEMBERS", 14)
    with pytest.raises(DataError, match="members, expected at most 14"):
        read_log(LOGS / "inspect_before.eval")
    monkeypatch.setattr(zip_members, "MAX_DIRECTORY", 100)
    with pytest.raises(DataError, match="list of members"):
        read_log(LOGS / "inspect_before.eval")


def test_a_large_list_of_members_is_refused_before_it_is_read(tmp_path):
    """In the 64-bit form as well, whose size is elsewhere."""
    size = zip_members.MAX_DIRECTORY + 1
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 9, 9, size, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path = tmp_path / "log.eval"
    path.write_bytes(record + locator + end)
    with pytest.raises(DataError, match="list of members"):
        read_log(path)


def test_encrypted_members_are_refused(tmp_path):
    data = bytearray(archive(tmp_path / "log.eval", {"header.json": b"{}"}, zipfile.ZIP_STORED).read_bytes())
    data[6] |= 1
    data[data.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "log.eval").write_bytes(data)
    with pytest.raises(DataError, match="encrypted"):
        read_log(tmp_path / "log.eval")


# JSON


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5_000, '{"status": 1', "nul", "\xff", ""])
def test_json_that_is_none_is_refused(tmp_path, text):
    for name in ("log.json", "samples_sums_2026-01-01T00-00-00.0.jsonl"):
        path = tmp_path / name
        path.write_text(text, encoding="latin-1")
        with pytest.raises(DataError):
            paired_outcomes(path, PAIRS["json"][1], "match")


@pytest.mark.parametrize("depth", [50, 300, 700, 900, 990])
def test_deep_nesting_is_read_or_refused(tmp_path, depth):
    """Deep enough for what compares the input after the parser let it pass."""
    log = json.loads((LOGS / "inspect_after.json").read_text())
    text = json.dumps(log).replace('"target": "0"', f'"target": {"[" * depth}{"]" * depth}', 1)
    path = tmp_path / "after.json"
    path.write_text(text)
    with pytest.raises(DataError):
        paired_outcomes(LOGS / "inspect_before.json", path, "match")


def test_large_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.judging.logs.inspect_log.MAX_JSON", 1_000)
    with pytest.raises(DataError, match=r"convert it to the \.eval format"):
        read_log(LOGS / "inspect_before.json")
    monkeypatch.setattr(lm_eval_log, "MAX_LINE", 300)
    with pytest.raises(DataError, match="a line over"):
        read_log(LM_BEFORE)


@pytest.mark.parametrize("name", ["none.eval", "none.json", "none.jsonl", "folder.eval", "folder.jsonl", "log.txt"])
def test_what_is_no_log_file_is_refused(tmp_path, name):
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError):
        paired_outcomes(tmp_path / name, LM_AFTER, "match")


def test_a_log_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / LM_AFTER.name
    path.write_bytes(LM_AFTER.read_bytes())
    real = lm_eval_log.loads  # type: ignore[attr-defined]

    def growing(*arguments):
        with path.open("ab") as handle:
            handle.write(b"\n")
        return real(*arguments)

    monkeypatch.setattr(lm_eval_log, "loads", growing)
    with pytest.raises(DataError, match="changed while it was read"):
        read_log(path)
