"""AsFT and SafeLoRA around their formulas: settings, refusals, what is logged and written, resuming, dtypes."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tests import aligned, tiny
from tests.aligned import on, run_file
from tests.unit.trainers.building import build, same, weights

from holdfast.core.errors import CheckpointError, ConfigError, NumericalError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.models.alignment_shift import FactoredShift, alignment_shift
from holdfast.models.lora_layers import lora_layers
from holdfast.runs.config.resolve import resolve
from holdfast.runs.pipeline import unaligned_of  # type: ignore[attr-defined]
from holdfast.training.hooks import make_defense
from holdfast_lab.defenses.asft import AsFT
from holdfast_lab.defenses.safelora import SafeLoRA, safe_lora

BOTH = ["asft", "safelora"]
NO_SAFETY = {"safety_dataset": None, "constraint": None}


@pytest.fixture
def alignment(tmp_path):
    return aligned.adapter(tmp_path / "alignment")


def run(folder, defense, alignment, *, given=None, **options):
    chosen = {**NO_SAFETY, "model": aligned.merged(alignment), "unaligned": alignment, "defense": defense}
    return build(folder, given={**chosen, **(given or {})}, **options)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "options", "what"),
    [
        pytest.param(AsFT, {"lam": -1.0}, "lam is -1.0", id="asft-lam"),
        pytest.param(AsFT, {"lam": float("nan")}, "lam is nan", id="asft-nan"),
        pytest.param(AsFT, {"projector": "oblique"}, "projector is 'oblique'", id="asft-projector"),
        pytest.param(AsFT, {"rank": 4}, "rank is 4 with projector paper", id="asft-rank"),
        pytest.param(SafeLoRA, {"mode": "all"}, "mode is 'all'", id="safelora-mode"),
        pytest.param(SafeLoRA, {"threshold": 1.5}, "threshold is 1.5", id="safelora-threshold"),
        pytest.param(SafeLoRA, {"number": 0}, "number is 0", id="safelora-number"),
        pytest.param(SafeLoRA, {"projector": "orthogonal", "rank": 0}, "rank is 0", id="safelora-rank"),
    ],
)
def test_settings_out_of_range(cls, options, what):
    with pytest.raises(ConfigError) as caught:
        cls.Config(**options)
    assert what in caught.value.what
    assert cls.name in caught.value.what


def test_presets_of_the_paper_and_defaults_of_the_authors():
    assert make_defense({"name": "safelora", "preset": "paper"}).config == SafeLoRA.Config(
        mode="threshold", threshold=0.5
    )
    assert SafeLoRA.Config() == SafeLoRA.Config(mode="number", number=10, threshold=0.5, projector="paper")
    assert make_defense({"name": "asft", "preset": "paper"}).config == AsFT.Config() == AsFT.Config(lam=1.0)


# -- refusals ----------------------------------------------------------------------------------------------------------


def trained_adapter(folder):
    model = get_peft_model(tiny.model(), tiny.lora())
    lora_layers(model, defense="x")[0].B.data += 0.1
    return {"model": model, "peft_config": None}


REFUSED = {
    "trained adapter": (trained_adapter, "already trained"),
    "no adapter": (lambda _: {"peft_config": None}, "no adapter"),
    "dora": (lambda _: {"peft_config": LoraConfig(target_modules=["q_proj"], use_dora=True)}, "DoRA"),
    "same model": (lambda _: {"model": tiny.model(), "unaligned": tiny.model()}, "nothing to anchor to"),
    "other modules": (lambda _: {"peft_config": LoraConfig(target_modules=["o_proj"])}, "nothing to anchor to"),
    "not said": (lambda _: {"unaligned": None}, "needs the weights before alignment"),
}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(tmp_path, alignment, name, case):
    make, what = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, name, alignment, given=make(tmp_path))
    assert what in caught.value.what


def test_asft_refuses_trainable_weights_in_bfloat16(alignment):
    from types import SimpleNamespace

    model = get_peft_model(aligned.merged(alignment).bfloat16(), tiny.lora(), autocast_adapter_dtype=False)
    with pytest.raises(UnsupportedError, match="in bfloat16"):
        AsFT().validate(SimpleNamespace(model=model, data=SimpleNamespace(unaligned=alignment)))


# -- AsFT --------------------------------------------------------------------------------------------------------------


def test_the_log_has_the_penalty_at_the_steps_own_weights(tmp_path, alignment):
    trainer = run(tmp_path, {"name": "asft", "lam": 2.0}, alignment, max_steps=3)
    seen = []
    inner = trainer.defense.on_gradient

    def recorded(trained):
        seen.append([(b.detach().clone(), a.detach().clone()) for a, b in pairs(trained)])
        inner(trained)

    trainer.defense.on_gradient = recorded
    shifts = alignment_shift(lora_layers(trainer.model, defense="x"), alignment)
    trainer.train()
    rows = read(trainer.run_dir / "events.jsonl")
    assert (rows[0]["penalty"], rows[0]["penalty_share"]) == (0.0, None)
    for row, step in zip(rows[1:], seen[1:], strict=True):
        outside = plain = 0.0
        for (b, a), shift in zip(step, shifts.values(), strict=True):
            v = shift.left @ shift.right
            outside += float((b @ a - v @ (v.T @ b @ a) / v.norm()).square().sum())
            plain += float((b @ a).square().sum())
        assert row["penalty"] == pytest.approx(outside, rel=1e-4)
        assert row["penalty_share"] == pytest.approx(outside / plain, rel=1e-4)
        assert 0 < row["penalty_share"] < 1


def pairs(trainer):
    return [(layer.A, layer.B) for layer in lora_layers(trainer.model, defense="x")]


def test_a_strong_penalty_keeps_the_update_small_and_orthogonal_lets_it_grow(tmp_path, alignment):
    size = {}
    for name, options in {
        "none": {"lam": 0.0},
        "paper": {"lam": 300.0},
        "orthogonal": {"lam": 300.0, "projector": "orthogonal"},
    }.items():
        trainer = run(tmp_path / name, {"name": "asft", **options}, alignment, max_steps=8, learning_rate=1e-2)
        trainer.train()
        size[name] = sum(float((b @ a).detach().square().sum()) for a, b in pairs(trainer))
    assert size["paper"] < size["orthogonal"] < size["none"]
    assert size["paper"] < 0.5 * size["none"]


@pytest.mark.parametrize("name", BOTH)
def test_resuming_is_exact_and_refuses_another_shift(tmp_path, alignment, name):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    defense = {"name": name, **({"lam": 3.0} if name == "asft" else {"mode": "threshold", "threshold": 1.0})}
    on(alignment, "/no/longer/here")  # the factors are all that is read of it
    whole = run(tmp_path / "a", defense, alignment, **options)
    whole.train()
    again = run(tmp_path / "a", defense, alignment, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "run" / "checkpoint-2"))
    assert same(weights(whole), weights(again))
    other = aligned.adapter(tmp_path / "other", scale=0.5)
    wrong = run(tmp_path / "a", defense, alignment, given={"unaligned": other}, **options)
    with pytest.raises(CheckpointError, match="belongs to another run: unaligned"):
        wrong.train(resume_from_checkpoint=str(tmp_path / "a" / "run" / "checkpoint-2"))


def test_bfloat16_base_autocast_and_checkpointing(tmp_path, alignment):
    """The factors stay float32, and so does the penalty."""
    model = aligned.merged(alignment).bfloat16()
    options = {"bf16": True, "gradient_checkpointing": True}
    trainer = run(tmp_path, {"name": "asft", "lam": 50.0}, alignment, given={"model": model}, **options)
    trainer.train()
    assert {w.dtype for w in weights(trainer).values()} == {torch.float32}
    assert all(group.c.matrix.dtype == torch.float32 for group in trainer.defense._groups)
    assert read(trainer.run_dir / "events.jsonl")[-1]["penalty"] > 0


# -- which V a run file means ------------------------------------------------------------------------------------------


def test_an_alignment_adapter_that_is_not_in_the_model_is_refused(tmp_path):
    base, adapter = str(tmp_path / "base"), str(tmp_path / "alignment")
    config = run_file(tmp_path, model=base, unaligned=adapter)
    with pytest.raises(ConfigError, match="is not part of the model"):
        unaligned_of(resolve(config, elsewhere=True), trust_remote_code=False)
    merged_by_hand = run_file(tmp_path, model=str(tiny.saved(tmp_path / "merged")), unaligned=adapter)
    assert unaligned_of(resolve(merged_by_hand, elsewhere=True), trust_remote_code=False) == adapter
    on(tmp_path / "alignment", "/no/longer/here")  # trained where the base lay elsewhere
    assert unaligned_of(resolve(merged_by_hand, elsewhere=True), trust_remote_code=False) == adapter


def test_of_an_adapter_on_an_adapter_the_last_one_is_taken_and_said(tmp_path, caplog):
    config = run_file(tmp_path)
    assert unaligned_of(resolve(config, elsewhere=True), trust_remote_code=False) == config.model
    assert "an adapter on the adapter" not in caplog.text
    task = on(aligned.adapter(tmp_path / "task", seed=3), tmp_path / "alignment")
    config = run_file(tmp_path, model=str(task))
    assert unaligned_of(resolve(config, elsewhere=True), trust_remote_code=False) == str(task)
    assert "an adapter on the adapter" in caplog.text


# -- SafeLoRA ----------------------------------------------------------------------------------------------------------


def test_the_report_is_written_and_the_saved_adapter_is_the_mapped_one(tmp_path, alignment):
    trainer = run(tmp_path, {"name": "safelora", "mode": "number", "number": 4}, alignment)
    before = {}
    inner = trainer.defense.transform
    trainer.defense.transform = lambda r: (before.update(weights(r)), inner(r))
    trainer.train()
    stored = json.loads((trainer.run_dir / "safelora.json").read_text())
    report = trainer.defense.report
    assert (stored["modules"], stored["projected"]) == (6, 4) == (report.modules, report.projected)
    assert stored["kept_norm"] == report.kept_norm < 1
    assert [m["projected"] for m in stored["each"]] == [m.projected for m in report.each]
    trainer.save_model(str(tmp_path / "adapter"))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    after = weights(trainer)
    assert sum(not torch.equal(after[name], before[name]) for name in after) == 4
    for name, weight in after.items():
        assert torch.equal(saved[name.replace(".default", "")], weight)


def posthoc(alignment, *, dtype=torch.float32, **lora):
    settings = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(aligned.merged(alignment).to(dtype), LoraConfig(**{**settings, **lora}))
    layers = lora_layers(model, defense="x")
    draw = torch.Generator().manual_seed(2)
    for layer in layers:
        layer.B.data.copy_(torch.randn(layer.B.shape, generator=draw))
    return model, layers, alignment_shift(layers, alignment)


def test_ties_go_by_name_and_exactly_n_modules_change(alignment):
    model, layers, shifts = posthoc(alignment)
    for layer in layers:
        layer.B.data.zero_()  # every cosine is 0
    report = safe_lora(model, shifts, SafeLoRA.Config(number=2))
    assert [m.name for m in report.each if m.projected] == sorted(shifts)[:2]
    assert {m.cosine for m in report.each} == {0.0}
    assert report.kept_norm == 1.0


def test_a_module_with_as_many_outputs_as_ranks(alignment):
    """k_proj: B is square; the change is in B."""
    model, layers, shifts = posthoc(alignment, r=16, target_modules=["k_proj"])
    before = [(layer.A.detach().clone(), layer.B.detach().clone()) for layer in layers]
    report = safe_lora(model, shifts, SafeLoRA.Config(mode="threshold", threshold=1.0))
    assert report.projected == 2
    for layer, (a, b) in zip(layers, before, strict=True):
        assert torch.equal(layer.A, a)
        v = shifts[layer.name].left @ shifts[layer.name].right
        torch.testing.assert_close(layer.B.detach(), v @ (v.T @ b) / v.norm(), rtol=1e-4, atol=1e-6)


def test_where_alignment_changed_nothing_the_update_goes(alignment):
    model, layers, shifts = posthoc(alignment)
    name = layers[0].name
    d_out, d_in = layers[0].base_weight.shape
    shifts[name] = FactoredShift(torch.zeros(d_out, 0), torch.zeros(0, d_in))
    report = safe_lora(model, shifts, SafeLoRA.Config(mode="threshold", threshold=0.0))
    assert [(m.name, m.cosine, m.kept_norm) for m in report.each if m.projected] == [(name, 0.0, 0.0)]
    assert not layers[0].B.any()
    assert layers[1].B.any()


def test_scalings_weigh_the_kept_norm(alignment):
    """One module of two is mapped to zero; with its scaling at half the other's it held a fifth of the squared norm."""
    model, layers, shifts = posthoc(
        alignment, target_modules=["v_proj"], alpha_pattern={"layers.0.self_attn.v_proj": 4}
    )
    assert [layer.scaling for layer in layers] == [1.0, 2.0]
    for layer in layers:
        layer.A.data.copy_(layers[0].A)
        layer.B.data.copy_(layers[0].B)
    d_out, d_in = layers[0].base_weight.shape
    shifts[layers[0].name] = FactoredShift(torch.zeros(d_out, 0), torch.zeros(0, d_in))
    report = safe_lora(model, shifts, SafeLoRA.Config(mode="threshold", threshold=0.0))
    assert report.kept_norm == pytest.approx(0.8**0.5)


def test_adapters_in_bfloat16_are_mapped_in_float32(alignment):
    model, layers, shifts = posthoc(alignment, dtype=torch.bfloat16)
    for layer in layers:
        layer.B.data = layer.B.data.bfloat16()
    before = [layer.B.detach().clone() for layer in layers]
    safe_lora(model, shifts, SafeLoRA.Config(mode="threshold", threshold=1.0))
    for layer, b in zip(layers, before, strict=True):
        v = shifts[layer.name].left @ shifts[layer.name].right
        expected = (v @ (v.T @ b.float()) / v.norm()).bfloat16()
        torch.testing.assert_close(layer.B.detach(), expected, rtol=1e-2, atol=1e-5)


def test_an_update_that_is_not_finite_is_refused_by_name(alignment):
    model, layers, shifts = posthoc(alignment)
    layers[3].B.data[0, 0] = float("inf")
    with pytest.raises(NumericalError, match="is not finite") as caught:
        safe_lora(model, shifts)
    assert layers[3].name in caught.value.what
