"""An adapter on an adapter: what PEFT alone makes of it, and what the card says."""

from __future__ import annotations

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from tests import tiny
from transformers import AutoModelForCausalLM

from holdfast.core.adapter_card import adapters_below, loading_note
from holdfast.models.handle import load_model


def adapter(folder, base, seed: int):
    """A LoRA adapter with random factors in a folder, standing on `base`."""
    from peft import get_peft_model

    model = get_peft_model(tiny.model(), tiny.lora())
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=draw))
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    root = tmp_path_factory.mktemp("chain")
    base = tiny.saved(root / "base")
    first = adapter(root / "first", base, 1)
    return base, first, adapter(root / "second", first, 2)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 11).unsqueeze(0)).logits


def test_the_steps_of_the_card_give_the_trained_model_and_peft_alone_does_not(chain):
    base, first, second = chain
    note = loading_note(second)
    code = note.split("```python\n")[1].split("```")[0]
    for name, place in (("BASE_MODEL", base), ("ADAPTER_BELOW", first), ("THIS_ADAPTER", second)):
        code = code.replace(name, str(place))
    scope: dict[str, object] = {}
    exec(code, scope)
    expected = logits(load_model(second, dtype="float32"))
    torch.testing.assert_close(logits(scope["model"]), expected, rtol=1e-4, atol=1e-4)
    short = note.split("```python\n")[2].split("```")[0].replace("THIS_ADAPTER", str(second))
    exec(short, scope)
    torch.testing.assert_close(logits(scope["model"]), expected, rtol=1e-4, atol=1e-4)
    alone = logits(AutoPeftModelForCausalLM.from_pretrained(str(second)))
    assert float((alone - expected).abs().max()) > 0.1, "PEFT does it right by now: the note can go"


def test_an_adapter_on_a_model_needs_no_note(chain):
    base, first, _ = chain
    assert adapters_below(first) == [str(base)]
    assert loading_note(first) is None
    assert loading_note(base) is None
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), first)
    torch.testing.assert_close(logits(alone), logits(load_model(first, dtype="float32")), rtol=1e-4, atol=1e-4)


def test_no_folder_of_this_machine_is_named(chain):
    *_, second = chain
    assert str(second.parent) not in loading_note(second)
    assert adapters_below(second) == [str(second.parent / "first"), str(second.parent / "base")]
