"""B7, B8: an adapter's settings are foreign text; the worst of them ends in a refusal, at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.auditing.audit import audit
from holdfast.models import limits
from holdfast.models.content import content_of
from holdfast.models.handle import load_model
from tests import tiny
from tests.attacks.endings import ending, refusal
from tests.unit.auditing.making import write_adapter, write_rows


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(base, tmp_path) -> Path:
    return write_adapter(tmp_path / "adapter", base, size=0.01)


def edit(adapter: Path, **values: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values), encoding="utf-8")


def test_an_adapter_of_an_unknown_type(adapter, base, tmp_path):
    """B7: a traceback of KeyError."""
    edit(adapter, peft_type="LORB")
    prompts = write_rows(tmp_path / "prompts.jsonl", 4)
    refused = refusal(lambda: audit(base, adapter, str(prompts)))
    assert refused is not None
    assert "'LORB'" in refused.what
    assert "LORA" in refused.remedy


@pytest.mark.parametrize("act", [content_of, load_model])
def test_an_adapter_that_is_its_own_base(adapter, act):
    """B7: endless recursion."""
    edit(adapter, base_model_name_or_path=str(adapter))
    refused = refusal(lambda: act(adapter))
    assert refused is not None
    assert "rests on itself" in refused.what


def test_two_adapters_that_are_each_other_s_base(adapter, base, tmp_path):
    """B7: the same in two steps."""
    second = write_adapter(tmp_path / "second", base)
    edit(adapter, base_model_name_or_path=str(second))
    edit(second, base_model_name_or_path=str(adapter))
    assert refusal(lambda: content_of(adapter)) is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(adapter, base, tmp_path):
    """B7: a traceback of torch."""
    prompts = write_rows(tmp_path / "prompts.jsonl", 4)
    refused = refusal(lambda: audit(base, adapter, str(prompts), device="cuda"))
    assert refused is not None
    assert "no CUDA device" in refused.what
    assert "--device cpu" in refused.remedy


@pytest.mark.parametrize("values", [{"r": 10**7}, {"rank_pattern": {"q_proj": 10**7}}])
def test_a_rank_that_no_tensor_has_builds_nothing(adapter, monkeypatch, values):
    """B8: `r: 1e7` fills memory with matrices of that rank before anything is compared with the file."""
    from peft import PeftModel

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("PEFT was asked to build matrices of rank 10,000,000")

    monkeypatch.setattr(PeftModel, "from_pretrained", reached)
    edit(adapter, **values)
    assert refusal(lambda: load_model(adapter)) is not None


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": "([a-z_.0-9]+)+!"},
        {"exclude_modules": "([a-z_.0-9]+)+!"},
        {"rank_pattern": {"([a-z_.0-9]+)+!": 4}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_pattern_that_backtracks_for_ever(adapter, values, monkeypatch):
    """B8: a pattern of module names that is never matched to its end."""
    if "target_modules" not in values:  # the first waits as long as users do
        monkeypatch.setattr(limits, "_MATCH", limits._MATCH.replace("(2, 2)", "(1, 1)"))
    edit(adapter, **values)
    assert ending(lambda: load_model(adapter)) == "refused"


def test_a_path_beyond_ascii_in_an_ascii_locale(base, tmp_path):
    """B7: a traceback when everything is measured and the result is written."""
    prompts = write_rows(tmp_path / "prompts.jsonl", 4)
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "audit", "--before", base]
    run += ["--after", base, "--safety", prompts, "--output", tmp_path / "\u00e9tude", "--device", "cpu"]
    done = subprocess.run(run, env=os.environ | plain, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert "LC_ALL" in done.stderr
