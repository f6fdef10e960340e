"""The command as these tests call it."""

from __future__ import annotations

import sys

import pytest

from holdfast.cli.main import main


@pytest.fixture
def holdfast(monkeypatch, capsys):
    monkeypatch.delenv("HOLDFAST_REPORTED", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call
