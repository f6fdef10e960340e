"""YAML from anywhere: a value or a refusal in words, never another exception, never for long."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.records.yaml_file import MAX_BYTES, parse_stored_yaml, parse_yaml

PIECES = [
    "a: 1", "b: [1, 2]", "c: {d: e}", "- x", "? y", ": z", "&a b", "*a", "<<: {a: 1}", "!!int x", "!tag y", "---",
    "2020-13-45", "2020-02-30T99:99:99", "0b", "0x", "0o9", "1_", "1:99:99", ".inf", ".nan", "=", "<<", "~", "|", ">",
    "'", '"', "\\x00", "%YAML 9.9", "#", "\t", "  ", "\n", "[", "]", "{", "}", ",", "null: null", "1" * 5000, "\ud800",
    "\u2028", "\x85", "\ufeff", "@", "`", "1e999", "-0", "on: off",
]  # fmt: skip


def readable(text: str) -> None:
    try:
        parse_yaml(text, "fuzz")
    except ConfigError as refused:
        assert refused.remedy  # noqa: PT017  (both ends are right)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["\n", " ", "", "\n  "]))
def test_pieces_of_yaml_in_any_order(pieces, between):
    readable(between.join(pieces))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_of_a_stored_file(data):
    try:
        assert isinstance(parse_stored_yaml(data, "config.yaml"), dict)
    except CheckpointError as refused:
        assert refused.exit_code == 6  # noqa: PT017


def test_mutations_of_a_run_file():
    text = (
        "model: m\ntask: {data: a.jsonl}\nsafety:\n  first: {data: b.jsonl}\ntrain: {learning_rate: 1.0e-4}\nseed: 1\n"
    )
    draw = random.Random(3)
    for _ in range(500):
        data = list(text)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.choice("&*!:-[]{}?|>'\"#%@`,\n\t 0a\u2028")
        readable("".join(data))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\nb: *a\n",
        "a: &a {b: *a}\n",
        "[" * 50_000,
        "{a: " * 50_000,
        "- " * 50_000,
        "? " * 50_000,
        "a: !!python/object/apply:os.system [x]\n",
        "x: '" + "y" * 200_000,
        "a:\n" + "".join(f"  k{i}: &x{i} {i}\n" for i in range(3_000)) + "b: *x1\n",
    ],
)
def test_what_would_grow_hang_or_run_is_refused_at_once(text):
    start = time.monotonic()
    with pytest.raises(ConfigError):
        parse_yaml(text, "bomb")
    assert time.monotonic() - start < 20


def test_a_stored_file_that_is_too_large_is_not_parsed():
    with pytest.raises(CheckpointError, match="expected at most"):
        parse_stored_yaml(b"a" * (MAX_BYTES + 1), "config.yaml")
