"""V read from an adapter, a folder or a model object: the same numbers, only the needed tensors, refusals by name."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests import aligned, hybrid, tiny
from transformers import Qwen2Config, Qwen2ForCausalLM

from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.models import alignment_shift as module
from holdfast.models.alignment_shift import DenseShift, FactoredShift, alignment_shift
from holdfast.models.lora_layers import lora_layers
from holdfast_lab.building_blocks.alignment_projector import Projector, projectors


def layers_of(model, config=None):
    return lora_layers(get_peft_model(model, config or tiny.lora()), defense="test")


def matrix(shift) -> torch.Tensor:
    return shift.left @ shift.right if isinstance(shift, FactoredShift) else shift.matrix()


def expected(after, before) -> dict[str, torch.Tensor]:
    new, old = after.state_dict(), before.state_dict()
    return {name.removesuffix(".weight"): new[name].float() - old[name].float() for name in new}


# -- an adapter --------------------------------------------------------------------------------------------------------

SCALINGS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"alpha_pattern": {"layers.1.self_attn.q_proj": 1}, "rank_pattern": {"v_proj": 5}},
    "wide": {"r": 40},
}


@pytest.mark.parametrize("case", SCALINGS)
def test_an_adapters_factors_are_the_difference_it_made(tmp_path, case):
    folder = aligned.adapter(tmp_path, **SCALINGS[case])
    differences = expected(aligned.merged(folder), tiny.model())
    shifts = alignment_shift(layers_of(aligned.merged(folder)), str(folder))
    assert len(shifts) == 6
    for name, shift in shifts.items():
        assert isinstance(shift, FactoredShift)
        assert float(differences[name].norm()) > 0.1
        torch.testing.assert_close(matrix(shift), differences[name], rtol=1e-4, atol=1e-6)


def test_hybrid_attention_by_name(tmp_path):
    folder = aligned.adapter(tmp_path, hybrid.model(linear=3), target_modules=hybrid.ADAPTED)
    differences = expected(aligned.merged(folder, hybrid.model(linear=3)), hybrid.model(linear=3))
    shifts = alignment_shift(layers_of(aligned.merged(folder, hybrid.model(linear=3)), hybrid.lora()), folder)
    assert len(shifts) == 6
    for name, shift in shifts.items():
        torch.testing.assert_close(matrix(shift), differences[name], rtol=1e-4, atol=1e-6)


def test_modules_that_alignment_left_alone_have_no_shift_and_are_counted(tmp_path, caplog):
    folder = aligned.adapter(tmp_path, target_modules=["q_proj", "o_proj"])
    layers = layers_of(aligned.merged(folder))
    shifts = alignment_shift(layers, folder)
    assert {name for name, shift in shifts.items() if not shift.left.numel()} == {
        layer.name for layer in layers if not layer.name.endswith("q_proj")
    }
    with caplog.at_level(logging.WARNING):
        found = projectors(layers, shifts, "paper")
    assert "did not change 4 of 6 adapted modules, the first model.layers.0.self_attn.k_proj" in caplog.text
    for layer in layers:
        mapped = found[layer.name].apply(torch.ones(layer.B.shape))
        assert bool(mapped.any()) is layer.name.endswith("q_proj")


@pytest.mark.parametrize("kind", ["paper", "orthogonal"])
@pytest.mark.parametrize("form", ["other modules", "zero adapter", "same model"])
def test_nothing_to_anchor_to(tmp_path, form, kind):
    if form == "other modules":
        layers, before = layers_of(tiny.model()), aligned.adapter(tmp_path, target_modules=["o_proj"])
    elif form == "zero adapter":
        layers, before = layers_of(tiny.model()), aligned.adapter(tmp_path, scale=0.0)
    else:
        layers, before = layers_of(tiny.model()), tiny.model()
    with pytest.raises(UnsupportedError, match="nothing to anchor to"):
        projectors(layers, alignment_shift(layers, before), kind)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        pytest.param({"use_dora": True}, "DoRA", id="dora"),
        pytest.param({"init_lora_weights": "pissa"}, "changes the base", id="pissa"),
        pytest.param({"modules_to_save": ["lm_head"]}, "modules_to_save", id="in-full"),
    ],
)
def test_an_alignment_adapter_that_is_more_than_lora_is_refused(tmp_path, options, what):
    folder = aligned.adapter(tmp_path, **options)
    with pytest.raises(UnsupportedError, match=what) as caught:
        alignment_shift(layers_of(tiny.model()), folder)
    assert "give the model before alignment" in caught.value.remedy


def test_an_adapter_with_half_a_module_or_of_other_width_is_refused(tmp_path):
    folder = aligned.adapter(tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    first = next(name for name in tensors if ".lora_A." in name)
    save_file({name: t for name, t in tensors.items() if name != first}, path)
    with pytest.raises(CheckpointError, match="one of LoRA's two factors"):
        alignment_shift(layers_of(tiny.model()), folder)
    save_file({**tensors, first: tensors[first][:, :7].contiguous()}, path)
    with pytest.raises(ConfigError, match=r"the aligned weight is \(\d+, 32\), before alignment .* \(\d+, 7\)"):
        alignment_shift(layers_of(tiny.model()), folder)


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path):
    """Modules of an aligned model, and the model before alignment in a folder."""
    after, before = tiny.model(seed=1), tiny.model()
    before.save_pretrained(tmp_path / "before")
    differences = expected(after, before)
    return layers_of(after), tmp_path / "before", differences


def check(shifts, differences) -> None:
    assert len(shifts) == 6
    for name, shift in shifts.items():
        assert isinstance(shift, DenseShift)
        assert shift.matrix().dtype == torch.float32
        assert torch.equal(shift.matrix(), differences[name])


def refuse_loading(monkeypatch) -> None:
    monkeypatch.setattr(module, "load_model", lambda *_: pytest.fail("the whole model was loaded"))


def test_a_folder_is_read_tensor_by_tensor(pair, monkeypatch):
    layers, folder, differences = pair
    refuse_loading(monkeypatch)
    shifts = alignment_shift(layers, folder)
    check(shifts, differences)
    assert all(isinstance(shift.unaligned, module._Stored) for shift in shifts.values())


def test_of_a_sharded_folder_only_the_needed_files_are_opened(pair, monkeypatch):
    layers, folder, differences = pair
    refuse_loading(monkeypatch)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: "a.safetensors" if "layers.0.self" in name else "b.safetensors" for name in tensors}
    places |= {name: "never.safetensors" for name in tensors if "mlp" in name or "embed" in name}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: t for name, t in tensors.items() if places[name] == file}, folder / file)
    (folder / module.INDEX).write_text(json.dumps({"weight_map": places}))  # type: ignore[attr-defined]
    check(alignment_shift(layers, folder), differences)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks its file b\.safetensors"):
        alignment_shift(layers, folder)


def test_of_a_hub_model_only_the_needed_files_are_fetched(pair, monkeypatch):
    layers, folder, differences = pair
    refuse_loading(monkeypatch)
    asked = []

    def download(place, name, revision=None):
        from huggingface_hub.errors import EntryNotFoundError

        asked.append((place, name))
        if not (folder / name).is_file():
            raise EntryNotFoundError("404")
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(module, "resolve", lambda *_, **__: module.Source("owner/name"))  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "adapter_folder", lambda _: None)
    check(alignment_shift(layers, "owner/name"), differences)
    assert {name for _, name in asked} == {"config.json", module.INDEX, "model.safetensors"}  # type: ignore[attr-defined]


def test_a_folder_with_other_tensor_names_is_loaded_and_dropped(tmp_path, monkeypatch):
    """Saved from the backbone, without the prefix `model.`; transformers puts it back."""
    before, after = tied(0), tied(1)
    before.model.save_pretrained(tmp_path)
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "model.safetensors")
    loaded, inner = [], module.load_model  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "load_model", lambda ref: loaded.append(ref) or inner(ref))
    differences = expected(after, before)
    check(alignment_shift(layers_of(after), tmp_path), differences)
    assert loaded == [tmp_path]


def tied(seed: int):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def test_biases_beside_the_weights_take_no_part(tmp_path, monkeypatch):
    after, before = tied(1), tied(0)
    with torch.no_grad():
        for name, p in after.named_parameters():
            if name.endswith("_proj.bias"):
                p.fill_(7.0)
    before.save_pretrained(tmp_path)
    refuse_loading(monkeypatch)
    differences = expected(after, before)
    layers = layers_of(after)
    for given in (tmp_path, before):
        check(alignment_shift(layers, given), differences)


def test_a_model_object_and_weights_in_bfloat16(pair):
    layers, _, differences = pair
    check(alignment_shift(layers, tiny.model()), differences)
    half = alignment_shift(layers, tiny.model(dtype=torch.bfloat16))
    for name, shift in half.items():
        weight = dict(tiny.model().named_parameters())[f"{name}.weight"].detach()
        torch.testing.assert_close(
            shift.matrix(), differences[name] + weight - weight.bfloat16().float(), rtol=1e-5, atol=1e-7
        )


def int8_model():
    model = tiny.model()
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return model


REFUSED = {
    "fewer layers": (lambda: tiny.model(layers=1), ConfigError, "lacks 3 of 6 modules, first model.layers.1.self_attn"),
    "other architecture": (hybrid.model, ConfigError, "lacks"),
    "packed": (int8_model, UnsupportedError, "is quantised"),
    "with adapter": (lambda: get_peft_model(tiny.model(), tiny.lora()), UnsupportedError, "has an adapter"),
    "number": (lambda: 3, ConfigError, "unaligned is a int"),
    "missing folder": (lambda: "/does/not/exist", ConfigError, "no such folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(pair, case):
    make, error, what = REFUSED[case]
    with pytest.raises(error) as caught:
        alignment_shift(pair[0], make())
    assert what in caught.value.what


def test_another_shape_in_a_folder_is_refused_before_it_is_read(pair, monkeypatch):
    layers, folder, _ = pair
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 32)
    save_file(tensors, path)
    monkeypatch.setattr(module._Stored, "__call__", lambda _: pytest.fail("read"))
    with pytest.raises(ConfigError, match=r"k_proj: the aligned weight is \(16, 32\).*\(8, 32\)"):
        alignment_shift(layers, folder)


@pytest.mark.parametrize("form", ["config", "dtype"])
def test_packed_folders_are_refused(pair, form):
    layers, folder, _ = pair
    if form == "config":
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    else:
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.0.self_attn.k_proj.weight"
        save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match="is quantised"):
        alignment_shift(layers, folder)


# -- C -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["q_proj", "down_proj", "up_proj"], ids=["square", "wide", "tall"])
@pytest.mark.parametrize("kind", ["paper", "orthogonal"])
def test_c_of_a_dense_shift(target, kind):
    config = LoraConfig(r=2, target_modules=[target], task_type="CAUSAL_LM")
    layer = layers_of(tiny.model(seed=1), config)[0]
    v = alignment_shift([layer], tiny.model())[layer.name].matrix().double()
    rank = 5 if kind == "orthogonal" else None
    c = projectors([layer], alignment_shift([layer], tiny.model()), kind, rank)[layer.name]
    u, _, _ = torch.linalg.svd(v)
    expected_c = v @ v.T / v.norm() if kind == "paper" else u[:, :5] @ u[:, :5].T
    found = c.apply(torch.eye(len(v)))
    torch.testing.assert_close(found.double(), expected_c, rtol=1e-4, atol=1e-5)
    assert found.dtype == torch.float32
    assert c.matrix.numel() <= len(v) * min(v.shape)


def test_rank_of_the_orthogonal_projector(tmp_path):
    """The adapter's own, fewer on request, and never the rounding of a V of lower rank."""
    folder = aligned.adapter(tmp_path)
    layers = layers_of(aligned.merged(folder))
    shifts = alignment_shift(layers, folder)

    def columns(given, **options) -> set[int]:
        return {c.matrix.shape[1] for c in projectors(layers, given, "orthogonal", **options).values()}

    assert columns(shifts) == {3}
    assert columns(shifts, rank=2) == {2}
    assert columns(shifts, rank=9) == {3}
    doubled = {
        n: FactoredShift(torch.cat([s.left, s.left], 1), torch.cat([s.right, s.right])) for n, s in shifts.items()
    }
    assert columns(doubled) == {3}


def test_c_acts_on_stacks():
    draw = torch.Generator().manual_seed(0)
    factors, x = torch.randn(3, 6, 2, generator=draw), torch.randn(3, 6, 4, generator=draw)
    for i in range(3):
        torch.testing.assert_close(Projector(factors).apply(x)[i], factors[i] @ factors[i].T @ x[i])
        torch.testing.assert_close(
            Projector(factors @ factors.mT, square=True).apply(x)[i], factors[i] @ factors[i].T @ x[i]
        )


def test_weights_that_are_not_finite_are_refused(pair):
    layers, folder, _ = pair
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_proj is not finite"):
        projectors(layers, alignment_shift(layers, folder), "paper")
