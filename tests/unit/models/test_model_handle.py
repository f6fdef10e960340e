"""Loading: what is accepted, what is refused, and that a merged adapter is base + adapter."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_checkpoints import WORDS, tiny_llama, tiny_tokenizer

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError, UnsupportedError
from holdfast.models.fingerprint import model_fingerprint
from holdfast.models.handle import check_vocabulary, fast_dtype, load_model, load_pair, load_tokenizer

IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture
def adapter_dir(base_dir: Path, tmp_path: Path) -> Path:
    model = get_peft_model(load_model(base_dir), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    folder = tmp_path / "adapter"
    model.save_pretrained(folder)
    return folder


def test_folder_loads_with_its_weights_in_evaluation_mode(base_dir):
    model, tokenizer = load_pair(str(base_dir))
    assert model_fingerprint(model) == model_fingerprint(tiny_llama())
    assert not model.training
    assert tokenizer("w1 w2")["input_ids"] == [4, 5]


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_dtype(base_dir, dtype, expected):
    assert {p.dtype for p in load_model(base_dir, dtype=dtype).parameters()} == {expected}


@pytest.mark.parametrize(
    ("machine", "avx512_bf16", "onednn", "native"),
    [
        ("x86_64", True, True, True),
        ("AMD64", False, True, False),  # oneDNN emulates it with plain AVX-512
        ("aarch64", False, True, True),
        ("arm64", False, False, False),
    ],
)
def test_auto_is_what_is_stored_but_float32_on_a_cpu_without_bfloat16(
    base_dir, monkeypatch, machine, avx512_bf16, onednn, native
):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    small = tiny_llama(dtype=torch.bfloat16)
    small.save_pretrained(base_dir)
    for device in (None, "cpu"):
        loaded = load_model(base_dir, device=device)
        assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16 if native else torch.float32}
        assert all(torch.equal(p, q.to(p.dtype)) for p, q in zip(loaded.parameters(), small.parameters(), strict=True))
    assert fast_dtype(torch.device("cuda")) == "bfloat16"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert fast_dtype() == "bfloat16"
    assert {p.dtype for p in load_model(base_dir, dtype="bfloat16").parameters()} == {torch.bfloat16}


def test_fp16_is_refused_by_name_and_by_checkpoint(base_dir):
    with pytest.raises(UnsupportedError, match="float16") as refusal:
        load_model(base_dir, dtype="float16")
    assert "bfloat16" in refusal.value.remedy
    tiny_llama(dtype=torch.float16).save_pretrained(base_dir)
    with pytest.raises(UnsupportedError, match="fp16"):
        load_model(base_dir)
    load_model(base_dir, dtype="bfloat16")


@pytest.mark.parametrize("ref", ["./nowhere", "/no/such/folder", "a/b/c", "~/nowhere", ""])
def test_missing_folder(ref):
    with pytest.raises(ConfigError, match="no such folder") as refusal:
        load_model(ref)
    assert "hub id" in refusal.value.remedy


def test_file_instead_of_folder(base_dir):
    with pytest.raises(ConfigError, match="is a file"):
        load_model(base_dir / "config.json")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_unreachable_hub_id_is_one_line(load):
    with pytest.raises(ConfigError, match="no-such-owner/no-such-model") as refusal:
        load("no-such-owner/no-such-model")
    assert "\n" not in refusal.value.what
    assert len(refusal.value.what) < 300


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_no_route_to_the_hub_is_found_out_with_one_request(load, monkeypatch):
    """A download is only tried after the hub has answered: it would retry for a minute."""
    import huggingface_hub

    asked = []

    def no_route(*arguments, **settings):
        asked.append(settings["timeout"])
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_route)
    monkeypatch.setattr("socket.getaddrinfo", lambda *a, **k: pytest.fail("tried to download"))
    with pytest.raises(ConfigError, match="no-such-owner/no-such-model"):
        load("no-such-owner/no-such-model")
    assert asked == [5.0]


def test_model_the_hub_does_not_know(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def unknown(*arguments, **settings):
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unknown)
    with pytest.raises(ConfigError, match="no such model on the hub") as refusal:
        load_model("owner/nmae", revision="v2")
    assert "'v2'" in refusal.value.what


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_and_not_opened(base_dir, tmp_path, name):
    (base_dir / "model.safetensors").unlink()
    torch.save(Bomb(tmp_path / "exploded"), base_dir / name)
    with pytest.raises(UnsupportedError, match="safetensors"):
        load_model(base_dir)
    assert not (tmp_path / "exploded").exists()


def test_pickled_adapter_is_refused_and_not_opened(adapter_dir, tmp_path):
    (adapter_dir / "adapter_model.safetensors").unlink()
    torch.save(Bomb(tmp_path / "exploded"), adapter_dir / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="pickled"):
        load_model(adapter_dir)
    assert not (tmp_path / "exploded").exists()


def test_folder_without_weights(base_dir):
    (base_dir / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="no weights"):
        load_model(base_dir)


def test_missing_tensor_is_not_filled_with_random_numbers(base_dir):
    weights = load_file(base_dir / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, base_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights, first model\.layers\.1\.mlp\.up_proj"):
        load_model(base_dir)


def test_truncated_safetensors(base_dir):
    path = base_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(base_dir)


@pytest.mark.parametrize("revision", [None, "main", "12ab", "G" * 40])
def test_remote_code_needs_a_pinned_commit(revision):
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigError, match="pinned commit"):
            load("owner/name", revision=revision, trust_remote_code=True)


def test_folder_with_code_is_not_run_unless_trusted(base_dir, tmp_path):
    witness = tmp_path / "ran"
    (base_dir / "modeling_x.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
    config = json.loads((base_dir / "config.json").read_text())
    config["model_type"] = "not_a_known_type"
    config["auto_map"] = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    (base_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        load_model(base_dir)
    assert not witness.exists()


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_quantization_without_bitsandbytes(base_dir, monkeypatch, quantization):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="bitsandbytes") as refusal:
        load_model(base_dir, quantization=quantization)
    assert refusal.value.exit_code == 7


def test_unknown_quantization(base_dir):
    with pytest.raises(ConfigError, match="3bit"):
        load_model(base_dir, quantization="3bit")


def test_adapter_is_merged_into_its_base(adapter_dir, base_dir):
    merged = load_model(adapter_dir)
    assert not isinstance(merged, PeftModel)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    oracle = PeftModel.from_pretrained(tiny_llama(), adapter_dir).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, oracle(IDS).logits)
        assert not torch.allclose(merged(IDS).logits, load_model(base_dir)(IDS).logits)


def test_merged_model_takes_a_fresh_adapter_without_complaint(adapter_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*_checkpointing.* is deprecated")  # PEFT asks transformers by an old name
        fresh = get_peft_model(load_model(adapter_dir), LoraConfig(r=2, target_modules=["q_proj"]))
    assert list(fresh.peft_config) == ["default"]


def test_adapter_uses_the_tokenizer_of_its_base_or_its_own(adapter_dir):
    assert len(load_tokenizer(adapter_dir)) == len(WORDS)
    tiny_tokenizer(WORDS[:10]).save_pretrained(adapter_dir)
    assert len(load_tokenizer(adapter_dir)) == 10


def test_adapter_with_missing_weights(adapter_dir):
    weights = load_file(adapter_dir / "adapter_model.safetensors")
    weights.popitem()
    save_file(weights, adapter_dir / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="missing adapter keys"):
        load_model(adapter_dir)


def test_adapter_of_another_shape(adapter_dir, base_dir):
    weights = load_file(adapter_dir / "adapter_model.safetensors")
    save_file(
        {k: torch.zeros(v.shape[0] + 1, v.shape[1]) for k, v in weights.items()},
        adapter_dir / "adapter_model.safetensors",
    )
    with pytest.raises(CheckpointError, match="does not fit"):
        load_model(adapter_dir)


def test_adapter_without_a_base(adapter_dir):
    path = adapter_dir / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="base_model_name_or_path"):
        load_model(adapter_dir)


def test_adapter_whose_base_is_gone(adapter_dir, base_dir):
    shutil.rmtree(base_dir)
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(adapter_dir)


def test_adapter_on_a_quantised_base_is_refused(adapter_dir):
    with pytest.raises(UnsupportedError, match="merge"):
        load_model(adapter_dir, quantization="4bit")


def test_tokenizer_larger_than_the_embeddings(base_dir):
    tiny_tokenizer([*WORDS, "one-too-many"]).save_pretrained(base_dir)
    with pytest.raises(ConfigError, match="ids up to 32, the model 32 embeddings"):
        load_pair(base_dir)


def test_smaller_tokenizer_is_fine():
    check_vocabulary(tiny_llama(), tiny_tokenizer(WORDS[:10]))


def test_missing_pad_token_becomes_the_end_token(base_dir):
    tiny_tokenizer(pad=None).save_pretrained(base_dir)
    assert load_tokenizer(base_dir).pad_token == "<eos>"
