"""Signatures of certificates: OpenSSH reads ours, we read OpenSSH's, and everything else is refused by name."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.certification import signing
from holdfast.certification.signing import NAMESPACE, PASSPHRASE, read_signers, sign, signature_path, verify_signature
from holdfast.certification.sshsig import BEGIN, END, Signature, fingerprint, to_sign
from holdfast.core.errors import CheckpointError, ConfigError

KEYGEN = shutil.which("ssh-keygen")
openssh = pytest.mark.skipif(KEYGEN is None, reason="ssh-keygen is not installed (package openssh-client)")
CONTENT = b'{\n  "certified": true\n}\n'


def make_key(folder: Path, name: str = "key", passphrase: bytes | None = None) -> Path:
    """An ed25519 key pair without ssh-keygen."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key, path = Ed25519PrivateKey.generate(), folder / name
    encryption = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, encryption))
    path.chmod(0o600)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public + b" issuer@example.org\n")
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path)


@pytest.fixture
def public(key: Path) -> Path:
    return key.with_suffix(".pub")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "certificate.json"
    path.write_bytes(CONTENT)
    return path


SHORT = {"rsa": ("-b", "2048")}  # a key of the default length takes five times as long


def keygen(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(KEYGEN), *map(str, arguments)], input=stdin, capture_output=True, check=False)


def test_what_is_signed_verifies(certificate, key, public):
    path = sign(certificate, key)
    assert path == certificate.with_name("certificate.json.sig")
    found = verify_signature(certificate, public)
    assert found.name == "issuer@example.org"
    assert found.fingerprint == fingerprint(read_signers(public)[0].key)


def test_the_signed_bytes_are_those_of_the_protocol(certificate, key):
    """Field by field from PROTOCOL.sshsig, written out by hand."""
    import hashlib

    blob = b"SSHSIG" + b"\0\0\0\x14holdfast-certificate" + b"\0\0\0\0" + b"\0\0\0\x06sha512" + b"\0\0\0\x40"
    assert to_sign(CONTENT, NAMESPACE) == blob + hashlib.sha512(CONTENT).digest()
    lines = sign(certificate, key).read_text().splitlines()
    assert (lines[0], lines[-1]) == (BEGIN, END)
    raw = base64.b64decode("".join(lines[1:-1]))
    assert raw.startswith(b"SSHSIG\0\0\0\x01\0\0\0\x33\0\0\0\x0bssh-ed25519\0\0\0\x20")
    assert (
        raw[65:-64]
        == b"\0\0\0\x14holdfast-certificate\0\0\0\0\0\0\0\x06sha512\0\0\0\x53\0\0\0\x0bssh-ed25519\0\0\0\x40"
    )


@openssh
def test_openssh_accepts_our_signature_and_refuses_other_bytes(certificate, key, public, tmp_path):
    path = sign(certificate, key)
    signers = tmp_path / "allowed_signers"
    signers.write_text("issuer@example.org " + public.read_text())
    ask = ("-Y", "verify", "-f", signers, "-I", "issuer@example.org", "-n", NAMESPACE, "-s", path)
    assert keygen(*ask, stdin=CONTENT).returncode == 0
    assert keygen(*ask, stdin=CONTENT + b" ").returncode != 0
    assert verify_signature(certificate, signers).name == "issuer@example.org"


@openssh
@pytest.mark.parametrize("passphrase", ["", "open sesame"])
def test_keys_and_signatures_of_openssh(certificate, tmp_path, monkeypatch, passphrase):
    theirs = tmp_path / "theirs"
    assert keygen("-q", "-t", "ed25519", "-N", passphrase, "-C", "them", "-f", theirs).returncode == 0
    monkeypatch.setenv(PASSPHRASE, passphrase)
    sign(certificate, theirs)
    assert verify_signature(certificate, theirs.with_suffix(".pub")).name == "them"
    if not passphrase:  # ssh-keygen would ask
        ours = signature_path(certificate).read_text()
        signature_path(certificate).unlink()
        assert keygen("-q", "-Y", "sign", "-f", theirs, "-n", NAMESPACE, certificate).returncode == 0
        assert verify_signature(certificate, theirs.with_suffix(".pub")).name == "them"
        assert signature_path(certificate).read_text() == ours  # ed25519 is deterministic: the same file


