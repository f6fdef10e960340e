"""Secrets are blanked by name, by shape and by place; counts, special tokens and prose stay as they are."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError
from holdfast.core.redaction import REDACTED, is_secret_name, redact

PLAIN = "q7Zw93LmTr4Xv"  # no known shape: only its name or its place gives it away

SECRETS = [
    ("hf_ABCDEFGHIJKLMNOP", "hf_ABCDEFGHIJKLMNOP"),
    ("sk-abcdefgh12345678", "sk-abcdefgh12345678"),
    ("sk-proj-abc_DEF-123456", "sk-proj-abc_DEF-123456"),
    ("ghp_0123456789abcdefghij", "ghp_0123456789abcdefghij"),
    ("gho_0123456789abcdefghij", "gho_0123456789abcdefghij"),
    ("ghs_0123456789abcdefghij", "ghs_0123456789abcdefghij"),
    ("github_pat_11AAAA_bbbbccccdddd", "github_pat_11AAAA_bbbbccccdddd"),
    ("glpat-0123456789abcdefghij", "glpat-0123456789abcdefghij"),
    ("xoxb-123456789012-abcdef", "xoxb-123456789012-abcdef"),
    ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    ("AIzaSyA0123456789abcdefghijklmnopqrstuv", "AIzaSyA0123456789abcdefghijklmnopqrstuv"),
    ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", "eyJzdWIiOiIx"),
    ("gsk_0123456789abcdefghij", "gsk_0123456789abcdefghij"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\n-----END OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1r"),
    (f"Authorization: Bearer {PLAIN}", PLAIN),
    (f"authorization: bearer {PLAIN}", PLAIN),
    (f"Authorization: Basic {PLAIN}==", PLAIN),
    (f"Authorization={PLAIN}", PLAIN),
    (f"{{'Authorization': 'Bearer {PLAIN}'}}", PLAIN),
    (f'{{"Authorization": "Token {PLAIN}"}}', PLAIN),
    (f"Proxy-Authorization: Basic {PLAIN}", PLAIN),
    (f"sent Bearer {PLAIN} to it", PLAIN),
    (f"apikey={PLAIN}", PLAIN),
    (f"apiKey: {PLAIN}", PLAIN),
    (f"api-key {PLAIN}".replace(" ", "="), PLAIN),
    (f"x-api-key: {PLAIN}", PLAIN),
    (f"X-Api-Key={PLAIN}", PLAIN),
    (f"OPENAI_API_KEY={PLAIN}", PLAIN),
    (f"HF_TOKEN={PLAIN}", PLAIN),
    (f"AWS_SECRET_ACCESS_KEY={PLAIN}", PLAIN),
    (f"endpoint:url=http://h/v1,model=m,key={PLAIN}", PLAIN),
    (f"judge 'endpoint:key={PLAIN},key={PLAIN}': expected", PLAIN),
    (f"https://host/x?access_token={PLAIN}&n=3", PLAIN),
    (f"https://host/x?n=3&token={PLAIN}", PLAIN),
    (f"https://host/x?key={PLAIN}#top", PLAIN),
    (f"https://{PLAIN}@host/x", PLAIN),
    (f"https://user:{PLAIN}@host/x", PLAIN),
    (f"https://user:p@{PLAIN}@host/x", PLAIN),
    (f"git+https://oauth2:{PLAIN}@host/x.git", PLAIN),
    (f"postgresql://user:{PLAIN}@host:5432/db", PLAIN),
    (f'{{"password": "{PLAIN}"}}', PLAIN),
    (f'{{"token": "{PLAIN}"}}', PLAIN),
    (f"password: {PLAIN}", PLAIN),
    (f"passphrase='{PLAIN} {PLAIN}'", PLAIN),
    (f"client_secret={PLAIN}", PLAIN),
    (f"Cookie: session={PLAIN}", PLAIN),
    (f"--hub-token={PLAIN}", PLAIN),
]

HARMLESS = [
    "eos_token=</s>", "pad_token: <pad>", "eos_token", "num_tokens=512", "max_tokens: 256", "max_new_tokens=128",
    "12 tokens", "token=5", "tokens: 17", "token: 3", "token 7 of 12", "nll_token 0.1", "unit kl_token: 0.05 nats",
    "missing key: learning_rate", "unknown key 'lr'", "a key goes into an environment variable", "expected key=value",
    "write endpoint:url=...,model=...,key=...", "the bearer of this certificate", "tokenizer: Qwen/Qwen2.5",
    "password: expected text", "hub_token: Input should be text", "git@github.com:owner/name.git",
    "ssh://git@github.com/owner/name", "owner/name@0123abc", "https://host/a@b", "mail me@example.org",
    "set HOLDFAST_JUDGE_KEY to the key", "sk-learn", "task_first-second", "risk-averse choices", "pk_first",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "monkey=banana", "keyboard: x",
    "environment variable of the key", "author: someone", "public_key_file", "key_env=MY_VARIABLE",
]  # fmt: skip


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_secrets_in_text_are_blanked_wherever_they_stand(text, secret):
    for written in (text, f"before {text} after", f"({text})", f"line\n{text}\nline"):
        shown = redact(written)
        assert secret not in shown
        assert REDACTED in shown
        assert redact(shown) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text
    assert redact(f"before {text} after") == f"before {text} after"


@pytest.mark.parametrize(
    "name",
    ["key", "token", "api_key", "apikey", "apiKey", "x-api-key", "X-Api-Key", "Authorization", "authorization", "auth",
     "proxy-authorization", "hub_token", "HF_TOKEN", "secret", "clientSecret", "password", "passphrase", "cookie",
     "credentials", "aws_secret_access_key", "judge_key"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert redact({name: PLAIN, "inner": [{name: PLAIN}], "list": ({name: [PLAIN]},)}) == {
        name: REDACTED, "inner": [{name: REDACTED}], "list": ({name: [REDACTED]},),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["eos_token", "pad_token", "bos_token", "image_token", "num_tokens", "max_tokens", "max_new_tokens", "tokens",
     "tokenizer", "tokenizer_sha256", "nll_token", "kl_token", "key_env", "public_key", "monkey", "author", "keep",
     "passed", "secretary", "keys"],
)  # fmt: skip
def test_names_of_other_things(name):
    assert not is_secret_name(name)
    assert redact({name: "as it is"}) == {name: "as it is"}


def test_what_is_no_text_stays():
    values = {"token": 5, "key": None, "password": True, "n": 0.5, "api_key": ""}
    assert redact(values) == values


def test_errors_never_hold_a_secret():
    error = ConfigError(f"judge 'endpoint:key={PLAIN}'", remedy=f"use https://{PLAIN}@host")
    assert PLAIN not in str(error) + repr(error) + error.what + error.remedy
    assert error.what == f"judge 'endpoint:key={REDACTED}'"


@given(st.text(alphabet="key=token:/@ \"'[]Authorization Bearer\n-_0aA.,", max_size=80))
def test_redacting_twice_changes_nothing(text):
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize(
    "piece",
    [
        "a" * 50_000,
        "://" * 20_000,
        "key-" * 20_000,
        "-----BEGIN PRIVATE KEY-----" * 2_000,
        "x_" * 30_000,
        "eyJ" * 20_000,
        "sk-" * 20_000,
    ],
)
def test_long_text_takes_no_long_time(piece):
    start = time.process_time()
    redact(piece)
    assert time.process_time() - start < 2
