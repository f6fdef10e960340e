"""Logs of inspect: `.eval` (a ZIP of JSON) and `.json`.

A sample is its id and epoch. What it asks for is its input, target and choices; message ids are drawn anew in every run
and do not count. A sample with an error, or one that ran into a limit, has no result. Members of the ZIP are read as
bytes and within limits; their names are compared, never used as paths: nothing is extracted.
"""

import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from holdfast.core.errors import DataError
from holdfast.core.hashing import sha256_file, sha256_text
from holdfast.judging.logs import evaluation_log as log
from holdfast.judging.logs.evaluation_log import EvaluationLog, LoggedSample, bad_log, inner, require, shown, typed

MAX_JSON: Final = 256 << 20
_SAMPLE: Final = re.compile(r"samples/[^/\\]+\.json")
_HEADER: Final = "header.json"


def read_inspect(path: Path) -> EvaluationLog:
    """The log in an `.eval` or `.json`."""
    where = str(path)
    if path.suffix == ".eval":
        with open_zip(path) as members:
            if _HEADER not in members.names:
                raise _unfinished(where, "no header.json")
            header = log.loads(members.read(_HEADER), f"{where}, {_HEADER}")
            named = ((f"{where}, {shown(name)}", name) for name in members.names if _SAMPLE.fullmatch(name))
            samples = _samples((place, log.loads(members.read(name), place)) for place, name in named)
    else:
        header = log.loads(log.read_bounded(path, MAX_JSON), where)
        rows = typed(header, "samples", list, where)
        samples = _samples((f"{where}, sample {i}", row) for i, row in enumerate(rows))
    status = typed(header, "status", str, where)
    if status != "success" or header.get("invalidated") is True:
        raise _unfinished(where, f"status {shown(status)}" if status != "success" else "marked as invalid")
    spec = typed(header, "eval", dict, where)
    if isinstance(listed := inner(spec, "dataset", "sample_ids"), list):
        expected = {_id(given) for given in listed if isinstance(given, str | int)}
        if missing := len(expected - {sample.id for sample in samples}):
            raise _unfinished(where, f"{missing} of {len(listed)} samples are missing")
    scorers = spec.get("scorers")
    return EvaluationLog(
        path.name, sha256_file(path), "inspect",
        task=typed(spec, "task", str, where),
        task_version=log.optional_text(spec, "task_version"),
        dataset=log.optional_text(spec.get("dataset"), "name"),
        model=log.optional_text(spec, "model"),
        settings={
            "task_args": spec.get("task_args"), "solver": inner(header, "plan", "steps"),
            "generation": [inner(header, "plan", "config"), spec.get("model_generate_config")],
        },
        scorers={
            str(scorer.get("name")): [scorer.get("options"), scorer.get("metadata")]
            for scorer in (scorers if isinstance(scorers, list) else []) if isinstance(scorer, dict)
        },
        samples=samples,
    )  # fmt: skip


def _unfinished(where: str, what: str) -> DataError:
    return DataError(f"{where}: an unfinished evaluation: {what}", remedy="run it to its end (inspect eval-retry)")


def _samples(logged: Iterable[tuple[str, Any]]) -> list[LoggedSample]:
    samples: dict[tuple[str, int], LoggedSample] = {}
    for where, row in logged:
        sample = _sample(where, row)
        first = samples.setdefault((sample.id, sample.epoch), sample)
        require(first is sample, where, "its id and epoch occur twice")
    return list(samples.values())


def _sample(where: str, row: Any) -> LoggedSample:
    given = inner(row, "id")
    require(isinstance(given, str | int) and not isinstance(given, bool), where, "a sample without an id")
    asked = row.get("input")
    if isinstance(asked, list):  # of messages, role and content alone
        asked = [{key: m.get(key) for key in ("role", "content")} if isinstance(m, dict) else m for m in asked]
    content = [asked, row.get("target"), row.get("choices")]
    return LoggedSample(
        _id(given), typed(row, "epoch", int, where),
        prompt=_prompt(where, asked),
        content_sha256=sha256_text(repr(_ordered(content))),
        scores=_scores(where, row.get("scores") or {}),
        category=log.optional_text(row.get("metadata"), "category"),
        lost=next((name for name in ("error", "limit") if row.get(name)), None),
    )  # fmt: skip


def _id(given: str | int) -> str:
    return str(given)[:1_000] if isinstance(given, str) else f"{given:d}"


def _prompt(where: str, asked: Any) -> str:
    if isinstance(asked, str):
        return asked
    require(isinstance(asked, list), where, "an input that is neither text nor messages")
    texts = []
    for content in (message["content"] for message in asked if isinstance(message, dict)):
        parts = [inner(part, "text") for part in content] if isinstance(content, list) else [content]
        texts.append("\n".join(part for part in parts if isinstance(part, str)))
    return "\n".join(texts)


