"""A finished run on the hub: its weights, tokenizer and card, and nothing else of its folder."""

from pathlib import Path

from holdfast.core.adapter_card import HUB_ID
from holdfast.core.errors import ConfigError, ResourceError
from holdfast.reporting.card import card_text, is_ours_to_write
from holdfast.reporting.read import read_evidence

SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt"}
CARD = "README.md"


def push_to_hub(run: str | Path, repository: str, *, private: bool = False) -> str:
    """Upload what a run trained in one commit, with the card that `report` writes; returns the address.

    The card's `model-index` has the bound, alpha and hash of a certificate of these very weights, and the refusals and
    answers kept. A card with a user's own text goes along as it is. The key is the one that the hub's own tools use.

    Raises:
        ConfigError: the folder has no finished run with weights, or the repository's name is not `owner/name`.
        ResourceError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"{repository!r} is no repository of a hub", remedy="write it as OWNER/NAME")
    evidence = read_evidence(Path(run))
    folder = evidence.folder / ("adapter" if (evidence.folder / "adapter").is_dir() else "model")
    found = [path for path in sorted(folder.glob("*")) if path.suffix in SUFFIXES]
    files = [path for path in found if path.is_file() and not path.is_symlink()]  # a link may lead anywhere
    weights = any(path.suffix == ".safetensors" for path in files) and not folder.is_symlink()
    if not weights or not evidence.trained or evidence.unfinished:
        raise ConfigError(
            f"{run} has no trained model to push", remedy="name the output_dir of a finished `holdfast train` run"
        )
    own = folder / CARD
    kept = own.is_file() and not own.is_symlink() and not is_ours_to_write(own)
    card = own.read_bytes() if kept else card_text(evidence).encode("utf-8")
    added = [CommitOperationAdd(path.name, path) for path in files] + [CommitOperationAdd(CARD, card)]
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.create_commit(repository, added, commit_message="A model fine-tuned with holdfast")
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:200]
        raise ResourceError(
            f"{repository} was not pushed: {cause}",
            remedy="check the network and HF_TOKEN (or `hf auth login`), which needs the right to write there",
        ) from error
    return str(address)
