"""Members of a ZIP file that others wrote, as bytes and within limits; Zstandard through pyarrow.

Names are compared, never used as paths: nothing is extracted.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from holdfast.core.errors import DataError
from holdfast.judging.logs.evaluation_log import bad_log, shown, unreadable

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
        self.names = list(self._by_name)  # in the file's order
        if len(members) > MAX_MEMBERS:
            raise bad_log(where, f"{len(members)} members, expected at most {MAX_MEMBERS}")
        if len(self._by_name) != len(members):
            raise bad_log(where, "a member occurs twice")
        if sum(member.file_size for member in members) > MAX_TOTAL:
            raise bad_log(where, f"more than {MAX_TOTAL >> 30} GiB unpacked")

    def read(self, name: str) -> bytes:
        """A member's content; its length and checksum must be those of the list of members."""
        member, where = self._by_name.get(name), f"{self._where}, member {shown(name)}"
        if member is None:
            raise bad_log(where, "missing")
        if member.file_size > MAX_MEMBER:
            raise bad_log(where, f"more than {MAX_MEMBER >> 20} MiB unpacked")
        if member.flag_bits & 0x1:
            raise bad_log(where, "encrypted")
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
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise bad_log(where, "its length or checksum is another")
        return data

    def _zstandard(self, member: zipfile.ZipInfo) -> bytes:
        """zipfile reads Zstandard from Python 3.14 on; until then the packed bytes are found by the local header."""
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
        raise unreadable(path, error) from None
    with handle:
        if (size := _directory_size(handle)) is None:
            raise bad_log(where, "not a ZIP file, or cut off")
        if size > MAX_DIRECTORY:
            raise bad_log(where, f"a list of members of {size >> 20} MiB, expected at most {MAX_DIRECTORY >> 20}")
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
