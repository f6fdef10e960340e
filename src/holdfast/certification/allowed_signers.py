"""Whose signatures are believed: a public key file, or an `allowed_signers` file of OpenSSH (ssh-keygen(1)).

A line is `[PRINCIPALS [OPTIONS]] ssh-ed25519 BASE64 [COMMENT]`; empty lines and lines that begin with # are skipped.
Keys of other kinds are skipped too, since no certificate is signed with them. Of the options, `namespaces="..."` is
obeyed; with any other (`valid-before`, `cert-authority`, ...) the signer is refused by name rather than believed
without it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from holdfast.certification.sshsig import ALGORITHM
from holdfast.core.errors import ConfigError

LONGEST = 1 << 20  # bytes of a file of signers
_KINDS = re.compile(r"(ssh-|ecdsa-sha2-|sk-)[\w@.-]+")
_WORD = re.compile(r'(?:"[^"]*"|[^\s"])+')  # a word may hold quoted spaces
_OPTION = re.compile(r'([\w-]+)(?:="([^"]*)")?(?:,|$)')
_EXPECTED = f"expected lines `{ALGORITHM} AAAA... comment`, or an allowed_signers file with such keys"


@dataclass(frozen=True, slots=True)
class Signer:
    """A key that may sign, and under which conditions.

    Attributes:
        key: raw ed25519 public key.
        name: the principals of an allowed_signers line, else the key's comment.
        line: its number in the file.
        options: name and value ("" for a flag).
    """

    key: bytes
    name: str
    line: int
    options: tuple[tuple[str, str], ...] = ()

    def problem(self, namespace: str) -> str | None:
        """Why this line does not allow a signature of the namespace; None where it does."""
        for option, value in self.options:
            if option.lower() != "namespaces":
                return f"the option {option!r} is not supported; check the signature with ssh-keygen -Y verify"
            if not _matches(namespace, value):
                return f"the key may sign for {value!r}, not for {namespace!r}"
        return None


def read_signers(path: Path) -> list[Signer]:
    """The ed25519 keys of the file, at least one.

    Raises:
        ConfigError: it cannot be read, holds a private key, a line that makes no sense, or no ed25519 key.
    """
    try:
        with path.open("rb") as handle:
            data = handle.read(LONGEST + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: the public key cannot be read: {error.strerror}", remedy=_EXPECTED) from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file", remedy=_EXPECTED) from None
    if "PRIVATE KEY-----" in text:
        raise ConfigError(f"{path} holds a private key", remedy=f"name the public key, usually {path}.pub")
    if len(data) > LONGEST:
        raise ConfigError(f"{path} has more than {LONGEST} bytes", remedy=_EXPECTED)
    signers, others = [], set()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            kind, signer = _read_line(f"{path}, line {number}", number, line)
            if signer is None:
                others.add(kind)
            else:
                signers.append(signer)
    if not signers:
        other = f" (it has {', '.join(sorted(others))})" if others else ""
        raise ConfigError(f"{path} holds no {ALGORITHM} key{other}", remedy=_EXPECTED)
    return signers


def _read_line(where: str, number: int, line: str) -> tuple[str, Signer | None]:
    """The key's kind, and the signer where that is ed25519."""
    words = _WORD.findall(line)
    place = next((i for i, word in enumerate(words[:3]) if _KINDS.fullmatch(word)), None)
    if place is None or len(words) < place + 2:
        raise ConfigError(f"{where}: no public key", remedy=_EXPECTED)
    kind = words[place]
    if kind != ALGORITHM:
        return kind, None
    written = words[1] if place == 2 else ""
    if _OPTION.sub("", written):
        raise ConfigError(f"{where}: options that make no sense", remedy=_EXPECTED)
    try:
        key = load_ssh_public_key(f"{kind} {words[place + 1]}".encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{where}: not a valid {ALGORITHM} key", remedy=_EXPECTED)
    name = words[0].strip('"') if place else " ".join(words[place + 2 :])
    return kind, Signer(key.public_bytes_raw(), name, number, tuple(_OPTION.findall(written)))


def _matches(namespace: str, patterns: str) -> bool:
    """Whether a pattern list of OpenSSH (`*` and `?`; `!` excludes) names the namespace."""
    # fnmatch would read [...] as a set, which OpenSSH does not.
    split = [pattern.replace("[", "[[]") for pattern in patterns.split(",")]
    matching = [p for p in split if fnmatchcase(namespace, p.removeprefix("!"))]
    return bool(matching) and not any(pattern.startswith("!") for pattern in matching)
