"""Unsloth puts its own classes in the place of TRL's: after holdfast was imported that is too late, and is refused."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import trl

from holdfast.core.errors import UnsupportedError
from holdfast.training.support import require_import_order
from holdfast.training.trainer import SafeSFTTrainer


@pytest.fixture
def unsloth(monkeypatch):
    """Unsloth as far as the order matters: its module is there, and TRL's names are its own generated classes."""
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    generated = {}
    for name in ("SFTTrainer", "DPOTrainer", "GRPOTrainer"):
        # It is made from the source of TRL's class, so it is no subclass of it.
        generated[name] = type(f"Unsloth{name}", tuple(getattr(trl, name).__bases__), {})
        monkeypatch.setattr(trl, name, generated[name])
    return generated


def test_the_wrong_order_is_refused_before_anything_else(unsloth):
    with pytest.raises(UnsupportedError, match="unsloth was imported after holdfast: SafeSFTTrainer") as caught:
        SafeSFTTrainer("no model is loaded")
    assert "`import unsloth` as the first import" in caught.value.remedy


def test_the_right_order_passes(unsloth):
    require_import_order(type("Made", (unsloth["SFTTrainer"],), {}))


def test_without_unsloth_nothing_is_asked(monkeypatch):
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    require_import_order(SafeSFTTrainer)


def test_unsloth_that_left_trl_alone_passes(monkeypatch):
    """As it does on a machine without a GPU."""
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    require_import_order(SafeSFTTrainer)