@openssh
@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("rsa", (), "'ssh-rsa'"),
        ("ecdsa", (), "'ecdsa-sha2-nistp256'"),
        ("ed25519", ("-O", "hashalg=sha256"), "the hash 'sha256', expected sha512"),
    ],
)
def test_other_keys_and_hashes_of_openssh_are_refused_by_name(certificate, public, tmp_path, kind, options, named):
    theirs = tmp_path / "theirs"
    assert keygen("-q", "-t", kind, *SHORT.get(kind, ()), "-N", "", "-f", theirs).returncode == 0
    assert keygen("-q", "-Y", "sign", *options, "-f", theirs, "-n", NAMESPACE, certificate).returncode == 0
    with pytest.raises(CheckpointError, match=named):
        verify_signature(certificate, public)


@openssh
@pytest.mark.parametrize(("kind", "named"), [("rsa", "ssh-rsa"), ("ecdsa", "ecdsa-sha2-nistp256")])
def test_other_kinds_of_keys_are_refused_by_name(certificate, tmp_path, kind, named):
    theirs = tmp_path / "theirs"
    assert keygen("-q", "-t", kind, *SHORT.get(kind, ()), "-N", "", "-f", theirs).returncode == 0
    with pytest.raises(ConfigError, match=f"is a key of type {named}, expected ssh-ed25519"):
        sign(certificate, theirs)
    with pytest.raises(ConfigError, match=rf"holds no ssh-ed25519 key \(it has {named}\)"):
        verify_signature(certificate, theirs.with_suffix(".pub"))


def test_no_signature(certificate, public):
    with pytest.raises(CheckpointError, match=r"there is no signature .*certificate\.json\.sig"):
        verify_signature(certificate, public)


def test_other_bytes(certificate, key, public):
    sign(certificate, key)
    certificate.write_bytes(CONTENT.replace(b"true", b"True"))
    with pytest.raises(CheckpointError, match="were changed"):
        verify_signature(certificate, public)


def test_another_key(certificate, key, tmp_path):
    sign(certificate, key)
    other = make_key(tmp_path, "other").with_suffix(".pub")
    with pytest.raises(CheckpointError, match=r"made by the key SHA256:\S+, which is not in .*other\.pub"):
        verify_signature(certificate, other)


def test_a_key_put_into_anothers_signature(certificate, key, public, tmp_path):
    """The signature's own key field is not believed: swapping it for the trusted key leaves a wrong signature."""
    forger = make_key(tmp_path, "forger")
    path = sign(certificate, forger)
    found = Signature.from_text(path.read_text())
    path.write_text(Signature(read_signers(public)[0].key, found.namespace, found.signature).to_text())
    with pytest.raises(CheckpointError, match="were changed"):
        verify_signature(certificate, public)


def test_another_namespace(certificate, key, public, monkeypatch):
    monkeypatch.setattr(signing, "NAMESPACE", "git")
    sign(certificate, key)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="made for 'git', expected 'holdfast-certificate'"):
        verify_signature(certificate, public)


def test_a_namespace_written_over_anothers(certificate, key, public, monkeypatch):
    """The namespace is signed: what was signed for another use cannot be relabelled."""
    monkeypatch.setattr(signing, "NAMESPACE", "git")
    path = sign(certificate, key)
    monkeypatch.undo()
    found = Signature.from_text(path.read_text())
    path.write_text(Signature(found.key, NAMESPACE, found.signature).to_text())
    with pytest.raises(CheckpointError, match="were changed"):
        verify_signature(certificate, public)


def test_every_flipped_bit_of_the_signature_is_refused(certificate, key, public):
    path = sign(certificate, key)
    lines = path.read_text().splitlines()
    raw = base64.b64decode("".join(lines[1:-1]))
    for place in range(len(raw)):
        for bit in (1, 128):
            changed = bytearray(raw)
            changed[place] ^= bit
            path.write_text("\n".join([BEGIN, base64.b64encode(changed).decode(), END]) + "\n")
            with pytest.raises(CheckpointError):
                verify_signature(certificate, public)