def _scores(where: str, given: Any) -> dict[str, Any]:
    """Values by scorer; of a scorer that gives several, each as `scorer.name`."""
    require(isinstance(given, dict), where, "scores that are no object")
    scores: dict[str, Any] = {}
    for name, score in given.items():
        value = inner(score, "value")
        scores |= {f"{name}.{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
    return scores


def _ordered(value: Any) -> Any:
    """Objects as sorted pairs, so that the order of keys does not count; NaN and all else by their repr."""
    if isinstance(value, dict):
        return [(key, _ordered(value[key])) for key in sorted(value)]
    return [_ordered(part) for part in value] if isinstance(value, list) else value


MAX_DIRECTORY: Final = 32 << 20  # bytes of the list of members
MAX_MEMBERS: Final = 200_000
MAX_MEMBER: Final = 64 << 20  # bytes of one member, unpacked
MAX_TOTAL: Final = 8 << 30  # bytes of all members, unpacked
ZSTANDARD: Final = 93
_TAIL: Final = 22 + 65_535 + 20  # the end record with the longest comment, and what points to its 64-bit form
_DAMAGE: Final = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error,
    NotImplementedError, RuntimeError, ValueError, OverflowError, IndexError, EOFError, OSError,
)  # fmt: skip


class ZipMembers:
    """An open ZIP file whose members can be read one by one."""

    def __init__(self, archive: zipfile.ZipFile, handle: IO[bytes], where: str) -> None:
        self._archive, self._handle, self._where = archive, handle, where
        members = archive.infolist()
        self._by_name = {member.filename: member for member in members}
        self.names = list(self._by_name)
        n, unpacked = len(members), sum(member.file_size for member in members)
        require(n <= MAX_MEMBERS, where, f"{n} members, expected at most {MAX_MEMBERS}")
        require(n == len(self._by_name), where, "a member occurs twice")
        require(unpacked <= MAX_TOTAL, where, f"more than {MAX_TOTAL >> 30} GiB unpacked")

    def read(self, name: str) -> bytes:
        """A member's content; its length and checksum must be those of the list of members."""
        member, where = self._by_name.get(name), f"{self._where}, member {shown(name)}"
        if member is None:
            raise bad_log(where, "missing")
        require(member.file_size <= MAX_MEMBER, where, f"more than {MAX_MEMBER >> 20} MiB unpacked")
        require(not member.flag_bits & 0x1, where, "encrypted")
        try:
            if member.compress_type == ZSTANDARD:
                data = self._zstandard(member)
            elif member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                with self._archive.open(member) as handle:
                    data = handle.read(member.file_size + 1)
            else:
                raise bad_log(where, f"compression method {member.compress_type}, expected deflate or Zstandard")
        except DataError:
            raise
        except _DAMAGE as error:
            raise bad_log(where, f"damaged ({type(error).__name__})") from None
        whole = len(data) == member.file_size and zlib.crc32(data) == member.CRC
        require(whole, where, "its length or checksum is another")
        return data

    def _zstandard(self, member: zipfile.ZipInfo) -> bytes:
        """zipfile reads Zstandard from Python 3.14 on; the packed bytes are found by the local header."""
        import pyarrow

        self._handle.seek(member.header_offset)
        signature, name_length, extra_length = struct.unpack("<4s22xHH", self._handle.read(30))
        if signature != b"PK\x03\x04" or member.compress_size > MAX_MEMBER:
            raise zipfile.BadZipFile("local header")
        self._handle.seek(name_length + extra_length, 1)
        packed = self._handle.read(member.compress_size)
        try:
            with pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd") as stream:
                return bytes(stream.read(member.file_size + 1))
        except pyarrow.ArrowException as error:
            raise zipfile.BadZipFile(type(error).__name__) from None


@contextmanager
def open_zip(path: Path) -> Iterator[ZipMembers]:
    where = str(path)
    try:
        handle = path.open("rb")
    except OSError as error:
        raise log.unreadable(path, error) from None
    with handle:
        if (size := _directory_size(handle)) is None:
            raise bad_log(where, "not a ZIP file, or cut off")
        what = f"a list of members of {size >> 20} MiB, expected at most {MAX_DIRECTORY >> 20}"
        require(size <= MAX_DIRECTORY, where, what)
        try:
            archive = zipfile.ZipFile(handle)
        except _DAMAGE as error:
            raise bad_log(where, f"a damaged ZIP file ({type(error).__name__})") from None
        with archive:
            yield ZipMembers(archive, handle, where)


def _directory_size(handle: IO[bytes]) -> int | None:
    """Bytes of the list of members, which zipfile would read whole; None where there is no end record."""
    end = handle.seek(0, 2)
    handle.seek(max(0, end - _TAIL))
    tail = handle.read(_TAIL)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or len(tail) - place < 22:
        return None
    (size,) = struct.unpack_from("<L", tail, place + 12)
    if place >= 20 and tail[place - 20 : place - 16] == b"PK\x06\x07":  # the record has a 64-bit form
        (offset,) = struct.unpack_from("<Q", tail, place - 12)
        if offset + 56 > end:
            return None
        handle.seek(offset)
        size = max(size if size != 0xFFFFFFFF else 0, struct.unpack_from("<Q", handle.read(56), 40)[0])
    return int(size)
