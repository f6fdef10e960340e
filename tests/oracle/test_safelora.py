"""SafeLoRA against its formula written out: explicit d_out x d_out matrices, flattened cosines, a loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import get_peft_model

from holdfast.models.alignment_shift import FactoredShift, alignment_shift
from holdfast.models.lora_layers import lora_layers
from holdfast_lab.defenses.safelora import SafeLoRA, safe_lora
from tests import aligned, tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

RANK = 3  # of the alignment adapter
NO_SAFETY = {"safety_dataset": None, "constraint": None}


def literal(pairs: dict, shifts: dict, *, mode: str, threshold: float = 0.5, number: int = 0, projector: str = "paper"):
    """The new B of every module and its cosine, from (A, B) and V by name."""
    found = {}
    for name, (a, b) in pairs.items():
        v = shifts[name]
        if projector == "paper":
            c = v @ v.T / torch.sqrt((v * v).sum())
        else:
            u, _, _ = torch.linalg.svd(v)
            c = u[:, :RANK] @ u[:, :RANK].T
        mapped = c @ b
        x, y = (mapped @ a).flatten(), (b @ a).flatten()
        found[name] = (mapped, round(float(x @ y / (x.norm() * y.norm())), 5))
    if mode == "number":
        chosen = sorted(found, key=lambda name: (found[name][1], name))[:number]
    else:
        chosen = [name for name in found if found[name][1] <= threshold]
    new = {name: found[name][0] if name in chosen else pairs[name][1] for name in pairs}
    return new, {name: cosine for name, (_, cosine) in found.items()}, chosen


@pytest.fixture
def start(tmp_path):
    """A PEFT model with a random trained adapter in float64, and what came before its alignment."""
    folder = aligned.adapter(tmp_path / "alignment")
    model = get_peft_model(aligned.merged(folder).double(), tiny.lora())
    draw = torch.Generator().manual_seed(5)
    for layer in lora_layers(model, defense="test"):
        layer.A.data = torch.randn(layer.A.shape, generator=draw, dtype=torch.float64)
        layer.B.data = torch.randn(layer.B.shape, generator=draw, dtype=torch.float64)
    return model, folder


def pairs_of(model) -> dict:
    return {
        layer.name: (layer.A.detach().clone(), layer.B.detach().clone()) for layer in lora_layers(model, defense="test")
    }


def dense(shifts: dict) -> dict:
    return {name: shift.left.double() @ shift.right.double() for name, shift in shifts.items()}


OPTIONS = [
    pytest.param({"mode": "number", "number": 2}, id="two-lowest"),
    pytest.param({"mode": "number", "number": 99}, id="more-than-there-are"),
    pytest.param({"mode": "threshold", "threshold": 0.35}, id="some"),
    pytest.param({"mode": "threshold", "threshold": 1.0}, id="all"),
    pytest.param({"mode": "threshold", "threshold": -1.0}, id="none"),
    pytest.param({"mode": "number", "number": 3, "projector": "orthogonal"}, id="orthogonal-number"),
    pytest.param({"mode": "threshold", "threshold": 0.35, "projector": "orthogonal"}, id="orthogonal-threshold"),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_modules_cosines_and_weights(start, options):
    model, folder = start
    before = pairs_of(model)
    shifts = alignment_shift(lora_layers(model, defense="test"), folder)
    expected, cosines, chosen = literal(before, dense(shifts), **options)
    report = safe_lora(model, shifts, SafeLoRA.Config(**options))
    after = pairs_of(model)
    stated: Any = [(m.name, m.cosine) for m in report.each]
    assert stated == [(n, pytest.approx(cosines[n], abs=1e-9)) for n in sorted(before)]
    assert {m.name for m in report.each if m.projected} == set(chosen)
    assert (report.modules, report.projected) == (6, len(chosen))
    assert report.mean_cosine == pytest.approx(sum(cosines.values()) / 6)
    for name, (a, b) in after.items():
        torch.testing.assert_close(b, expected[name], rtol=1e-6, atol=1e-9)
        assert torch.equal(a, before[name][0])
        if name not in chosen:
            assert torch.equal(b, before[name][1])
    kept = sum((b @ a).square().sum() for a, b in after.values()) / sum(
        (b @ a).square().sum() for a, b in before.values()
    )
    assert report.kept_norm == pytest.approx(float(kept) ** 0.5)
    counts = {"some": range(1, 6), "orthogonal-threshold": range(1, 6)}
    expected_count = {"two-lowest": 2, "more-than-there-are": 6, "all": 6, "none": 0, "orthogonal-number": 3}
    name = next(p.id for p in OPTIONS if p.values[0] is options)
    assert len(chosen) in counts.get(name, [expected_count.get(name)])


@pytest.mark.parametrize("form", ["adapter", "model"])
def test_a_run_is_sft_followed_by_the_formula(tmp_path, form):
    folder = aligned.adapter(tmp_path / "alignment")
    options = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.3}
    sft = build(tmp_path / "a", given={**NO_SAFETY, "model": aligned.merged(folder), "defense": "sft"}, **options)
    sft.train()
    before = tiny.model()
    run = build(
        tmp_path / "b",
        given={
            **NO_SAFETY, "model": aligned.merged(folder), "unaligned": folder if form == "adapter" else before,
            "defense": {"name": "safelora", "mode": "number", "number": 2},
        },
        **options,
    )  # fmt: skip
    run.train()
    pairs = pairs_of(sft.model)
    aligned_weights, old = aligned.merged(folder).state_dict(), before.state_dict()
    shifts = {name: aligned_weights[f"{name}.weight"] - old[f"{name}.weight"] for name in pairs}
    expected, _, chosen = literal(pairs, shifts, mode="number", number=2)
    after = pairs_of(run.model)
    assert sum(not torch.equal(after[name][1], pairs[name][1]) for name in pairs) == len(chosen) == 2
    for name, (a, b) in after.items():
        assert torch.equal(a, pairs[name][0])
        torch.testing.assert_close(b, expected[name], rtol=1e-4, atol=1e-6)


def test_threshold_minus_one_is_sft_bit_for_bit(tmp_path):
    folder = aligned.adapter(tmp_path / "alignment")
    sft = build(tmp_path / "a", given={**NO_SAFETY, "model": aligned.merged(folder), "defense": "sft"})
    sft.train()
    off = {"name": "safelora", **SafeLoRA.off}
    given = {**NO_SAFETY, "model": aligned.merged(folder), "unaligned": folder, "defense": off}
    run = build(tmp_path / "b", given=given)
    run.train()
    assert same(weights(sft), weights(run))


@pytest.mark.parametrize("projector", ["paper", "orthogonal"])
def test_a_mapped_update_lies_in_the_range_of_v(start, projector):
    model, folder = start
    shifts = alignment_shift(lora_layers(model, defense="test"), folder)
    outside = {}
    for threshold in (-1.0, 1.0):
        safe_lora(model, shifts, SafeLoRA.Config(mode="threshold", threshold=threshold, projector=projector))
        for name, (a, b) in pairs_of(model).items():
            q, _ = torch.linalg.qr(shifts[name].left.double())
            update = b @ a
            outside[threshold, name] = float((update - q @ (q.T @ update)).norm() / update.norm())
    assert all((ratio > 0.1) is (threshold < 0) for (threshold, _), ratio in outside.items())
    assert max(ratio for (threshold, _), ratio in outside.items() if threshold > 0) < 1e-6


@pytest.mark.parametrize("projector", ["paper", "orthogonal"])
def test_the_cosine_does_not_depend_on_the_size_of_v_or_b(start, projector):
    model, folder = start
    shifts = alignment_shift(lora_layers(model, defense="test"), folder)
    config = SafeLoRA.Config(mode="threshold", threshold=-1.0, projector=projector)
    first = [m.cosine for m in safe_lora(model, shifts, config).each]
    larger = {name: FactoredShift(100 * shift.left, shift.right) for name, shift in shifts.items()}
    assert [m.cosine for m in safe_lora(model, larger, config).each] == pytest.approx(first, abs=2e-5)
    for layer in lora_layers(model, defense="test"):
        layer.B.data *= 1e-4
    assert [m.cosine for m in safe_lora(model, shifts, config).each] == pytest.approx(first, abs=2e-5)
    assert 0 < min(first) < max(first) < 1


@pytest.mark.parametrize(
    ("projector", "settles"), [("paper", False), ("orthogonal", True)], ids=["paper", "orthogonal"]
)
def test_applying_it_twice(start, projector, settles):
    """C of the authors is no projector: a second application shrinks the update again."""
    model, folder = start
    shifts = alignment_shift(lora_layers(model, defense="test"), folder)
    config = SafeLoRA.Config(mode="threshold", threshold=1.0, projector=projector)
    safe_lora(model, shifts, config)
    once = copy.deepcopy(pairs_of(model))
    report = safe_lora(model, shifts, config)
    twice = pairs_of(model)
    for name in once:
        assert torch.allclose(once[name][1], twice[name][1], rtol=1e-5, atol=1e-7) is settles
    assert report.projected == 6
    assert (report.kept_norm == pytest.approx(1.0, abs=1e-6)) is settles
