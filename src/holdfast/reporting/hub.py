"""A finished run on the hub: its weights, tokenizer and card, and nothing else of its folder."""

import json
from fnmatch import fnmatch
from pathlib import Path

from holdfast.core.adapter_card import ADAPTER_FILES, HUB_ID, MODEL_FILES
from holdfast.core.errors import ConfigError, ResourceError
from holdfast.reporting.card import card_text, is_ours_to_write
from holdfast.reporting.read import read_evidence

CARD, ADAPTER_CONFIG, BASE = "README.md", "adapter_config.json", "base_model_name_or_path"


def push_to_hub(run: str | Path, repository: str, *, private: bool = False) -> str:
    """Upload what a run trained in one commit, with the card that `report` or the user wrote; returns the address.

    Raises:
        ConfigError: the folder has no finished run with weights, or the repository's name is not `owner/name`.
        ResourceError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"{repository!r} is no repository of a hub", remedy="write it as OWNER/NAME")
    evidence = read_evidence(Path(run))
    folder = evidence.folder / ("adapter" if (evidence.folder / "adapter").is_dir() else "model")
    names = ADAPTER_FILES if folder.name == "adapter" else MODEL_FILES
    found = [path for path in sorted(folder.glob("*")) if any(fnmatch(path.name, name) for name in names)]
    files = [path for path in found if path.is_file() and not path.is_symlink()]  # a link may lead anywhere
    weights = any(path.suffix == ".safetensors" for path in files) and not folder.is_symlink()
    if not weights or not evidence.trained or evidence.unfinished:
        raise ConfigError(
            f"{run} has no trained model to push", remedy="name the output_dir of a finished `holdfast train` run"
        )
    own = folder / CARD
    kept = own.is_file() and not own.is_symlink() and not is_ours_to_write(own)
    card = own.read_bytes() if kept else card_text(evidence).encode("utf-8")
    added = [CommitOperationAdd(path.name, _content(path)) for path in files] + [CommitOperationAdd(CARD, card)]
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private or None, exist_ok=True)  # None: as the owner has set it
        public = private and not api.repo_info(repository).private
        if not public:
            api.create_commit(repository, added, commit_message="A model fine-tuned with holdfast")
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:200]
        raise ResourceError(
            f"{repository} was not pushed: {cause}",
            remedy="check the network and HF_TOKEN (or `hf auth login`), which needs the right to write there",
        ) from error
    if public:
        what = f"{repository} exists already and is public: nothing was pushed"
        raise ConfigError(what, remedy="name another repository, make this one private, or leave --private out")
    return str(address)


def _content(path: Path) -> Path | bytes:
    """A file as it is sent: an adapter's base that is a folder by its name alone, since a path tells of the machine."""
    if path.name != ADAPTER_CONFIG:
        return path
    settings = json.loads(path.read_text(encoding="utf-8"))
    base = settings.get(BASE)
    if not isinstance(base, str) or HUB_ID.fullmatch(base):
        return path
    return json.dumps(settings | {BASE: Path(base).name}, indent=2).encode("utf-8")
