from pathlib import Path

import pytest
from tiny_checkpoints import tiny_llama, tiny_tokenizer

from holdfast.models.embedded import embedded_model_dir


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def embedded() -> Path:
    """The embedded model's folder, in the cache that all tests share."""
    return embedded_model_dir()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub look-ups fail at once instead of waiting for a network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
