"""The content of a model: every byte that decides what it computes is bound, nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.overwriting import overwrite
from tiny_checkpoints import tiny_llama, tiny_tokenizer

from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.core.hashing import sha256_file, sha256_lines
from holdfast.models import content as content_module
from holdfast.models.content import content_of, forget_hashes, require_unchanged
from holdfast.models.source import Source

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def adapter_dir(tmp_path: Path, base_dir: Path) -> Path:
    folder = tmp_path / "adapter"
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    model.save_pretrained(folder, save_embedding_layers=False)
    edit_config(folder, base_model_name_or_path=str(base_dir))
    return folder


def edit_config(adapter: Path, **values: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2, sort_keys=True), encoding="utf-8")


def flipped(path: Path, position: int) -> bytes:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    return bytes(data)


def test_one_hash_for_all_files(base_dir):
    content = content_of(base_dir)
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= set(content.files)
    assert content.ref == str(base_dir)
    for name, digest in content.files.items():
        assert digest == sha256_file(base_dir / name)
    assert content.sha256 == sha256_lines(f"{name} {content.files[name]}" for name in sorted(content.files))


def test_what_computes_nothing_does_not_count(base_dir):
    before = content_of(base_dir).sha256
    for name in ("README.md", "trainer_state.json", "training_args.bin", "optimizer.pt", "modeling_x.py", "all.json"):
        (base_dir / name).write_text("{}", encoding="utf-8")
    assert content_of(base_dir).sha256 == before
    assert content_of(base_dir, trust_remote_code=True).sha256 != before, "with trust its code runs, so it counts"


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool.jinja", "added_tokens.json"])
def test_a_file_added_counts(base_dir, name):
    before = content_of(base_dir).sha256
    (base_dir / name).parent.mkdir(exist_ok=True)
    (base_dir / name).write_text(TEMPLATE, encoding="utf-8")
    assert content_of(base_dir).sha256 != before


def test_any_changed_byte_changes_the_hash(base_dir):
    """Every byte of the shortest files, a sample of the others."""
    (base_dir / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    original = content_of(base_dir)
    for name in original.files:
        path = base_dir / name
        data = path.read_bytes()
        seen = set()
        steps = 1 if len(data) < 200 else max(1, len(data) // 40)
        refused = 0
        for position in range(0, len(data), steps):
            overwrite(path, flipped(path, position))
            try:
                seen.add(content_of(base_dir).sha256)
            except CheckpointError:  # no longer JSON
                refused += 1
            overwrite(path, data)
        assert original.sha256 not in seen
        assert len(seen) + refused == len(range(0, len(data), steps)), "two different changes gave one hash"


def test_an_adapter_includes_its_base(adapter_dir, base_dir):
    content = content_of(adapter_dir)
    assert content.files["adapter_model.safetensors"] == sha256_file(adapter_dir / "adapter_model.safetensors")
    below = {f"base/{name}": digest for name, digest in content_of(base_dir).files.items()}
    assert below.items() <= content.files.items()
    (base_dir / "model.safetensors").write_bytes(flipped(base_dir / "model.safetensors", 5000))
    assert content_of(adapter_dir).sha256 != content.sha256


def test_moving_the_base_changes_nothing(adapter_dir, base_dir, tmp_path):
    before = content_of(adapter_dir).sha256
    moved = tmp_path / "elsewhere" / 'a "quoted" name'
    shutil.copytree(base_dir, moved)
    shutil.rmtree(base_dir)
    with pytest.raises(ConfigError, match="there is no such folder"):
        content_of(adapter_dir)
    assert content_of(adapter_dir, base=moved).sha256 == before
    edit_config(adapter_dir, base_model_name_or_path=str(moved))
    assert content_of(adapter_dir).sha256 == before


def test_any_other_byte_of_the_adapter_config_counts(adapter_dir, base_dir):
    """Each byte outside the two values that say where the base is; whitespace too."""
    path = adapter_dir / "adapter_config.json"
    text = path.read_bytes()
    before = content_of(adapter_dir, base=base_dir).files["adapter_config.json"]
    value = text.index(str(base_dir).encode())
    where = set(range(value, value + len(str(base_dir))))
    for position in set(range(0, len(text), 3)) - where:
        changed = bytearray(text)
        changed[position] ^= 1
        overwrite(path, bytes(changed))
        try:
            found = content_of(adapter_dir, base=base_dir).files["adapter_config.json"]
        except CheckpointError:  # no longer JSON
            continue
        null = text.index(b'"revision": null') + len('"revision": ')
        assert found != before or null <= position < null + 4, position
    path.write_bytes(text)
    assert content_of(adapter_dir, base=base_dir).files["adapter_config.json"] == before


def test_a_second_key_cannot_hide(adapter_dir, base_dir):
    """A key written twice is hashed as it stands: otherwise text could be smuggled in under that name."""
    path = adapter_dir / "adapter_config.json"
    before = content_of(adapter_dir).files["adapter_config.json"]
    twice = path.read_text().replace("{", '{"base_model_name_or_path": "x",', 1)
    path.write_text(twice, encoding="utf-8")
    assert content_of(adapter_dir, base=base_dir).files["adapter_config.json"] != before


def test_shards_and_their_index_count(tmp_path):
    folder = tmp_path / "sharded"
    tiny_llama().save_pretrained(folder, max_shard_size="4KB")
    tiny_tokenizer().save_pretrained(folder)
    content = content_of(folder)
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert {"model.safetensors.index.json", *shards} <= set(content.files)
    (folder / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"the shard {shards[1]} is missing"):
        content_of(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="it names no shards"):
        content_of(folder)


def test_a_folder_without_weights_is_refused(tmp_path, base_dir):
    (base_dir / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="holds no weights"):
        content_of(base_dir)
    (base_dir / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="holds no weights"):
        content_of(base_dir)
    with pytest.raises(ConfigError):
        content_of(tmp_path / "absent")


def test_the_embedded_model_has_content(embedded):
    content = content_of("embedded")
    assert content.ref == "embedded"
    assert content.files["model.safetensors"] == sha256_file(embedded / "model.safetensors")
    assert content.sha256 == content_of(embedded).sha256


def test_a_large_file_is_read_once_until_it_changes(base_dir, adapter_dir, monkeypatch):
    weights, read = base_dir / "model.safetensors", []
    monkeypatch.setattr(content_module, "LARGE", weights.stat().st_size)
    monkeypatch.setattr(content_module, "sha256_file", lambda path: read.append(path.name) or sha256_file(path))
    first, below = content_of(base_dir), content_of(adapter_dir)
    assert read.count(weights.name) == 1
    assert below.files["base/model.safetensors"] == first.files["model.safetensors"] == sha256_file(weights)
    weights.write_bytes(flipped(weights, -1))
    assert content_of(base_dir).files["model.safetensors"] == sha256_file(weights)
    assert read.count(weights.name) == 2
    forget_hashes()
    content_of(base_dir)
    assert read.count(weights.name) == 3


def test_of_weights_that_a_repository_holds_twice_one_copy_is_downloaded(base_dir, monkeypatch):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **named: asked.update(named) or str(base_dir))
    monkeypatch.setattr("holdfast.models.adapter.resolve", lambda *_: Source("org/model"))
    monkeypatch.setattr("holdfast.models.adapter.adapter_folder", lambda _: None)
    content_of("org/model")
    names = ["model-00001-of-00002.safetensors", "consolidated.safetensors", "original/model.safetensors", "x.bin"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(names, **patterns)) == names[:1]  # type: ignore[attr-defined]


def test_a_hub_id_is_looked_up_before_any_other_library_was_imported(tmp_path):
    """The hub's client loads its parts when they are asked for: nothing else may have to do it for us."""
    code = (
        "from holdfast.core.errors import ConfigError\n"
        "from holdfast.models.content import content_of\n"
        "try: content_of('owner/name')\n"
        "except ConfigError as error: print(error.what)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "model 'owner/name' is not in the local hub cache, and the hub is out of reach or off\n", (
        done.stderr
    )


