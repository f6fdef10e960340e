"""Where a model is, and that finding out and hashing it needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.core.errors import ConfigError
from holdfast.models.source import resolve


def test_hashing_a_folder_imports_no_torch(base_dir, tmp_path):
    """`holdfast report` compares a stored hash with the folder on machines without torch."""
    code = (
        "import sys\n"
        "from holdfast.models.content import content_of, require_unchanged\n"
        "content = content_of(sys.argv[1])\n"
        "require_unchanged([content])\n"
        "print(content.sha256, *sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    run = [sys.executable, "-c", code, str(base_dir)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    from holdfast.models.content import content_of

    assert done.stdout.split() == [content_of(base_dir).sha256]


@pytest.mark.parametrize("ref", ["~no-such-user/x", "x\0y", "a" * 5000, "owner/" + "n" * 300, "-x", "../x", "ä/b"])
def test_what_is_neither_a_folder_nor_a_hub_id(ref):
    with pytest.raises(ConfigError) as refused:
        resolve(ref, None, False)
    assert len(refused.value.what) < 1000


def test_a_hub_id_that_the_cache_holds_is_a_folder(tmp_path, monkeypatch, base_dir):
    import huggingface_hub

    def cached(repository, *, revision, local_files_only):
        assert (repository, revision, local_files_only) == ("owner/name", "v1", True)
        return str(base_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert resolve("owner/name", "v1", False).place == str(base_dir)


def test_what_the_hub_holds_is_hashed_and_loaded_as_one_snapshot(monkeypatch, base_dir):
    """A branch may move between hashing and loading: both read the folder of one commit."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    from holdfast.models.content import content_of
    from holdfast.models.handle import load_pair

    def absent(*_, **__):
        raise EntryNotFoundError("no adapter")

    monkeypatch.setattr("holdfast.models.source.reachable", lambda *_: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", absent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(base_dir))
    assert content_of("owner/name").sha256 == content_of(base_dir).sha256
    model, tokenizer = load_pair("owner/name")
    assert model.name_or_path == tokenizer.name_or_path == "owner/name", "an adapter on it names the hub id"
