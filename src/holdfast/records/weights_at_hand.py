"""The content of a model that is on this machine, by `holdfast.models.content`; nothing is downloaded for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, HoldfastError
from holdfast.core.files import read_json

EMBEDDED = "embedded"
ADAPTER_CONFIG = "adapter_config.json"
MAX_CHAIN = 8
"""Adapters on adapters; an adapter may name itself as its base."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class NotAtHandError(ConfigError):
    """The weights are not on this machine, or cannot be read."""


def content_at_hand(ref: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> str:
    """sha256 of a model's content, of an adapter with its base.

    Args:
        ref: folder, hub id in the local cache, or `embedded`.
        revision: of a hub id.
        trust_remote_code: count the repository's code; none of it runs.

    Raises:
        NotAtHandError: it, or the base of an adapter, is not here.
    """
    from holdfast.models.content import content_of

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        if str(ref) == EMBEDDED:
            return content_of(EMBEDDED, **options).sha256
        folder = _folder(ref, revision)
        base = _base_folder(folder)
        return content_of(folder, base=base, **options).sha256
    except NotAtHandError:
        raise
    except (HoldfastError, OSError, ValueError) as error:
        what = error.what if isinstance(error, HoldfastError) else type(error).__name__
        raise NotAtHandError(f"the model {ref} cannot be read: {what}", remedy=_remedy(ref)) from error


def _folder(ref: str | Path, revision: str | None) -> Path:
    """A local folder, or that of a hub id in the local cache."""
    path = Path(ref).expanduser()
    if str(ref) and path.is_dir():
        return path
    if isinstance(ref, str) and _HUB_ID.fullmatch(ref):
        from huggingface_hub import snapshot_download

        try:
            return Path(str(snapshot_download(ref, revision=revision, local_files_only=True)))
        except Exception as error:
            raise NotAtHandError(f"the model {ref} is not in the local hub cache", remedy=_remedy(ref)) from error
    raise NotAtHandError(f"the model {ref} is not on this machine", remedy=_remedy(ref))


def _base_folder(folder: Path) -> Path | str | None:
    """Where an adapter's base lies, when it is not the folder that the adapter names; None otherwise."""
    moved: Path | str | None = None
    place = folder
    for depth in range(MAX_CHAIN):
        if not (place / ADAPTER_CONFIG).is_file():
            return moved
        config = read_json(place / ADAPTER_CONFIG)
        named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
        if not isinstance(named, str):
            raise NotAtHandError(f"the adapter {place} names no base", remedy=_remedy(place))
        if named == EMBEDDED and depth == 0:
            return EMBEDDED
        below = _folder(named, config.get("revision"))
        if not Path(named).expanduser().is_dir():
            if depth > 0:
                raise NotAtHandError(f"the base {named} of {place} is not a folder", remedy=_remedy(named))
            moved = below
        place = below
    raise NotAtHandError(f"the adapter {folder} rests on more than {MAX_CHAIN} others", remedy=_remedy(folder))


def _remedy(ref: object) -> str:
    return f"put {ref} where it was (a hub model: hf download {ref}), then ask again"
