"""Fuzz: whatever a model's files hold, hashing and loading end in a refusal or a model, never in another exception.

Mutations are seeded: a bit flipped, a file cut off, a value of another type, a header that claims another length.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from pathlib import Path

import pytest
from tests import tiny
from tests.unit.auditing.making import write_adapter

from holdfast.core.errors import HoldfastError
from holdfast.models.content import content_of
from holdfast.models.handle import load_model, load_tokenizer

VALUES = (
    None,
    True,
    -1,
    0,
    10**7,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    "../../x",
    "\x1b[2J",
    [],
    {},
    [[]],
    {"a": {"b": 1}},
)
DEEP = b"[" * 100_000
TRIES = 25
SECONDS = 60.0  # for one file; far above what a refusal takes, and below any hang


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_adapter(folder / "adapter", tiny.saved(folder / "base", layers=1))
    return folder


@pytest.fixture
def base(models, tmp_path) -> Path:
    return Path(shutil.copytree(models / "base", tmp_path / "base"))


@pytest.fixture
def adapter(models, base, tmp_path) -> Path:
    folder = Path(shutil.copytree(models / "adapter", tmp_path / "adapter"))
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def settles(*actions) -> None:
    """Every action succeeds or is refused in printable words, in time."""
    started = time.process_time()
    said = ""
    for action in actions:
        try:
            action()
        except HoldfastError as error:
            said += f"{error.what} {error.remedy}"
    assert said.isprintable(), said
    assert time.process_time() - started < SECONDS


def damaged_bytes(data: bytes, draw: random.Random, first: int) -> bytes:
    """A bit flipped among the first bytes, a cut, or a few bytes of something else."""
    found = bytearray(data)
    place = draw.randrange(min(first, len(found)))
    kind = draw.choice(["flip", "flip", "flip", "cut", "put"])
    if kind == "cut":
        return bytes(found[:place])
    if kind == "put":
        found[place : place + 4] = draw.randbytes(4)
    else:
        found[place] ^= 1 << draw.randrange(8)
    return bytes(found)


def changed_settings(text: str, draw: random.Random) -> str:
    """One key with a value of another kind; NaN is written as Python writes it."""
    value = json.loads(text)
    value[draw.choice(sorted(value))] = draw.choice(VALUES)
    return json.dumps(value)


@pytest.mark.parametrize("kind", ["bytes", "values"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_settings_of_a_model(base, name, kind):
    path, draw = base / name, random.Random(f"{name} {kind}")
    whole = path.read_text()
    for _ in range(TRIES):
        if kind == "bytes":
            path.write_bytes(damaged_bytes(whole.encode(), draw, len(whole)))
        else:
            path.write_text(changed_settings(whole, draw), encoding="utf-8")
        settles(lambda: content_of(base), lambda: load_tokenizer(base), lambda: load_model(base))


@pytest.mark.parametrize("kind", ["bytes", "values"])
def test_settings_of_an_adapter(adapter, kind):
    path, draw = adapter / "adapter_config.json", random.Random(kind)
    whole = path.read_text()
    for _ in range(TRIES):
        if kind == "bytes":
            path.write_bytes(damaged_bytes(whole.encode(), draw, len(whole)))
        else:
            path.write_text(changed_settings(whole, draw), encoding="utf-8")
        settles(lambda: content_of(adapter), lambda: load_model(adapter))


def test_headers_of_safetensors(base, adapter):
    draw = random.Random("headers")
    for folder, name in ((base, "model.safetensors"), (adapter, "adapter_model.safetensors")):
        path = folder / name
        whole = path.read_bytes()
        header = 8 + struct.unpack("<Q", whole[:8])[0]
        for _ in range(TRIES):
            path.write_bytes(damaged_bytes(whole, draw, header))
            settles(lambda folder=folder: content_of(folder), lambda folder=folder: load_model(folder))
        for claimed in (0, 1, 2**31, 2**63, 2**64 - 1, len(whole)):
            path.write_bytes(struct.pack("<Q", claimed) + whole[8:])
            with pytest.raises(HoldfastError):
                load_model(folder)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", DEEP, b"[]", b"1" * 10_000, b'{"a": '], ids=lambda data: data[:6].hex()
)
def test_files_that_are_something_else(base, name, data):
    if name.endswith("index.json"):
        (base / "model.safetensors").unlink()
    (base / name).write_bytes(data)
    settles(lambda: content_of(base), lambda: load_tokenizer(base), lambda: load_model(base))