def test_truncated_padded_and_foreign_files_are_refused(certificate, key, public):
    path = sign(certificate, key)
    text = path.read_text()
    lines = text.splitlines()
    raw = base64.b64decode("".join(lines[1:-1]))
    bodies = [raw[:size] for size in range(0, len(raw), 7)] + [raw + b"\0", b"SSHSIG\0\0\0\x02" + raw[10:]]
    bodies += [
        raw[:6] + b"\0\0\0\x01" + b"\xff" * 4 + raw[14:],
        raw.replace(b"\0\0\0\0\0\0\0\x06", b"\0\0\0\x01x\0\0\0\x06"),
    ]
    texts = ["\n".join([BEGIN, base64.b64encode(body).decode(), END]) + "\n" for body in bodies]
    texts += ["", BEGIN, text[:-20], text + "more\n", text.replace("\n", " \n"), "x" * 100_000, "\u00e9", "\0" * 10]
    for one in texts:
        path.write_text(one, encoding="utf-8")
        with pytest.raises(CheckpointError, match="is not a signature that holdfast reads"):
            verify_signature(certificate, public)


def test_a_passphrase_comes_from_the_environment_or_a_prompt(certificate, tmp_path, monkeypatch):
    locked = make_key(tmp_path, "locked", b"open sesame")
    public = locked.with_suffix(".pub")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(ConfigError, match="nobody can be asked"):
        sign(certificate, locked)
    monkeypatch.setenv(PASSPHRASE, "wrong")
    with pytest.raises(ConfigError, match="passphrase is wrong") as refused:
        sign(certificate, locked)
    assert "wrong'" not in str(refused.value)
    monkeypatch.setenv(PASSPHRASE, "open sesame")
    sign(certificate, locked)
    assert verify_signature(certificate, public)
    monkeypatch.delenv(PASSPHRASE)
    signature_path(certificate).unlink()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda prompt: "open sesame")
    sign(certificate, locked)
    assert verify_signature(certificate, public)


@pytest.mark.parametrize("content", [b"", b"text", b"\xff\xfe", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"])
def test_what_is_no_private_key_is_refused(certificate, tmp_path, content):
    path = tmp_path / "wrong"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not an OpenSSH private key"):
        sign(certificate, path)
    assert not signature_path(certificate).exists()
    with pytest.raises(ConfigError, match="cannot be read"):
        sign(certificate, tmp_path / "nowhere")


def test_the_private_key_is_not_taken_for_the_public_one(certificate, key):
    sign(certificate, key)
    with pytest.raises(ConfigError, match="holds a private key"):
        verify_signature(certificate, key)


@pytest.mark.parametrize(
    "content",
    ["", "# only a comment\n", "ssh-ed25519\n", "ssh-ed25519 AAAA\n", "three words here\n", "ssh-ed25519 !!! x"],
)
def test_what_is_no_public_key_is_refused(certificate, key, tmp_path, content):
    sign(certificate, key)
    path = tmp_path / "wrong.pub"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"wrong\.pub"):
        verify_signature(certificate, path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("", None),
        ('namespaces="holdfast-certificate" ', None),
        ('namespaces="git,holdfast-*" ', None),
        ('namespaces="git" ', "may sign for 'git'"),
        ('namespaces="*,!holdfast-certificate" ', "may sign for"),
        ('namespaces="[h]oldfast-certificate" ', "may sign for"),
        ('valid-before="20200101" ', "'valid-before' is not supported"),
        ('namespaces="holdfast-certificate",valid-after="20200101" ', "'valid-after' is not supported"),
        ("cert-authority ", "'cert-authority' is not supported"),
    ],
)
def test_options_of_allowed_signers(certificate, key, public, tmp_path, options, problem):
    sign(certificate, key)
    other = make_key(tmp_path, "other").with_suffix(".pub").read_text()
    signers = tmp_path / "allowed_signers"
    signers.write_text(f'# ours\n\nelse@example.org {other}"us and them" {options}{public.read_text()}')
    if problem is None:
        assert verify_signature(certificate, signers).name == "us and them"
    else:
        with pytest.raises(CheckpointError, match=f"line 4: .*{problem}"):
            verify_signature(certificate, signers)