# -- what loading opens ------------------------------------------------------------------------------------------------


def test_every_vocabulary_of_transformers_counts(base_dir):
    """The names are read from the library's own source: a new class with a new name fails here."""
    import re

    import transformers

    package = Path(transformers.__file__).parent
    table = re.compile(r"VOCAB_FILES_NAMES[^=\n]*= \{(.*?)\}", re.DOTALL)
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("tokenization_*.py")]
    tables = [found for source in sources for found in table.findall(source)]
    names = {name for found in tables for name in re.findall(r':\s*"([^"]+)"', found)}
    assert len(names) > 20
    for name in names:
        (base_dir / name).touch()
    assert names <= set(content_of(base_dir).files)


def test_beside_whole_weights_an_index_counts_and_its_shards_do_not(base_dir):
    """transformers reads the one file; see `_get_resolved_checkpoint_files`."""
    from holdfast.models.fingerprint import model_fingerprint
    from holdfast.models.handle import load_model

    before = model_fingerprint(load_model(base_dir))
    shutil.copyfile(base_dir / "model.safetensors", base_dir / "a.safetensors")
    (base_dir / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}', encoding="utf-8")
    assert {"model.safetensors", "model.safetensors.index.json"} <= set(content_of(base_dir).files)
    assert "a.safetensors" not in content_of(base_dir).files
    (base_dir / "a.safetensors").write_bytes(b"not read")
    assert model_fingerprint(load_model(base_dir)) == before


