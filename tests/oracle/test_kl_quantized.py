"""kl_token on a 4-bit base (QLoRA): the reference is the packed base itself, which no adapter changes."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import holdfast as hf
from holdfast.core.event_log import read
from tests import tiny
from tests.oracle.test_kl_reference import HELD, LIMIT, OPTIONS, kl
from tests.resume.test_resume_exact import assert_same, die_at, resumed, uninterrupted
from tests.unit.trainers.building import build, same, weights

pytest.importorskip("bitsandbytes", reason="QLoRA needs the extra `quantized`")
FLOAT32 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.saved(tmp_path_factory.mktemp("base"))


@pytest.fixture
def base(folder):
    """Loads the packed base anew."""
    return lambda: AutoModelForCausalLM.from_pretrained(folder, quantization_config=FLOAT32, dtype=torch.float32)


def continued(base):
    """A packed base with an adapter that has been trained before, in bfloat16's numbers: TRL rounds it to them."""
    model = get_peft_model(base(), tiny.lora())
    before = dict(tiny.continued().named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(before[name].bfloat16())
    return model


@pytest.mark.parametrize("way", ["fresh", "continued"])
def test_a_run_ends_within_its_limit_as_a_copy_of_its_start_finds(tmp_path, base, way):
    start = base if way == "fresh" else lambda: continued(base)
    adapter = {"peft_config": tiny.lora() if way == "fresh" else None}
    given = {"model": start(), "constraint": LIMIT, "defense": HELD, **adapter}
    trainer = build(tmp_path, given=given, **{**OPTIONS, "learning_rate": 3e-3})
    trainer.train()
    assert any(row["active"] for row in read(trainer.run_dir / "events.jsonl"))
    assert trainer.run.theta_0.idle_adapter == (way == "fresh")
    end = get_peft_model(base(), tiny.lora()).eval()
    trained, one = dict(end.named_parameters()), trainer.safety["safety"]
    with torch.no_grad():
        for name, value in weights(trainer).items():
            assert value.dtype == torch.float32
            trained[name].copy_(value)
        reference = start().eval()
        expected = torch.stack([kl(reference, end, row).double() for row in one.constraint_set])
    torch.testing.assert_close(trainer.degradations(role="constraint"), expected, rtol=1e-2, atol=1e-6)
    assert float(expected.mean()) > 1e-4
    assert float(LIMIT.value(expected)) <= 0


def test_a_slack_filter_is_plain_training(tmp_path, base):
    """Against our own plain SFT: TRL alone keeps the adapter in bfloat16."""
    limit = hf.ChanceConstraint(tau=10.0, beta=0.0999, unit="kl_token")
    found = {}
    for defense in ("holdfast", "sft"):
        given = {"model": base(), "constraint": limit, "defense": defense}
        trainer = build(tmp_path / defense, given=given, packing=True)
        trainer.train()
        found[defense] = weights(trainer)
    assert same(found["holdfast"], found["sft"])


def test_a_resumed_run_is_bit_identical(tmp_path, base):
    changes = {"start": lambda: continued(base), "peft_config": None, "constraint": LIMIT}
    expected = uninterrupted(tmp_path / "whole", **changes)
    die_at(tmp_path / "cut", 5, **changes)
    assert_same(resumed(tmp_path / "cut", **changes), expected)
