"""What the Axolotl plugin refuses, by the name it has in an Axolotl file; Axolotl itself is not needed."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from enum import Enum
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from holdfast.core.errors import ResourceError, UnsupportedError
from holdfast.integrations.axolotl.settings import (
    OF_RUN_FILE,
    REFUSED,
    SIZES,
    TRAIN,
    HoldfastArgs,
    HoldfastSettings,
    require_supported,
)
from holdfast.runs.config import RunConfig
from holdfast.training.config import SafeSFTConfig

PAGE = Path(__file__).parents[2] / "docs" / "axolotl.md"


@pytest.mark.parametrize("key", REFUSED)
def test_each_key_is_named_with_its_reason_and_a_remedy(key):
    require_supported({"adapter": "lora", key: None})
    require_supported({"adapter": "lora", key: False})
    with pytest.raises(UnsupportedError, match=f"^{key}") as caught:
        require_supported({"adapter": "lora", key: True})
    assert REFUSED[key][0] in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize("key", SIZES)
def test_several_devices_for_one_model(key):
    require_supported({key: 1})
    with pytest.raises(UnsupportedError, match=f"{key}: 2"):
        require_supported({key: 2})


def test_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="2 processes with the holdfast plugin") as caught:
        require_supported({})
    assert "CUDA_VISIBLE_DEVICES=0" in caught.value.remedy


@pytest.mark.parametrize("adapter", ["qlora", "mora"])
def test_other_adapters(adapter):
    with pytest.raises(UnsupportedError, match=f"adapter: {adapter}"):
        require_supported({"adapter": adapter})


def test_other_plugins_unless_they_change_neither_trainer_nor_loss():
    ours = "holdfast.integrations.axolotl.HoldfastPlugin"
    require_supported({"plugins": [ours, "axolotl.integrations.liger.LigerPlugin"]})
    with pytest.raises(UnsupportedError, match=r"plugins: some\.Plugin"):
        require_supported({"plugins": [ours, "some.Plugin"]})


def test_the_file_of_the_page_is_supported():
    (text,) = re.findall(r"^```yml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    values = yaml.safe_load(text)
    require_supported(values)
    assert values["plugins"] == ["holdfast.integrations.axolotl.HoldfastPlugin"]
    assert HoldfastArgs(**values).holdfast == HoldfastArgs().holdfast  # it writes what is the default


def test_an_empty_block_is_every_default():
    assert HoldfastArgs(holdfast=None).holdfast is None
    assert HoldfastArgs().holdfast == HoldfastSettings()


def test_unknown_keys_of_the_block_are_refused():
    with pytest.raises(ValidationError, match="saftey"):
        HoldfastArgs(holdfast={"saftey": "auto"})


def test_every_key_of_a_run_file_in_the_block_is_one():
    assert set(OF_RUN_FILE) <= set(RunConfig.model_fields)
    assert set(HoldfastSettings.model_fields) == {*OF_RUN_FILE, "train", "certify", "report"}
    assert set(TRAIN) <= {field.name for field in fields(SafeSFTConfig)}


def test_an_enumeration_is_shown_as_it_is_written():
    with pytest.raises(UnsupportedError, match=r"^rl: dpo with the holdfast plugin"):
        require_supported({"rl": Enum("RLType", {"DPO": "dpo"})("dpo")})


def test_all_cases_are_named_at_once():
    with pytest.raises(UnsupportedError) as caught:
        require_supported({"rl": "dpo", "deepspeed": "zero2.json"})
    assert "rl: dpo" in caught.value.what
    assert "deepspeed: zero2.json" in caught.value.what


@pytest.mark.skipif(importlib.util.find_spec("axolotl") is not None, reason="axolotl is installed")
def test_without_axolotl_the_plugin_says_what_to_install():
    from holdfast.integrations import axolotl

    with pytest.raises(ResourceError, match="cannot be loaded") as caught:
        axolotl.HoldfastPlugin  # noqa: B018
    assert "axolotl==" in caught.value.remedy
    with pytest.raises(AttributeError):
        axolotl.Other  # noqa: B018
