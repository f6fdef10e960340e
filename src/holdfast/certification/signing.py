"""Signing a certificate, and checking who signed it.

A certificate's own sha256 binds its parts to one another; whoever can rewrite the file can rewrite that hash too. A
signature says more: the holder of a private key vouched for exactly these bytes. It is detached, beside the
certificate, in OpenSSH's format (`sshsig`), so that it can be checked without holdfast:

    ssh-keygen -Y verify -f allowed_signers -I NAME -n holdfast-certificate -s certificate.json.sig < certificate.json

Keys are ed25519 (`ssh-keygen -t ed25519`): deterministic, one size, one hash. Other kinds are refused by name.
"""

from __future__ import annotations

import getpass
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from holdfast.certification.allowed_signers import read_signers
from holdfast.certification.sshsig import ALGORITHM, FormatError, Signature, fingerprint, to_sign
from holdfast.core.errors import CheckpointError, ConfigError, ResourceError
from holdfast.core.files import write_text

NAMESPACE = "holdfast-certificate"
SUFFIX = ".sig"
PASSPHRASE = "HOLDFAST_SIGN_PASSPHRASE"  # noqa: S105  the variable's name
LONGEST = 1 << 16  # bytes of a signature or private key; real ones have under 1,000
_MAKE = "make one with: ssh-keygen -t ed25519 -f holdfast_key"


def signature_path(certificate: Path) -> Path:
    """Where the signature of a certificate is: the certificate's name and `.sig`, beside it."""
    return certificate.with_name(certificate.name + SUFFIX)


def sign(certificate: Path, key: Path) -> Path:
    """Sign the certificate's bytes as they are in the file; returns the path of the signature.

    Args:
        certificate: the file to sign.
        key: an OpenSSH private key, ed25519. Its passphrase comes from HOLDFAST_SIGN_PASSPHRASE or from a prompt.

    Raises:
        ConfigError: the key cannot be read, is of another kind, or its passphrase is missing or wrong.
        CheckpointError: there is no certificate.
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

    Args:
        certificate: the file that was signed.
        key: a public key (`ssh-ed25519 AAAA... comment`) or an `allowed_signers` file of OpenSSH.

    Raises:
        CheckpointError: there is no signature, or it is damaged, of another kind, for another use, by another key, or
            of other bytes.
        ConfigError: `key` names no ed25519 public key.
    """
    signers = read_signers(key)
    path = signature_path(certificate)
    found = _read_signature(path)
    if found.namespace != NAMESPACE:
        raise CheckpointError(
            f"{path} was made for {found.namespace[:60]!r}, expected {NAMESPACE!r}",
            remedy="ask the signer to sign the certificate: holdfast certify --sign KEY",
        )
    holders = [signer for signer in signers if signer.key == found.key]
    if not holders:
        known = ", ".join(fingerprint(signer.key) for signer in signers[:5])
        raise CheckpointError(
            f"{path} was made by the key {fingerprint(found.key)}, which is not in {key} ({known})",
            remedy="name the signer's public key, or do not trust this certificate",
        )
    allowed = next((signer for signer in holders if signer.problem(NAMESPACE) is None), None)
    if allowed is None:
        raise CheckpointError(
            f"{key}, line {holders[0].line}: {holders[0].problem(NAMESPACE)}",
            remedy="correct the line of this signer, or name the public key itself",
        )
    try:
        signed = to_sign(_content(certificate), found.namespace)
        Ed25519PublicKey.from_public_bytes(found.key).verify(found.signature, signed)
    except (InvalidSignature, ValueError):
        raise CheckpointError(
            f"{certificate} is not what {fingerprint(found.key)} signed: its bytes or the signature were changed",
            remedy="get both files again from whoever signed them",
        ) from None
    return Signed(fingerprint(found.key), allowed.name)


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """An OpenSSH private key of type ed25519; call it before long work, so that a wrong passphrase costs nothing.

    Raises:
        ConfigError: as in `sign`.
    """
    try:
        data = path.read_bytes()[:LONGEST]
    except OSError as error:
        raise ConfigError(f"{path}: the private key cannot be read: {error.strerror}", remedy=_MAKE) from error
    try:
        try:
            found: Any = load_ssh_private_key(data, None)
        except TypeError:  # what the library raises for a key that needs a passphrase
            found = load_ssh_private_key(data, _passphrase(path))
    except ConfigError:
        raise
    except UnsupportedAlgorithm as error:
        raise ResourceError(
            f"{path}: this installation cannot open the key: {error}", remedy="pip install 'cryptography[ssh]'"
        ) from None
    except ValueError:
        # The library's own words name bytes of the key's file; they are not shown.
        raise ConfigError(f"{path} is not an OpenSSH private key, or its passphrase is wrong", remedy=_MAKE) from None
    if not isinstance(found, Ed25519PrivateKey):
        written = found.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        raise ConfigError(f"{path} is a key of type {written.split()[0].decode()}, expected {ALGORITHM}", remedy=_MAKE)
    return found


def _passphrase(path: Path) -> bytes:
    """From the environment, else asked for; never an argument, which every user of the machine could read."""
    if given := os.environ.get(PASSPHRASE):
        return given.encode()
    if not sys.stdin.isatty():
        raise ConfigError(f"{path} has a passphrase, and nobody can be asked for it", remedy=f"set {PASSPHRASE}")
    return getpass.getpass(f"Passphrase of {path}: ").encode()


def _read_signature(path: Path) -> Signature:
    try:
        with path.open("rb") as handle:
            data = handle.read(LONGEST + 1)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no signature {path}",
            remedy="get it from whoever issued the certificate, or leave out the key to check the certificate alone",
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: the signature cannot be read: {error.strerror}", remedy="check the file"
        ) from error
    problem = f"it has more than {LONGEST} bytes" if len(data) > LONGEST else "it is not ASCII text"
    if len(data) <= LONGEST and data.isascii():
        try:
            return Signature.from_text(data.decode("ascii"))
        except FormatError as error:
            problem = str(error)
    raise CheckpointError(
        f"{path} is not a signature that holdfast reads: {problem}", remedy="ask the signer for the file again"
    )


def _content(certificate: Path) -> bytes:
    try:
        return certificate.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{certificate}: the certificate cannot be read: {error.strerror}", remedy="name a certificate's file"
        ) from error
