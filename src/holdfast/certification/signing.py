"""Signing a certificate, and checking who signed it.

A certificate's own sha256 binds its parts to one another; whoever can rewrite the file can rewrite that hash too. A
signature says more: the holder of a private key vouched for exactly these bytes. It is detached, beside the
certificate, in OpenSSH's format (`sshsig`), so that it can be checked without holdfast:

    ssh-keygen -Y verify -f allowed_signers -I NAME -n holdfast-certificate -s certificate.json.sig < certificate.json

Keys are ed25519 (`ssh-keygen -t ed25519`): deterministic, one size, one hash. Other kinds are refused by name.

Believed are the keys of a public key file, or of an `allowed_signers` file of OpenSSH (ssh-keygen(1)) with lines
`[PRINCIPALS [OPTIONS]] ssh-ed25519 BASE64 [COMMENT]`. Empty lines, comments (#) and keys of other kinds are skipped. Of
the options, `namespaces="..."` is obeyed; with any other (`valid-before`, `cert-authority`, ...) the signer is refused
by name rather than believed without it.
"""

import getpass
import os
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from holdfast.certification.sshsig import ALGORITHM, FormatError, Signature, fingerprint, to_sign
from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.core.files import write_text

NAMESPACE = "holdfast-certificate"
PASSPHRASE = "HOLDFAST_SIGN_PASSPHRASE"  # noqa: S105  the variable's name
LONGEST = 1 << 16  # bytes of a signature or private key; real ones have under 1,000
LONGEST_SIGNERS = 1 << 20
_MAKE = "make one with: ssh-keygen -t ed25519 -f holdfast_key"
_KINDS = re.compile(r"(ssh-|ecdsa-sha2-|sk-)[\w@.-]+")
_WORD = re.compile(r'(?:"[^"]*"|[^\s"])+')  # a word may hold quoted spaces
_OPTION = re.compile(r'([\w-]+)(?:="([^"]*)")?(?:,|$)')
_EXPECTED = f"expected lines `{ALGORITHM} AAAA... comment`, or an allowed_signers file with such keys"


def signature_path(certificate: Path) -> Path:
    """Where the signature of a certificate is: the certificate's name and `.sig`, beside it."""
    return certificate.with_name(f"{certificate.name}.sig")


def sign(certificate: Path, key: Path) -> Path:
    """Sign the certificate's bytes as they are in the file; returns the path of the signature.

    `key` is an OpenSSH private key, ed25519. Its passphrase comes from HOLDFAST_SIGN_PASSPHRASE or from a prompt.
    """
    holder = load_private_key(key)
    signed = holder.sign(to_sign(_content(certificate), NAMESPACE))
    path = signature_path(certificate)
    write_text(path, Signature(holder.public_key().public_bytes_raw(), NAMESPACE, signed).to_text())
    return path


@dataclass(frozen=True, slots=True)
class Signed:
    """Whose signature was found: the key's fingerprint, and the name that the key file gives it ("" for none)."""

    fingerprint: str
    name: str


def verify_signature(certificate: Path, key: Path) -> Signed:
    """Check the signature beside a certificate against one public key, or against a file of allowed signers.

    Raises:
        CheckpointError: there is no signature, or it is damaged, of another kind, for another use, by another key, or
            of other bytes.
        ConfigError: `key` names no ed25519 public key.
    """
    signers, path = read_signers(key), signature_path(certificate)
    signature = _read_signature(path)
    if signature.namespace != NAMESPACE:
        what = f"{path} was made for {signature.namespace[:60]!r}, expected {NAMESPACE!r}"
        raise CheckpointError(what, remedy="ask the signer to sign the certificate: holdfast certify --sign KEY")
    holders = [signer for signer in signers if signer.key == signature.key]
    if not holders:
        known = ", ".join(fingerprint(signer.key) for signer in signers[:5])
        what = f"{path} was made by the key {fingerprint(signature.key)}, which is not in {key} ({known})"
        raise CheckpointError(what, remedy="name the signer's public key, or do not trust this certificate")
    allowed = next((signer for signer in holders if signer.problem(NAMESPACE) is None), None)
    if allowed is None:
        what = f"{key}, line {holders[0].line}: {holders[0].problem(NAMESPACE)}"
        raise CheckpointError(what, remedy="correct the line of this signer, or name the public key itself")
    try:
        signed = to_sign(_content(certificate), signature.namespace)
        Ed25519PublicKey.from_public_bytes(signature.key).verify(signature.signature, signed)
    except (InvalidSignature, ValueError):
        what = f"{certificate} is not what {fingerprint(signature.key)} signed: its bytes or the signature were changed"
        raise CheckpointError(what, remedy="get both files again from whoever signed them") from None
    return Signed(fingerprint(signature.key), allowed.name)


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """An OpenSSH private key of type ed25519; call it before long work, so that a wrong passphrase costs nothing."""
    data = _beginning(path, LONGEST, "private key", ConfigError, _MAKE)
    try:
        try:
            key: Any = serialization.load_ssh_private_key(data, None)
        except TypeError:  # what the library raises for a key that needs a passphrase
            key = serialization.load_ssh_private_key(data, _passphrase(path))
    except ConfigError:
        raise
    except UnsupportedAlgorithm as error:
        what = f"{path}: this installation cannot open the key: {error}"
        raise ResourceError(what, remedy="pip install 'cryptography[ssh]'") from None
    except ValueError:
        # The library's own words name bytes of the key's file; they are not shown.
        raise ConfigError(f"{path} is not an OpenSSH private key, or its passphrase is wrong", remedy=_MAKE) from None
    if not isinstance(key, Ed25519PrivateKey):
        openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        kind = key.public_key().public_bytes(*openssh).split()[0].decode()
        raise ConfigError(f"{path} is a key of type {kind}, expected {ALGORITHM}", remedy=_MAKE)
    return key


