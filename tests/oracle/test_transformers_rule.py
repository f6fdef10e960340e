"""The project's gated delta rule in the place of transformers' torch code: where it stands, and where it does not."""

from __future__ import annotations

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen
from torch import nn

from holdfast.fused import delta_rule
from holdfast.fused.delta_rule import computed_here, gated_delta_rule
from tests import hybrid


class Mixer(nn.Module):
    __module__ = qwen.__name__


def drawn(rows, tokens):
    """q, k, v, g and beta of two heads, eight wide."""
    draw = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(rows, tokens, 2, 8, generator=draw) for _ in range(3))
    g, beta = -0.5 * torch.rand(rows, tokens, 2, generator=draw), torch.rand(rows, tokens, 2, generator=draw)
    return q, k, v, g, beta


def named(q, k, v, g, beta, **more):
    return qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **more)[0]


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr(delta_rule, "gated_delta_rule", lambda *args: found.append(args) or gated_delta_rule(*args))
    return found


def test_it_stands_in_for_transformers_inside_the_context_alone(calls):
    before, inputs = qwen.torch_chunk_gated_delta_rule, drawn(2, 70)
    with computed_here([Mixer(), nn.Conv1d(1, 1, 1)]):
        out = named(*inputs)
    assert len(calls) == 1
    assert torch.equal(out, gated_delta_rule(*inputs))
    assert qwen.torch_chunk_gated_delta_rule is before


def test_whatever_else_a_model_hands_down_does_not_turn_it_off(calls):
    more = {"use_cache": False, "output_attentions": None, "cu_seqlens": None, "position_ids": torch.arange(70)}
    with computed_here([Mixer()]):
        named(*drawn(2, 70), **more)
    assert len(calls) == 1


def test_the_mixers_of_a_whole_model_use_it(calls):
    """With the arguments that transformers gives them, whichever these are in the installed version."""
    model = hybrid.model(linear=3)
    mixers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    tokens = torch.arange(2, 12).view(2, 5)
    expected = model(tokens, use_cache=False).logits
    with computed_here(mixers):
        found = model(tokens, use_cache=False).logits
    assert len(calls) == len(mixers) == 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_transformers_own_is_back_after_an_error():
    before = qwen.torch_chunk_gated_delta_rule
    with pytest.raises(RuntimeError), computed_here([Mixer()]):
        named(*drawn(2, 70)[:4], torch.ones(1, 1, 5))  # type: ignore[call-arg]
    assert qwen.torch_chunk_gated_delta_rule is before


@pytest.mark.parametrize("name", ["initial_state", "output_final_state", "chunk_size", "use_qk_l2norm_in_kernel"])
def test_what_it_does_not_know_stays_with_transformers(name, calls):
    q, k, v, g, beta = drawn(2, 70)
    state = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(2))
    unknown = {"initial_state": state, "output_final_state": True, "chunk_size": 32, "use_qk_l2norm_in_kernel": False}
    more = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True} | {name: unknown[name]}
    expected = qwen.torch_chunk_gated_delta_rule(q, k, v, **more)
    with computed_here([Mixer()]):
        found = qwen.torch_chunk_gated_delta_rule(q, k, v, **more)
    assert not calls
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None)


@pytest.mark.parametrize("name", ["cu_seqlens", "seq_idx"])
def test_boundaries_of_packed_rows_stay_with_transformers(name):
    with computed_here([Mixer()]), pytest.raises(ValueError, match="packed sequences"):
        named(*drawn(1, 70), **{name: torch.tensor([0, 30, 70])})


def test_a_mixer_of_no_known_module_is_passed_over():
    Elsewhere = type("Elsewhere", (nn.Module,), {"__module__": "nowhere.to.be.found"})
    before = qwen.torch_chunk_gated_delta_rule
    with computed_here([Elsewhere()]):
        assert qwen.torch_chunk_gated_delta_rule is before


def test_an_installed_kernel_is_left_in_place(monkeypatch):
    monkeypatch.setattr(delta_rule, "_has_kernels", lambda: True)
    before = qwen.torch_chunk_gated_delta_rule
    with computed_here([Mixer()]):
        assert qwen.torch_chunk_gated_delta_rule is before


def test_a_folder_with_a_kernel_package_name_is_no_kernel(monkeypatch, tmp_path):
    (tmp_path / "kernels_of_a_user").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not delta_rule._is_installed("kernels_of_a_user")
    assert not delta_rule._is_installed("no_such_package_at_all")
    assert delta_rule._is_installed("torch")
