"""The head in float32: less noise than the model's own, the architectures it knows, and those it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import VeraConfig, get_peft_model
from tests import tiny
from tests.unit.constraint.literal import PAD, ROWS, adapted, encoded, literal_nll, move
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from holdfast.core.errors import UnsupportedError
from holdfast.data.encode import collate
from holdfast.scoring import completion
from holdfast.scoring.completion import completion_losses, hidden_states, require_understood_head
from holdfast.scoring.head import Head


def test_a_float32_head_is_at_least_five_times_less_noisy_than_a_bfloat16_head():
    """A bfloat16 base, a change too small to matter: what remains of |D| is rounding, most of it the head's."""
    rows = encoded([(4, 8)] * 64, seed=9)
    batch = collate(rows, PAD)
    ours, theirs, truth = [], [], []
    for size in (0.0, 1e-3):
        model = move(adapted(dtype=torch.bfloat16), size).eval()
        weight = model.get_base_model().lm_head.weight
        with torch.no_grad():
            hidden = hidden_states(model, batch)
            assert hidden.dtype == weight.dtype == torch.bfloat16
            ours.append(completion_losses(model, batch, 8).per_token())
            theirs.append(mean_nll(hidden, weight, batch["labels"]))
            truth.append(mean_nll(hidden.double(), weight.double(), batch["labels"]))
    d_ours, d_theirs, d_true = (x[1] - x[0] for x in (ours, theirs, truth))
    assert float(d_true.abs().max()) < 0.02, "the change is small"
    assert float((d_theirs - d_true).std()) > 5 * float((d_ours - d_true).std())


def mean_nll(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean NLL of each row, all in the dtype of `hidden`."""
    labels, mask = labels[:, 1:], labels[:, 1:] != -100
    log_p = torch.log_softmax(hidden[:, :-1] @ weight.T, -1)
    picked = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked.double() * mask).sum(1) / mask.sum(1)


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
ARCHITECTURES = {
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0)),
    "cohere scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "granite scaling": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_soft_cap_and_logit_scale_are_part_of_the_head(monkeypatch, name):
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    require_understood_head(model, collate(ROWS, PAD))
    found = completion_losses(model, collate(ROWS, PAD), 8)
    for i, row in enumerate(ROWS):
        assert float(found.total[i]) == pytest.approx(sum(literal_nll(model, row)), abs=1e-4)
    bare = Head(model)
    bare.cap, bare.scale = None, 1.0
    monkeypatch.setattr(completion, "Head", lambda _: bare)
    with pytest.raises(UnsupportedError, match="differ from its own logits"):
        require_understood_head(model, collate(ROWS, PAD))


def test_a_head_that_does_more_is_refused():
    model = tiny.model().eval()
    own = model.forward

    def alien(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = output.logits * 1.3
        return output

    require_understood_head(model, collate(ROWS, PAD))
    model.forward = alien
    with pytest.raises(UnsupportedError, match="differ from its own logits") as caught:
        require_understood_head(model, collate(ROWS, PAD))
    assert "report this architecture" in caught.value.remedy


def test_a_model_without_output_embedding_is_refused():
    model = SimpleNamespace(get_output_embeddings=lambda: None)
    with pytest.raises(UnsupportedError, match="no output embedding"):
        Head(model)


def test_an_adapter_of_any_kind_on_the_head_is_refused():
    """Its weight is the base's: correct at the start, where no check against the model's own logits finds a gap."""
    model = get_peft_model(tiny.model(), VeraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UnsupportedError, match="adapter on the output head"):
        Head(model)