def _passphrase(path: Path) -> bytes:
    """From the environment, else asked for; never an argument, which every user of the machine could read."""
    if given := os.environ.get(PASSPHRASE):
        return given.encode()
    if not sys.stdin.isatty():
        raise ConfigError(f"{path} has a passphrase, and nobody can be asked for it", remedy=f"set {PASSPHRASE}")
    return getpass.getpass(f"Passphrase of {path}: ").encode()


def _read_signature(path: Path) -> Signature:
    if not path.exists():
        remedy = "get it from whoever issued the certificate, or leave out the key to check the certificate alone"
        raise CheckpointError(f"there is no signature {path}", remedy=remedy)
    data = _beginning(path, LONGEST, "signature", CheckpointError, "check the file")
    try:
        if len(data) > LONGEST or not data.isascii():
            raise FormatError(f"it has more than {LONGEST} bytes" if len(data) > LONGEST else "it is not ASCII text")
        return Signature.from_text(data.decode("ascii"))
    except FormatError as error:
        what = f"{path} is not a signature that holdfast reads: {error}"
        raise CheckpointError(what, remedy="ask the signer for the file again") from None


def _beginning(
    path: Path, longest: int | None, what: str, refusal: type[ConfigError | CheckpointError], remedy: str
) -> bytes:
    """One byte more than the longest content that is accepted; None accepts all."""
    try:
        with path.open("rb") as handle:
            return handle.read(None if longest is None else longest + 1)
    except OSError as error:
        raise refusal(f"{path}: the {what} cannot be read: {error.strerror}", remedy=remedy) from error


def _content(certificate: Path) -> bytes:
    return _beginning(certificate, None, "certificate", CheckpointError, "name a certificate's file")


@dataclass(frozen=True, slots=True)
class Signer:
    """A raw ed25519 key that may sign, its name (principals, else the key's comment), line, and options with values."""

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
    """The ed25519 keys of a public key file or a file of allowed signers, at least one."""
    data = _beginning(path, LONGEST_SIGNERS, "public key", ConfigError, _EXPECTED)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file", remedy=_EXPECTED) from None
    if "PRIVATE KEY-----" in text:
        raise ConfigError(f"{path} holds a private key", remedy=f"name the public key, usually {path}.pub")
    if len(data) > LONGEST_SIGNERS:
        raise ConfigError(f"{path} has more than {LONGEST_SIGNERS} bytes", remedy=_EXPECTED)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    read = [_read_line(path, *numbered) for numbered in lines if not numbered[1].lstrip().startswith("#")]
    signers = [signer for signer in read if isinstance(signer, Signer)]
    if not signers:
        others = sorted({kind for kind in read if isinstance(kind, str)})
        other = f" (it has {', '.join(others)})" if others else ""
        raise ConfigError(f"{path} holds no {ALGORITHM} key{other}", remedy=_EXPECTED)
    return signers


def _read_line(path: Path, number: int, line: str) -> Signer | str:
    """The signer, or the kind of the key where that is not ed25519."""
    where, words = f"{path}, line {number}", _WORD.findall(line)
    place = next((i for i, word in enumerate(words[:3]) if _KINDS.fullmatch(word)), None)
    if place is None or len(words) < place + 2:
        raise ConfigError(f"{where}: no public key", remedy=_EXPECTED)
    if words[place] != ALGORITHM:
        return str(words[place])
    written = words[1] if place == 2 else ""
    if _OPTION.sub("", written):
        raise ConfigError(f"{where}: options that make no sense", remedy=_EXPECTED)
    try:
        key = serialization.load_ssh_public_key(f"{ALGORITHM} {words[place + 1]}".encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{where}: not a valid {ALGORITHM} key", remedy=_EXPECTED)
    name = words[0].strip('"') if place else " ".join(words[place + 2 :])
    return Signer(key.public_bytes_raw(), name, number, tuple(_OPTION.findall(written)))


def _matches(namespace: str, patterns: str) -> bool:
    """Whether a pattern list of OpenSSH (`*` and `?`; `!` excludes) names the namespace."""
    # fnmatch would read [...] as a set, which OpenSSH does not.
    split = patterns.replace("[", "[[]").split(",")
    matching = [p for p in split if fnmatchcase(namespace, p.removeprefix("!"))]
    return bool(matching) and not any(pattern.startswith("!") for pattern in matching)