@pytest.mark.parametrize("name", ["../base/model.safetensors", "/tmp/x.safetensors", "x.bin", "a/b.safetensors", ""])
def test_a_shard_is_a_plain_name(base_dir, name):
    (base_dir / "model.safetensors").rename(base_dir / "x.safetensors")
    index = {"metadata": {}, "weight_map": {"w": name}}
    (base_dir / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not the plain name of a safetensors file"):
        content_of(base_dir)


def test_a_link_stands_for_what_it_leads_to(base_dir, tmp_path):
    """The hub cache links its snapshots to its blobs; what loading reads is what is hashed."""
    before = content_of(base_dir).sha256
    blob = tmp_path / "blob"
    (base_dir / "model.safetensors").rename(blob)
    (base_dir / "model.safetensors").symlink_to(blob)
    assert content_of(base_dir).sha256 == before
    blob.write_bytes(flipped(blob, -1))
    assert content_of(base_dir).sha256 != before


@pytest.mark.parametrize("name", ["vocab.txt", "model.safetensors"])
def test_a_pipe_is_refused_and_not_opened(base_dir, name):
    (base_dir / name).unlink(missing_ok=True)
    os.mkfifo(base_dir / name)
    with pytest.raises(CheckpointError, match="no regular file"):
        content_of(base_dir)


def test_a_chain_of_adapters_counts_down_to_the_full_model(adapter_dir, base_dir, tmp_path):
    upper = Path(shutil.copytree(adapter_dir, tmp_path / "upper"))
    edit_config(upper, base_model_name_or_path=str(adapter_dir))
    names = set(content_of(upper).files)
    assert {"adapter_model.safetensors", "base/adapter_model.safetensors", "base/base/model.safetensors"} <= names
    below = {f"base/{name}": digest for name, digest in content_of(adapter_dir).files.items()}
    assert below.items() <= content_of(upper).files.items()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "owner/repo--modeling.M"}}),
        ("config.json", {"attn_implementation": "sdpa", "transformers_weights": None}),
        ("config.json", {"quantization_config": {"quant_method": "gptq", "meta": {"uri": "https://x/y"}}}),
        ("tokenizer_config.json", {"tokenizer_file": None, "init_inputs": [], "special_tokens_map_file": "/home/x/y"}),
    ],
)
def test_what_opens_nothing_is_not_refused(base_dir, name, values):
    """Keys that real models carry; without trust, code of another repository is not followed."""
    path = base_dir / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values), encoding="utf-8")
    content_of(base_dir)


# -- hashed again ------------------------------------------------------------------------------------------------------


def test_nothing_changed(adapter_dir, base_dir):
    contents = [content_of(base_dir), content_of(adapter_dir), content_of(adapter_dir, base=base_dir)]
    require_unchanged(contents)


def test_a_change_is_named_whatever_its_time_stamp(base_dir, monkeypatch):
    monkeypatch.setattr(content_module, "LARGE", 0)  # every hash is remembered by its time stamp
    content = content_of(base_dir)
    weights = base_dir / "model.safetensors"
    old = weights.stat()
    weights.write_bytes(flipped(weights, -1))
    os.utime(weights, ns=(old.st_atime_ns, old.st_mtime_ns))
    with pytest.raises(CheckpointError, match=r"hashed before it was measured: model\.safetensors was changed"):
        require_unchanged([content])


@pytest.mark.parametrize(("act", "word"), [("add", "vocab.txt was added"), ("remove", "tokenizer.json was removed")])
def test_files_that_come_and_go(base_dir, act, word):
    content = content_of(base_dir)
    if act == "add":
        (base_dir / "vocab.txt").touch()
    else:
        (base_dir / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=word):
        require_unchanged([content])


def test_a_folder_that_is_gone(base_dir):
    content = content_of(base_dir)
    shutil.rmtree(base_dir)
    with pytest.raises(CheckpointError, match="no such folder"):
        require_unchanged([content])


def test_of_a_pair_the_base_s_change_is_named(adapter_dir, base_dir):
    contents = [content_of(adapter_dir)]
    (base_dir / "config.json").write_text((base_dir / "config.json").read_text() + " ", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"base/config\.json was changed"):
        require_unchanged(contents)
