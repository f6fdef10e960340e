"""Directions of a module's outputs, against singular vectors of the outputs themselves."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from holdfast.core.errors import UnsupportedError
from holdfast.models.lora_layers import LoraLayer, lora_layers
from holdfast_lab.building_blocks import activation_subspace
from holdfast_lab.building_blocks.activation_subspace import SecondMoments, groups, top_eigenvectors, truncated_svd

CPU = torch.device("cpu")


class Pair(nn.Module):
    """One module with fewer outputs than inputs, one with more."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(12, 7), nn.Linear(12, 20)

    def forward(self, x):
        return self.down(x), self.up(x)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return get_peft_model(Pair(), LoraConfig(r=2, target_modules=["down", "up"]))


def batch(rows=3, positions=9, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, positions, 12, generator=draw), torch.rand(rows, positions, generator=draw) < 0.6


def projector(v):
    return v @ v.T


@pytest.fixture(params=["exact", "iterated"])
def method(request, monkeypatch):
    if request.param == "iterated":
        monkeypatch.setattr(activation_subspace, "EXACT_UP_TO", 3)
        monkeypatch.setattr(activation_subspace, "OVERSAMPLING", 4)
    return request.param


@pytest.mark.parametrize("name", ["down", "up"])
def test_directions_are_the_right_singular_vectors_of_the_outputs_at_the_chosen_tokens(pair, name, method):
    layers = lora_layers(pair, defense="toy")
    layer = next(x for x in layers if x.name == name)
    moments, chosen = SecondMoments(layers), []
    for seed in (1, 2):
        x, tokens = batch(seed=seed)
        x[~tokens] *= 100  # would dominate if it were counted
        with moments.counting(tokens):
            pair(x)
        chosen.append(x[tokens])
    outputs = (torch.cat(chosen) @ layer.base_weight.T).double()  # without the bias
    expected = torch.linalg.svd(outputs, full_matrices=False).Vh[:3].T
    found = moments.directions(layer, 3)
    torch.testing.assert_close(found.T @ found, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(projector(found), projector(expected), rtol=1e-5, atol=1e-5)


def test_directions_that_the_outputs_do_not_have_are_left_out(pair, method):
    layers = lora_layers(pair, defense="toy")
    x, tokens = batch()
    x[:] = x[0, :2].repeat(1, 5, 1)[:, :9]  # two distinct inputs
    moments = SecondMoments(layers)
    with moments.counting(tokens):
        pair(x)
    for layer in layers:
        found = moments.directions(layer, 5)
        assert found.shape == (len(layer.base_weight), 2)
        outputs = (x[0, :2] @ layer.base_weight.T).double()
        torch.testing.assert_close(outputs @ projector(found), outputs, rtol=1e-5, atol=1e-5)


def test_hooks_and_random_state_are_left_alone(pair, method):
    layers = lora_layers(pair, defense="toy")
    moments, (x, tokens) = SecondMoments(layers), batch()
    before = torch.get_rng_state()
    with moments.counting(tokens):
        pair(x)
    with pytest.raises(RuntimeError), moments.counting(tokens):
        pair(x[..., :5])
    moments.directions(layers[0], 2)
    truncated_svd(layers[0].base_weight, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert not any(m._forward_pre_hooks for m in pair.modules())


def test_inputs_in_another_order_than_the_tokens_are_refused(pair):
    moments, (x, tokens) = SecondMoments(lora_layers(pair, defense="toy")), batch()
    with pytest.raises(UnsupportedError, match=r"down sees inputs of shape \(27, 12\)"), moments.counting(tokens):
        pair(x.flatten(0, 1))


def test_a_module_that_sees_nothing_is_refused(pair):
    layers = lora_layers(pair, defense="toy")
    with pytest.raises(UnsupportedError, match="down sees no token"):
        SecondMoments(layers).directions(layers[0], 2)


def test_top_eigenvectors_in_falling_order(method):
    basis = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(4))).Q
    values = torch.tensor([9.0, 4.0, 2.0, 1.0, 0.3, 0.1, 0.05, 0.01, 0.0], dtype=torch.float64)
    matrix = basis @ torch.diag(values) @ basis.T
    found, vectors = top_eigenvectors(lambda q: matrix @ q, 9, 3, CPU)
    torch.testing.assert_close(found, values[:3])
    torch.testing.assert_close((vectors.T @ basis[:, :3]).abs(), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(6, 15), (15, 6), (8, 8)], ids=["wide", "tall", "square"])
def test_truncated_svd_is_the_best_approximation(shape, method):
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(6))
    u, s, z = truncated_svd(weight, 3)
    a, b, c = torch.linalg.svd(weight.double(), full_matrices=False)
    torch.testing.assert_close(s, b[:3])
    torch.testing.assert_close(u @ torch.diag(s) @ z.T, a[:, :3] @ torch.diag(b[:3]) @ c[:3])


def test_groups_keep_order_and_budget(pair):
    down, up = lora_layers(pair, defense="toy")
    many = [down, up, down, up]
    sizes = {down.name: 8 * 7**2, up.name: 8 * 12**2}
    assert [[x.name for x in g] for g in groups(many, 10**9)] == [["down", "up", "down", "up"]]
    assert [[x.name for x in g] for g in groups(many, sizes["down"] + sizes["up"])] == [["down", "up"]] * 2
    assert [[x.name for x in g] for g in groups(many, 1)] == [["down"], ["up"]] * 2
    assert list(groups([])) == []
    assert isinstance(many[0], LoraLayer)
