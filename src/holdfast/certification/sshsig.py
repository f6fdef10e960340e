"""OpenSSH's SSHSIG: the framing of a detached signature, as `ssh-keygen -Y sign` writes and `-Y verify` reads it.

The format is PROTOCOL.sshsig of OpenSSH. `string` is a 4-byte big-endian length followed by that many bytes.

| field of the file | type    | here                                                    |
|-------------------|---------|---------------------------------------------------------|
| magic             | 6 bytes | `SSHSIG`                                                |
| version           | uint32  | 1                                                       |
| publickey         | string  | string `ssh-ed25519`, string of the key's 32 bytes      |
| namespace         | string  | what the signature is for; signed                       |
| reserved          | string  | empty; signed                                           |
| hash_algorithm    | string  | `sha512`; signed                                        |
| signature         | string  | string `ssh-ed25519`, string of the signature's 64 bytes|

The file is the base64 of these fields in lines of 70 characters, between a BEGIN and an END line. What is signed is
magic, namespace, reserved, hash_algorithm and string(sha512(message)), in this order and without a version.

Reading is strict: one spelling, every byte used, nothing unknown. There is no cryptography in this module.
"""

import base64
import binascii
import hashlib
from dataclasses import dataclass
from textwrap import wrap
from typing import Self

MAGIC = b"SSHSIG"
VERSION = 1
ALGORITHM = "ssh-ed25519"
HASH = "sha512"
BEGIN, END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
KEY_BYTES, SIGNATURE_BYTES = 32, 64
_WIDTH = 70


class FormatError(ValueError):
    """Not an SSHSIG signature of the kind above; the text says what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a signature file holds."""

    key: bytes  # the signer's public key, raw
    namespace: str  # what the signer signed for
    signature: bytes  # raw, of `to_sign(message, namespace)`

    def to_text(self) -> str:
        fields = (_typed(self.key), self.namespace.encode(), b"", HASH.encode(), _typed(self.signature))
        blob = MAGIC + VERSION.to_bytes(4, "big") + b"".join(map(_string, fields))
        return "\n".join([BEGIN, *wrap(base64.b64encode(blob).decode(), _WIDTH), END]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The inverse of `to_text`; a FormatError for another format, version, key type or hash, or bytes left over."""
        lines = text.removesuffix("\n").split("\n")
        if len(lines) < 3 or lines[0] != BEGIN or lines[-1] != END:
            raise FormatError(f"expected lines of base64 between {BEGIN!r} and {END!r}")
        try:
            blob = base64.b64decode("".join(lines[1:-1]).encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise FormatError("what stands between its first and last line is not base64") from None
        head = len(MAGIC) + 4
        if blob[: len(MAGIC)] != MAGIC:
            raise FormatError(f"it does not begin with {MAGIC.decode()}")
        version = int.from_bytes(blob[len(MAGIC) : head], "big")
        if len(blob) < head or version != VERSION:
            raise FormatError(f"version {version}, expected {VERSION}")
        publickey, namespace, reserved, algorithm, signature = _strings(blob[head:], 5)
        key = _untyped(publickey, KEY_BYTES, "key")
        if algorithm != HASH.encode():
            raise FormatError(f"it is made over the hash {_shown(algorithm)}, expected {HASH}")
        if reserved:
            raise FormatError("its reserved field is not empty")
        if not namespace.isascii():
            raise FormatError("its namespace is not ASCII")
        return cls(key, namespace.decode("ascii"), _untyped(signature, SIGNATURE_BYTES, "signature"))


def to_sign(message: bytes, namespace: str) -> bytes:
    """The bytes that the key signs: they hold the message's sha512, never the message."""
    fields = (namespace.encode(), b"", HASH.encode(), hashlib.sha512(message).digest())
    return MAGIC + b"".join(map(_string, fields))


def fingerprint(key: bytes) -> str:
    """`SHA256:...` as `ssh-keygen -l` prints it, of a raw ed25519 public key."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(_typed(key)).digest()).decode().rstrip("=")


def _shown(value: bytes) -> str:
    """A foreign name in a message: printable ASCII, at most 40 characters."""
    return repr(value[:40].decode("ascii", "replace").encode("ascii", "replace").decode())


def _string(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


def _typed(value: bytes) -> bytes:
    return _string(ALGORITHM.encode()) + _string(value)


def _untyped(blob: bytes, size: int, what: str) -> bytes:
    """The value of a key or signature of the one algorithm; another algorithm is named."""
    kind, rest = _split(blob)
    if kind != ALGORITHM.encode():
        raise FormatError(f"its {what} is of type {_shown(kind)}, expected {ALGORITHM}")
    (value,) = _strings(rest, 1)
    if len(value) != size:
        raise FormatError(f"its {what} has {len(value)} bytes, expected {size}")
    return value


def _split(blob: bytes) -> tuple[bytes, bytes]:
    end = 4 + int.from_bytes(blob[:4], "big")
    if len(blob) < 4 or len(blob) < end:
        raise FormatError("it ends inside a field")
    return blob[4:end], blob[end:]


def _strings(blob: bytes, count: int) -> list[bytes]:
    strings = []
    for _ in range(count):
        value, blob = _split(blob)
        strings.append(value)
    if blob:
        raise FormatError(f"{len(blob)} bytes follow its last field")
    return strings
